"""``paddle-rollout score``: logprobs of given tokens, beside those that came with them."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from api.cli.connect import connect, explained

_AT_ONCE = 256
"""Samples that are scored in one request."""


class Given(msgspec.Struct, frozen=True):
    """A line of the file. logprobs: what sampling reported, if anybody kept it."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None = None


def run(file: Path, fields: dict[str, Any], as_json: bool, url: str | None, name: str, token: str | None) -> int:
    """A line for each line; returns the exit status."""
    fields = {name: value for name, value in fields.items() if value is not None}
    with explained(), connect(url, name, token) as client:
        samples = _read(file)
        for start in range(0, len(samples), _AT_ONCE):
            some = samples[start : start + _AT_ONCE]
            scores = client.score([s.prompt_ids for s in some], [s.token_ids for s in some], **fields)
            for number, (sample, score) in enumerate(zip(some, scores.outputs, strict=True), start):
                numbered = msgspec.structs.replace(score, index=number)  # of all, not of those of one request
                line = msgspec.json.encode(numbered).decode() if as_json else _said(sample, score.logprobs)
                end = "" if as_json else f"  version {score.weight_version}"
                sys.stdout.write(f"{line}{end}\n")
            sys.stdout.flush()
    return 0


def _read(file: Path) -> list[Given]:
    """Raises OSError, and ValueError that names the line."""
    lines = (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).splitlines()
    samples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                samples.append(msgspec.json.decode(line, type=Given))
            except msgspec.DecodeError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
    if not samples:
        raise ValueError(f'{file} is empty: write a line {{"prompt_ids": [...], "token_ids": [...]}} for each sample')
    return samples


def _said(sample: Given, found: list[float] | None) -> str:
    if found is None:
        return f"{len(sample.token_ids)} tokens  aborted"
    said = f"{len(found)} tokens  logprob {sum(found):.4f}"
    if sample.logprobs is None:
        return said
    if len(sample.logprobs) != len(found):
        return f"{said}  {len(sample.logprobs)} logprobs were given"
    worst = max(abs(one - other) for one, other in zip(sample.logprobs, found, strict=True))
    return (
        f"{said}  as given, to the bit" if sample.logprobs == found else f"{said}  up to {worst:.2g} from those given"
    )

"""``paddle-rollout generate``: text as it is sampled."""

import sys
from typing import Any

import msgspec

from api.cli.connect import connect, explained


def run(prompt: str, fields: dict[str, Any], as_json: bool, url: str | None, name: str, token: str | None) -> int:
    """Print continuations; returns the exit status."""
    text = sys.stdin.read() if prompt == "-" else prompt
    fields = {name: value for name, value in fields.items() if value is not None}
    with explained(), connect(url, name, token) as client:
        if as_json:
            _write(msgspec.json.encode(client.generate(text, **fields)).decode() + "\n")
        elif fields.get("n", 1) > 1:
            for output in client.generate(text, **fields).outputs:
                _write(f"[{output.index}] {output.text}\n")
        else:
            for piece in client.stream(text, **fields):
                _write("".join(output.text or "" for output in piece.outputs))
            _write("\n")
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

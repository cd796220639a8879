"""Write docs/dialects.md, which routes and fields of each dialect are offered, from the code, or check that it is so.

Usage: python -m scripts.render_dialects [--check]
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel

from api.absent import ABSENT
from api.app import ROUTERS
from api.config import ANY_MODEL
from api.fields import HARMLESS, MISPLACED, REFUSED, Refused
from api.schemas import sglang
from api.schemas.openai import (
    COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from api.schemas.sglang import SglangGenerate, SglangSampling
from api.schemas.tokens import TokenRequest, TokenSampling
from scripts.generated_page import write_or_check
from scripts.peer_fields import FACTS

PAGE = Path(__file__).parent.parent / "docs" / "dialects.md"
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "openai": "OpenAI's SDK"}
BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "stream_options": StreamOptions,
    "/inference/v1/generate": TokenRequest,
    "/inference/v1/generate sampling_params": TokenSampling,
    "/generate": SglangGenerate,
    "/generate sampling_params": SglangSampling,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/pause_generation": sglang.SglangPause,
    "/continue_generation": sglang.SglangContinue,
    "/update_weights_from_disk": sglang.DiskUpdate,
    "/update_weight_version": sglang.NewVersion,
    "/abort_request": sglang.AbortRid,
    "/release_memory_occupation": sglang.MemoryTags,
    "/resume_memory_occupation": sglang.MemoryTags,
    "/weights_checker": sglang.WeightsChecker,
    "/get_weights_by_name": sglang.WeightsByName,
}
"""Route, or part of its body -> what takes it."""

INTRODUCTION = """\
# Dialects

Written by `python -m scripts.render_dialects` from the routes, the request schemas and `api/fields.py`; edit those, not
this page. What other servers have was read from the sources of {versions} by `scripts/peer_fields.py`."""

LENGTHS = """\
## Lengths and names

| route | tokens when nobody says | more than the context leaves |
| --- | --- | --- |
| `/v1/completions` | {completion} | 400 |
| `/v1/chat/completions`, `/inference/v1/generate` | what fits | 400 |
| `/generate` of SGLang; null: what fits | {sglang} | 400 |
| `/generate` of older TRL (`prompts`) | {completion} | 400 |
| `/v1/rollout/generate` | what fits | cut to what fits; `finish_reason` is `length` |

A prompt or a length that does not fit is a 400 with the code `context_length_exceeded` and the words "maximum context
length is N tokens". A default is cut to what fits.

`model` may be left out. Where it is given it is the name in `/v1/models`, one of `api.model_aliases`, the checkpoint's
directory or its name, or `{any}`; or the name of an adapter that is loaded, alone or as `base:adapter`
([lora.md](lora.md)). Any other name is a 404 with the code `model_not_found`. SGLang's `lora_path` names adapters too.

How calls of tools and reasoning are read out of the text, and what output can be held to, is in
[agents.md](agents.md)."""

FIELDS = """\
## Fields

Every field of those servers' own request schemas is one of these, and a test fails for a new one until it is:

- **done**: it has the meaning that its owner gives it;
- **refused**: it would change the answer, so any value but null, false, an empty one or those named below is answered
  with a 400 that names the field (`error.param`) and says what to do instead;
- **ignored**: it leaves the answer as it is, so any value is accepted.

Fields that nobody lists are accepted and ignored on the routes of other servers; `/v1/rollout/...` refuses them."""


def render() -> str:
    """The whole page."""
    facts: dict[str, Any] = json.loads(FACTS.read_text())
    versions = ", ".join(f"{NAMES[project]} {of['version']}" for project, of in facts.items())
    default = SglangSampling.model_fields["max_new_tokens"].default
    lengths = LENGTHS.format(completion=COMPLETION_TOKENS, sglang=default, any=ANY_MODEL)
    parts = [INTRODUCTION.format(versions=versions), lengths, FIELDS]
    parts += [_body(part, facts) for part in BODIES]
    parts += [_reasons(), _routes(facts)]
    return "\n\n".join(parts) + "\n"


def _body(part: str, facts: dict[str, Any]) -> str:
    """One route, or part of a body: what becomes of each field."""
    done = BODIES[part].model_fields.keys()
    owners: dict[str, list[str]] = defaultdict(list)
    for project, of in facts.items():
        for name in of["bodies"].get(part, ()):
            owners[name].append(NAMES[project])
    rows = [
        ("done", [name for name in owners if name in done]),
        ("refused", [name for name in owners if name in REFUSED and name not in done]),
        ("ignored", [name for name in owners if name in HARMLESS and name not in done]),
        ("done, only here", [name for name in done if name not in owners]),
    ]
    title, _, inner = part.partition(" ")
    heading = f"### `{title}`" + (f", `{inner}`" if inner else "")
    listed = " and ".join(NAMES[project] for project, of in facts.items() if part in of["bodies"])
    table = [f"| | fields of {listed} |", "| --- | --- |"]
    table += [f"| {what} | {_names(names)} |" for what, names in rows if names]
    return "\n".join([heading, "", *table])


def _reasons() -> str:
    ignored: dict[str, list[str]] = defaultdict(list)
    for name, reason in HARMLESS.items():
        ignored[reason].append(name)
    lines = ["### Why refused", "", *_refusals(REFUSED)]
    lines += ["", "### Refused on routes that generate, where another route or place reads them", ""]
    lines += _refusals(MISPLACED)
    lines += ["", "### Why ignored", "", "| fields | they say |", "| --- | --- |"]
    lines += [f"| {_names(names)} | {reason} |" for reason, names in ignored.items()]
    return "\n".join(lines)


def _refusals(rules: dict[str, Refused]) -> list[str]:
    refused: dict[Any, list[str]] = defaultdict(list)
    for name, rule in rules.items():
        refused[rule.advice, json.dumps(rule.unless)].append(name)
    lines = ["| fields | not refused | the answer says |", "| --- | --- | --- |"]
    for (advice, unless), names in refused.items():
        values = ", ".join(f"`{json.dumps(value)}`" for value in json.loads(unless))
        lines.append(f"| {_names(names)} | {values} | {advice} |")
    return lines


def _routes(facts: dict[str, Any]) -> str:
    ours: dict[str, set[str]] = defaultdict(set)
    for router in ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute):
                ours[_path(route.path)] |= route.methods or set()
    theirs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for project, of in facts.items():
        for route in of["routes"]:
            method, path = route.split()
            theirs[_path(path)][project].add(method)
    projects = [project for project, of in facts.items() if of["routes"]]
    head = ["", "| route | " + " | ".join(NAMES[p] for p in projects) + " | here |"]
    head += ["| --- |" + " --- |" * (len(projects) + 1)]

    def row(path: str) -> str:
        cells = [_methods(theirs[path][project]) for project in projects] + [_methods(ours.get(path, ()))]
        return f"| `{path}` | " + " | ".join(cells) + " |"

    offered = ["## Routes that are offered", *head, *(row(path) for path in sorted(ours))]
    why: dict[str, list[str]] = defaultdict(list)
    for path, reason in ABSENT.items():
        why[reason].append(path)
    absent = ["", "## Routes that are absent", "", "They are answered with a 404 that says:", ""]
    absent += [
        "| routes | why |",
        "| --- | --- |",
        *(f"| {_names(paths)} | {reason} |" for reason, paths in why.items()),
    ]
    return "\n".join(offered + absent)


def _path(path: str) -> str:
    """Names of parameters differ between servers."""
    return re.sub(r"\{\w+(:\w+)?\}", "{}", path)


def _methods(methods: Iterable[str]) -> str:
    return " ".join(sorted(methods))


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def main() -> int:
    """Exit status 1 when --check finds another text."""
    return write_or_check(PAGE, render, __doc__)


if __name__ == "__main__":
    sys.exit(main())

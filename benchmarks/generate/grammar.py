"""What it costs to be held to a grammar, at 16 sequences of 32 prompt tokens and 96 new ones.

    python -m benchmarks.generate.grammar --dtype bfloat16 [--rounds 5] [--budget 270]

SmolLM2-135M, temperature 1. Cases: nothing is held; `json`, records of a schema in a list that does not end; `text`,
a regular expression that leaves almost every token; and `beside`, eight of `json` with eight that are not held, whose
steps they share. In a round every case runs once, another one first in each; ratios are taken within the round.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generate.rounds import Round, Section, arguments
from benchmarks.generate.servers import Service, answers

COUNT, LENGTH, NEW = 16, 32, 96
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "kind": {"enum": ["new", "known", "gone"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
JSON = {"json_schema": {"type": "array", "items": PERSON, "minItems": 1000}}
TEXT = {"regex": r"(.|\n)*"}
CASES: dict[str, list[dict[str, Any] | None]] = {
    "plain": [None] * COUNT,
    "json": [JSON] * COUNT,
    "text": [TEXT] * COUNT,
    "beside": [JSON, None] * (COUNT // 2),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    args = parser.parse_args()
    section = Section(args.out, f"grammar/{args.dtype}", args.rounds, args.budget)
    if not section.lacking:
        return
    logs = Path(tempfile.mkdtemp(prefix="bench-generate-log-"))
    service = Service("service", args.model, args.dtype, logs / "service.log")
    random = np.random.default_rng()
    try:
        service.settle()
        one_round(service, random, 0, 8)
        section.collect(lambda number: one_round(service, random, number, NEW))
    finally:
        service.close()


def one_round(service: Service, random: np.random.Generator, number: int, new: int) -> Round:
    """Tokens per second of every case."""
    names = list(CASES)
    first = number % len(names)
    return {name: measure(service, random, CASES[name], new) for name in [*names[first:], *names[:first]]}


def measure(service: Service, random: np.random.Generator, constraints: list[dict[str, Any] | None], new: int) -> float:
    prompts = random.integers(1000, 40000, (COUNT, LENGTH)).tolist()
    bodies = [
        {"prompt_ids": ids, "max_tokens": new, "ignore_eos": True, "constraint": constraint}
        for ids, constraint in zip(prompts, constraints, strict=True)
    ]
    found, seconds = asyncio.run(answers(f"{service.url}/v1/rollout/generate", bodies))
    tokens = sum(len(output["token_ids"]) for reply in found for output in reply["outputs"])
    if tokens != COUNT * new:
        raise RuntimeError(f"{tokens} tokens of {COUNT * new}")
    return round(tokens / seconds, 1)


if __name__ == "__main__":
    main()

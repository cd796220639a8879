"""Whether tokens and logprobs have the same bits however requests are served, on a real model.

    python -m benchmarks.numerics.bits [--requests 200] [--tokens 12] [--dtype float32 bfloat16] [--only CONDITION ...]
        [--kept FILE]

Each request, with a prompt and a seed of its own, is served alone; then all are served 64 at a time, with so few KV
blocks that sequences are preempted, from a warm prefix cache, in steps of few tokens so that prompts are cut, and by
another process with another number of threads; and what was sampled is scored. Ids must be equal and logprobs to the
last bit. Ends with status 1 when any differs, or when a condition did not come about. All of it takes some ten minutes
a dtype on two cores; --only takes some of the conditions, and --kept keeps what was answered alone for the next ones.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generate.rounds import MODEL
from benchmarks.numerics.price import HERE

Answer = tuple[list[int], list[str]]
"""Tokens, and their logprobs in hex."""
_USUAL, _LONGEST = 40, 180
"""Tokens of a prompt, at most: of four in five, and of the fifth, which has more cells than a panel of attention."""
_CONTEXT = 256
_FEW_BLOCKS = 60
_CHUNKS = (8, 13, 29, 61)
CONDITIONS = {
    "among": "among 64",
    "preempted": "after preemption ({:g} times)",
    "cached": "from the prefix cache ({:g} tokens)",
    "chunked": "in chunks",
    "scored": "scored",
    "elsewhere": "another process, one thread",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", choices=list(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--kept", type=Path, help="a file for answers alone, of runs of the same code")
    parser.add_argument("--replica", action="store_true", help="tell the answers 64 at a time, as JSON")
    args = parser.parse_args()
    from worker.cpu.tuning import tune

    tune(None, 1)
    wrong = 0
    for dtype in args.dtype:
        replica = Replica(args.model, dtype, args.requests, args.tokens)
        if args.replica:
            print(json.dumps(replica.served(64)[0]))
            continue
        alone = replica.alone(args.kept.with_suffix(f".{dtype}.json") if args.kept else None)
        for condition in args.only:
            found, came_about = replica.under(condition, args)
            differing = sum(one != other for one, other in zip(found, alone, strict=True))
            wrong += bool(differing) + (came_about == 0)
            said = CONDITIONS[condition].format(came_about)
            print(f"{dtype}: {said}: {len(found)} requests, {differing} differ from alone", flush=True)
    raise SystemExit(int(wrong > 0))


class Replica:
    """An engine, and the requests it is asked."""

    def __init__(self, model: Path, dtype: str, requests: int, tokens: int) -> None:
        from benchmarks.numerics.steps import engine_of

        self._engine = engine_of(model, dtype, deterministic="on", max_tokens_per_step=1024)
        random = np.random.default_rng(0)
        longest = [_USUAL, _USUAL, _USUAL, _USUAL, _LONGEST]
        self._prompts = [
            random.integers(1000, 40000, int(random.integers(5, longest[i % len(longest)]))).tolist()
            for i in range(requests)
        ]
        self._tokens, self._dtype = tokens, dtype

    def alone(self, kept: Path | None) -> list[Answer]:
        """Of each request, served with no other; those that are kept already are not served again."""
        text = kept.read_text() if kept and kept.exists() else "[]"
        found: list[Answer] = [(ids, hexes) for ids, hexes in json.loads(text)][: len(self._prompts)]
        for i in range(len(found), len(self._prompts)):
            found += self.served(1, only=[i])[0]
            if kept:
                kept.write_text(json.dumps(found))
        return found

    def under(self, condition: str, args: argparse.Namespace) -> tuple[list[Answer], float]:
        """The answers, and how often what the condition is named for came about."""
        match condition:
            case "among":
                return self.served(64)
            case "preempted":
                return self.served(64, blocks=_FEW_BLOCKS, counts="preempted")
            case "cached":
                return self.served(64, again=True, counts="prefix_hits")
            case "chunked":
                return self._chunked(), 1
            case "scored":
                return self._scored(self.served(64)[0]), 1
            case _:
                return self._elsewhere(args), 1

    def _chunked(self) -> list[Answer]:
        found: dict[int, Answer] = {}
        for index, most in enumerate(_CHUNKS):
            mine = range(index, len(self._prompts), len(_CHUNKS))
            found |= zip(mine, self.served(8, most=most, only=mine)[0], strict=True)
        return [found[i] for i in range(len(self._prompts))]

    def served(
        self,
        batch: int,
        *,
        blocks: int | None = None,
        most: int = 1024,
        again: bool = False,
        only: Sequence[int] | None = None,
        counts: str = "",
    ) -> tuple[list[Answer], float]:
        """Answers in order, and the scheduler's counter of that name. again: served twice, told the second time."""
        from worker.messages import SamplingParams

        chosen = list(range(len(self._prompts)) if only is None else only)
        scheduler = self._scheduler(batch, blocks, most, cache=again)
        for _ in range(1 + again):
            wanted = {
                i: (self._prompts[i], SamplingParams(max_tokens=self._tokens, seed=i, ignore_eos=True)) for i in chosen
            }
            found = {
                i: (list(chunk.token_ids), [p.hex() for p in chunk.logprobs])
                for i, chunk in self._run(scheduler, wanted).items()
            }
        return [found[i] for i in chosen], scheduler.counters[counts] if counts else 1

    def _scored(self, answers: list[Answer]) -> list[Answer]:
        from worker.messages import SamplingParams

        scheduler = self._scheduler(64, None, 1024, cache=True)
        how = SamplingParams(max_tokens=0, prompt_logprobs=0)
        wanted = {i: (self._prompts[i] + ids, how) for i, (ids, _) in enumerate(answers)}
        found = self._run(scheduler, wanted, from_prompt=True)
        return [
            (ids, [entries[0][1].hex() for entries in found[i].prompt_logprobs]) for i, (ids, _) in enumerate(answers)
        ]

    def _scheduler(self, batch: int, blocks: int | None, most: int, *, cache: bool) -> Any:
        from worker.scheduler import Scheduler

        spec = replace(self._engine.spec, num_blocks=blocks or self._engine.spec.num_blocks, max_model_len=_CONTEXT)
        return Scheduler(spec, None, max_batch=batch, max_tokens_per_step=most, prefix_caching=cache)

    def _run(self, scheduler: Any, wanted: dict[int, Any], *, from_prompt: bool = False) -> dict[int, Any]:
        from worker.messages import Generate
        from worker.versions import NO_VERSION

        for i, (prompt, sampling) in wanted.items():
            first = len(self._prompts[i]) if from_prompt else 0
            scheduler.add(b"api", Generate(str(i), prompt, sampling, score_from=first))
        found = {}
        while not scheduler.idle:
            batch = scheduler.schedule(NO_VERSION)
            if batch is not None:
                scheduler.apply(self._engine.forward(batch))
            for chunk in scheduler.take_outputs().get(b"api", []):
                found[int(chunk.request_id)] = chunk
        return found

    def _elsewhere(self, args: argparse.Namespace) -> list[Answer]:
        words = ["--model", str(args.model), "--requests", str(args.requests), "--tokens", str(args.tokens)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.numerics.bits", *words, "--dtype", self._dtype, "--replica"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=HERE,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return [(ids, hexes) for ids, hexes in json.loads(done.stdout.splitlines()[-1])]


if __name__ == "__main__":
    main()

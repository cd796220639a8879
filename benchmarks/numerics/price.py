"""What the same bits in any batch cost: decode steps with `deterministic` on, beside another engine in the same rounds.

    python -m benchmarks.numerics.price [--against DIR] [--model DIR] [--rounds 7] [--dtype float32 bfloat16]
        [--processor]

Beside it: the same tree with `deterministic` off, and with --against the engine of another checkout, such as one from
before there was such an option. The engines take turns, who is first too; the price is the median of the ratios within
rounds. SmolLM2-135M, 1, 16 and 64 sequences at 128 tokens of context.

Where others work on the same cores, time says little: with --processor the engines have one thread each, what counts is
the processor's seconds, and the price is that of the least of all rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.generate.contenders import in_turn
from benchmarks.generate.rounds import MODEL, Section
from benchmarks.numerics.asked import Asked

COUNTS = {1: 40, 16: 20, 64: 8}
"""Sequences, and steps in a round."""
_TIME, _PROCESSOR = "price/", "price of the processor/"
"""How sections begin."""
RESULTS = Path("benchmarks/results/numerics.json")
HERE = Path(__file__).parents[2]


class Stepper(Asked):
    """An engine of some tree, in a process that runs steps on request."""

    def __init__(self, name: str, tree: Path, model: Path, dtype: str, *, processor: bool, **settings: Any) -> None:
        words = ("--model", str(model.resolve()), "--dtype", dtype, "--settings", json.dumps(settings))
        threads = {"OMP_NUM_THREADS": "1"} if processor else {}
        env = {**os.environ, **threads, "PYTHONPATH": str(tree), "KMP_BLOCKTIME": "0"}
        self._told = "processor_seconds" if processor else "seconds"
        super().__init__(name, sys.executable, "steps.py", *words, env=env, cwd=tree, stderr=subprocess.DEVNULL)

    def seconds(self, count: int, steps: int) -> float:
        """Of a step: its median, or the processor's least."""
        return float(self.ask({"count": count, "steps": steps})[self._told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--processor", action="store_true", help="seconds of the processor, one thread")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for the rounds of a dtype")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    for dtype in args.dtype:
        of = "" if args.model == MODEL else f" of {args.model.name}"
        name = f"{_PROCESSOR if args.processor else _TIME}{dtype}{of}"
        section = Section(args.out, name, args.rounds, args.budget)
        if not section.lacking:
            continue
        where = args.model, dtype
        steppers = [Stepper("on", HERE, *where, processor=args.processor, deterministic="on")]
        try:
            steppers.append(Stepper("off", HERE, *where, processor=args.processor, deterministic="off"))
            if args.against is not None:
                steppers.append(Stepper("before", args.against.resolve(), *where, processor=args.processor))
            section.collect(lambda number, of=steppers: one_round(of, number))
        finally:
            for stepper in steppers:
                stepper.close()
    for row in rows(args.out):
        print(row)


def one_round(steppers: list[Stepper], number: int) -> dict[str, Any]:
    """Milliseconds of a step by number of sequences and engine."""
    return {
        str(count): {s.name: round(1e3 * s.seconds(count, steps), 3) for s in in_turn(steppers, number)}
        for count, steps in COUNTS.items()
    }


def rows(out: Path) -> list[str]:
    """The medians of the ratios within rounds; of the processor's seconds, the ratios of the least."""
    found = []
    for name, section in json.loads(out.read_text())["sections"].items():
        if not name.startswith((_TIME, _PROCESSOR)):
            continue
        least = name.startswith(_PROCESSOR)
        for count in map(str, COUNTS):
            rounds = [one[count] for one in section["rounds"]]
            for other in sorted(rounds[0].keys() - {"on"}):
                both = [(one["on"], one[other]) for one in rounds if other in one]
                if least:
                    milliseconds, beside = (min(figures) for figures in zip(*both, strict=True))
                    ratio = milliseconds / beside
                else:
                    milliseconds = statistics.median(one["on"] for one in rounds)
                    ratio = statistics.median(own / beside for own, beside in both)
                price = 100 * (ratio - 1)
                found.append(f"{name} {count} sequences: {milliseconds:.1f} ms a step, {price:+.1f} % over {other}")
    return found


if __name__ == "__main__":
    main()

"""Rounds of measurements, kept in one JSON file, so that a benchmark may be run in pieces of bounded length.

A section of the file holds the rounds of one comparison. A piece adds rounds until there are as many as wanted or its
time is up; the next piece goes on from there. Each round has the load average it began under.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
Round = dict[str, Any]
RESULTS = Path("benchmarks/results/generate.json")
MODEL = Path("models/SmolLM2-135M-Instruct")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What every piece is told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=5, help="of the whole section, earlier pieces included")
    parser.add_argument("--budget", type=float, default=270.0, help="seconds for rounds, once everything has started")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


class Section:
    """The rounds of one comparison."""

    def __init__(self, out: Path, name: str, rounds: int, budget_s: float, within_s: float = float("inf")) -> None:
        """budget_s: for rounds. within_s: for the whole piece; no round begins that would last longer, if it takes as
        long as the longest so far.
        """
        self._out, self._name, self._wanted = out, name, rounds
        self._budget_s, self._ends = budget_s, BEGAN + within_s

    @property
    def lacking(self) -> int:
        """Rounds still to be measured."""
        return max(0, self._wanted - len(self._rounds(read(self._out))))

    def collect(self, measure: Callable[[int], Round]) -> None:
        """Measure what is lacking, as far as time goes. `measure` gets the round's number."""
        until = min(time.monotonic() + self._budget_s, self._ends)
        longest = max(read(self._out)["sections"].get(self._name, {}).get("round_s", ()), default=0.0)
        while self.lacking and time.monotonic() + longest < until:
            began, load = time.monotonic(), round(os.getloadavg()[0], 2)
            found = {"load": load, **measure(len(self._rounds(read(self._out))))}
            print(f"{self._name}: {json.dumps(found)}", flush=True)
            took = time.monotonic() - began
            result = read(self._out)
            self._rounds(result).append(found)
            result["sections"][self._name].setdefault("round_s", []).append(round(took, 1))
            write(self._out, result)
            longest = max(longest, took)
        if self.lacking:
            print(
                f"{self._name}: {self.lacking} rounds are lacking, of up to {longest:.0f} s: run it again", flush=True
            )

    def note(self, **facts: Any) -> None:
        """Facts beside the rounds, each kept as the list of what the pieces found."""
        result = read(self._out)
        self._rounds(result)
        for name, fact in facts.items():
            result["sections"][self._name].setdefault(name, []).append(fact)
        write(self._out, result)

    def _rounds(self, result: dict[str, Any]) -> list[Round]:
        rounds: list[Round] = result["sections"].setdefault(self._name, {"rounds": []})["rounds"]
        return rounds


def read(out: Path) -> dict[str, Any]:
    """The file, or what it begins as."""
    if out.exists():
        found: dict[str, Any] = json.loads(out.read_text())
        return found
    return {"machine": machine(), "sections": {}}


def write(out: Path, result: dict[str, Any]) -> None:
    """Whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_suffix(".new")
    scratch.write_text(json.dumps(result, indent=1) + "\n")
    scratch.replace(out)


def machine() -> dict[str, Any]:
    """What the figures are true of."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": names[0] if names else platform.machine(),
        "bf16": [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags],
        "python": platform.python_version(),
    }

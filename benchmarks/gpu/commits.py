"""What a push costs those who generate: a stream's token gaps while a torch trainer on the same GPU pushes.

    python -m benchmarks.gpu.commits [--sequences 64] [--pushes 200] [--ways shm] [--out OUT.json]

64 sequences generate, one of them streamed to a process of its own, which notes when each token comes and which version
made it. They begin together and are as long, and pushes end before they do: no prompt is computed beside these. By way
of transport (`shm`: the arena, copied and proved by the rank; `cuda_ipc`: from GPU to GPU):

    step            median gap outside pushes: a step of the loop, as a client sees it
    during          gaps from a push's begin to its seal (moved and checked), in steps, mean and median
    commit_p50 p90 p99  the gap in which the version changes, in steps, over all commits
    quiet_p99       the same percentile of gaps that no push touches: what the clocks and the client add

A step takes longer the longer the sequences are, half as long again within a round. So each gap is compared with the
median of those gaps that no push touches within a quarter of a second of it.

Clocks of the processes are one (CLOCK_MONOTONIC).
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.direct import MODEL, PROMPT, SETTINGS, Trainer
from benchmarks.gpu.report import add_out, keep, on_gpus, report
from benchmarks.gpu.service import EmptyService
from benchmarks.gpu.shapes import SHAPES
from rollout_client import AsyncRolloutClient, RolloutClient
from weight_manager.garbage import collect_rarely

PAUSE_S = 0.05
LONGEST = 1900
"""New tokens of a request; at 64 sequences, some 5 s."""
BEGIN_S, ROUND_S, EACH = 1.8, 5.4, 34
"""Of a round: when its pushes begin and end at the latest, and how many there are at most."""
NEAR_S, LEAST_NEAR = 0.25, 10
"""Seconds around a gap whose quiet gaps, so many at least, say what a step takes there."""
Window = tuple[float, float]


def watch(url: str, stop: threading.Event) -> list[list[tuple[float, int, int]]]:
    """(when, tokens, version of the last) of each event, by request."""
    found = []
    collect_rarely()  # its own pauses are none of the service's
    prompt = np.random.default_rng(1).integers(1000, 150_000, PROMPT).tolist()
    with RolloutClient(url) as client:
        while not stop.is_set():
            events: list[tuple[float, int, int]] = []
            for piece in client.stream(prompt_ids=prompt, max_tokens=LONGEST, ignore_eos=True):
                output = piece.outputs[0]
                if output.token_ids:
                    events.append((time.monotonic(), len(output.token_ids), output.spans[-1].version))
                if stop.is_set():
                    break
            found.append(events)
    return found


async def generate(url: str, sequences: int) -> None:
    """The others, whole answers."""
    client = AsyncRolloutClient(url)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 150_000, PROMPT).tolist() for _ in range(sequences)]
    await asyncio.gather(*(client.generate(prompt_ids=p, max_tokens=LONGEST, ignore_eos=True) for p in prompts))
    await client.aclose()


def gaps(requests: list[list[tuple[float, int, int]]]) -> list[tuple[float, float, int, bool]]:
    """(from, to, tokens at the end of it, whether the version changed in it)."""
    found = []
    for events in requests:
        for before, after in pairwise(events[2:]):
            found.append((before[0], after[0], after[1], before[2] != after[2]))
    return found


def judged(mine: list[tuple[float, float, int, bool]], moves: list[Window], pushes: list[Window]) -> dict[str, Any]:
    """Figures of one way. moves: from begun to sealed. pushes: from when the trainer makes weights to 20 ms after the
    commit.
    """

    def touches(gap: tuple[float, float, int, bool], windows: list[Window]) -> bool:
        return any(gap[0] < end and start < gap[1] for start, end in windows)

    each = [((end - start) / count, (start, end, count, changes)) for start, end, count, changes in mine]
    quiet = [(value, gap) for value, gap in each if not touches(gap, pushes)]
    times, values = [gap[0] for _, gap in quiet], [value for value, _ in quiet]

    def in_steps(some: list[tuple[float, tuple[float, float, int, bool]]]) -> list[float]:
        """Each over the usual gap at its time; left out where none is near."""
        found = []
        for value, gap in some:
            near = values[bisect_left(times, gap[0] - NEAR_S) : bisect_left(times, gap[1] + NEAR_S)]
            if len(near) >= LEAST_NEAR:
                found.append(value / statistics.median(near))
        return found

    moving = in_steps([(value, gap) for value, gap in each if touches(gap, moves) and not gap[3]])
    changed = in_steps([(gap[1] - gap[0], gap) for _, gap in each if gap[3]])

    def percentile(share: float, some: list[float]) -> float | None:
        return round(float(np.percentile(some, share)), 2) if some else None

    return {
        "step_ms": round(1e3 * statistics.median(values), 3),
        "during": round(statistics.mean(moving), 3) if moving else None,
        "during_median": percentile(50, moving),
        "commits": len(changed),
        "commit_p50": percentile(50, changed),
        "commit_p90": percentile(90, changed),
        "commit_p99": percentile(99, changed),
        "quiet_p99": percentile(99, in_steps(quiet)),
        "tokens_an_event": round(statistics.mean(count for _, _, count, _ in mine), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.commits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--pushes", type=int, default=200, help="of each way")
    parser.add_argument("--ways", nargs="+", default=["shm", "cuda_ipc"], help="of transport (%(default)s)")
    add_out(parser)
    parser.add_argument("--watch", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--load", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    stop = threading.Event()
    if args.watch or args.load:
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
        if args.watch:
            print(json.dumps(watch(args.watch, stop)))
        else:
            asyncio.run(generate(args.load, args.sequences))
        return
    import torch

    log = Path(tempfile.mkdtemp(prefix="commits-")) / "service.log"
    options = on_gpus(SETTINGS)
    with EmptyService(SHAPES[MODEL], 1, log, *options) as service:
        trainer = Trainer(torch, service.push_endpoint)
        trainer.push("shm")
        while service.metric("rollout_replica_ready") != 1:
            time.sleep(0.05)
        for way in args.ways * 2:
            trainer.push(way)
        ways = {way: Way() for way in args.ways}
        while waiting(ways, args.pushes):
            for name, way in waiting(ways, args.pushes):
                a_round(service.url, trainer, name, way, args.sequences, args.pushes)
            result: dict[str, Any] = {"card": torch.cuda.get_device_name(), "sequences": args.sequences}
            for name, way in ways.items():
                totals = {"push_ms": round(statistics.median(way.totals), 1)}
                result[name] = totals | judged(way.gaps, way.moves, way.pushes)
            keep(result, args.out)  # each round, should it be cut short
    report(result, args.out)


@dataclass
class Way:
    """What was measured of one way of transport. totals: of its pushes, in milliseconds."""

    gaps: list[tuple[float, float, int, bool]] = field(default_factory=list)
    moves: list[Window] = field(default_factory=list)
    pushes: list[Window] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)


def waiting(ways: dict[str, Way], most: int) -> list[tuple[str, Way]]:
    """Those that have not had so many pushes yet."""
    return [(name, way) for name, way in ways.items() if len(way.pushes) < most]


def a_round(url: str, trainer: Trainer, name: str, way: Way, sequences: int, most: int) -> None:
    """Push while one set of sequences generates."""
    others, watcher = apart("--load", url, "--sequences", str(sequences - 1)), apart("--watch", url)
    start, first = time.monotonic(), len(way.pushes)
    time.sleep(BEGIN_S)
    while len(way.pushes) < min(most, first + EACH) and time.monotonic() < start + ROUND_S:
        made = time.monotonic()
        trainer.prepare()
        began = time.monotonic()
        seconds = trainer.send(name).seconds
        way.moves.append((began + seconds["begin"], began + seconds["total"] - seconds["commit"]))
        way.pushes.append((made, time.monotonic() + 0.02))
        way.totals.append(1e3 * seconds["total"])
        time.sleep(PAUSE_S)
    found, _ = watcher.communicate("")
    others.communicate("")
    span = way.pushes[first][0] - 0.3, way.pushes[-1][1] + PAUSE_S
    way.gaps += [gap for gap in gaps(json.loads(found)) if span[0] <= gap[0] <= span[1]]


def apart(*words: str) -> "subprocess.Popen[str]":
    """This module in a process of its own, until its standard input is closed."""
    command = [sys.executable, "-m", "benchmarks.gpu.commits", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main()

"""Where the time of a push goes, in the trainer, the store and the rank, and what steps take meanwhile.

    python -m benchmarks.gpu.timeline [--pushes 8] [--sequences 64] [--trainer cuda:1] [--out OUT.json]

A torch trainer pushes in turns by `shm`, `cuda_ipc` and so that versions are live before the arena has them, `device`
(benchmarks.gpu.direct), first to an idle replica, then while it generates. Functions are noted as they run
(benchmarks.gpu.noting), which makes a step some 0.2 ms longer. Medians over pushes, milliseconds from the call of
`push`: when a function first began and last ended, how often it ran, and how long in all. steps: of the rank's loop,
mean and longest, from a push's begin to its seal, in its commit, and at other times; ahead, taken_in: how many had been
launched ahead, and how many were waited for and none launched behind; preempted: how often the loop's thread had to
wait for a core. Of `device` live is when the version was, and all is "moving". late: of steps that no push touches, how
far apart they are (median, 90, 99 and 99.9 %), and what took longer in those that come more than a fifth late: mean
milliseconds of each function beyond its mean elsewhere, and in how many of them it ran.
"""

import argparse
import asyncio
import statistics
import threading
import time
from bisect import bisect_left
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.direct import MODEL, PROMPT, SETTINGS, Trainer
from benchmarks.gpu.noting import Note, folder_of, read
from benchmarks.gpu.report import add_out, keep, on_gpus
from benchmarks.gpu.service import SETTLE_S, EmptyService
from benchmarks.gpu.shapes import SHAPES
from rollout_client import AsyncRolloutClient, PushReport

LEAST_MS = 0.1
"""Functions that take less of a push are left out."""
MAKING_MS, AFTER_MS = 30, 5
"""Steps so long before a push and after it are not quiet."""


class Push(NamedTuple):
    """begin, sealed, end: milliseconds of the clock."""

    way: str
    begin: float
    sealed: float
    end: float
    report: PushReport


def push(trainer: Trainer, way: str) -> Push:
    """One, with when it was."""
    trainer.prepare()
    begin = 1e3 * time.monotonic()
    report = trainer.send(way)
    end = 1e3 * time.monotonic()
    sealed = end if way == "device" else end - 1e3 * report.seconds["commit"]
    return Push(way, begin, sealed, end, report)


async def generate(url: str, sequences: int, tokens: int) -> None:
    """Sequences that begin together and end together."""
    client, rng = AsyncRolloutClient(url), np.random.default_rng(0)
    prompts = [rng.integers(1000, 150_000, PROMPT).tolist() for _ in range(sequences)]
    await asyncio.gather(*(client.generate(prompt_ids=p, max_tokens=tokens, ignore_eos=True) for p in prompts))
    await client.aclose()


def functions(notes: list[Note], pushes: list[Push]) -> dict[str, list[float]]:
    """first, last, count, sum of each that ran in most of these pushes."""
    began = [note.begin for note in notes]
    found: dict[str, list[tuple[float, float, int, float]]] = {}
    for one in pushes:
        seen: dict[str, list[Note]] = {}
        for note in notes[bisect_left(began, one.begin - 1) : bisect_left(began, one.end)]:
            named = note.name if note.name == "EventLoop.tick" else f"{note.name} {note.word}".strip()
            seen.setdefault(named, []).append(note)
        for name, mine in seen.items():
            took = sum(note.end - note.begin for note in mine)
            first, last = mine[0].begin - one.begin, max(note.end for note in mine) - one.begin
            found.setdefault(name, []).append((first, last, len(mine), took))
    often = {name: rows for name, rows in found.items() if 2 * len(rows) > len(pushes)}
    medians = {
        name: [round(statistics.median(column), 2) for column in zip(*rows, strict=True)]
        for name, rows in often.items()
    }
    return dict(sorted(((n, r) for n, r in medians.items() if r[3] >= LEAST_MS), key=lambda item: item[1][:2]))


def steps(notes: list[Note], pushes: list[Push]) -> dict[str, Any]:
    """Of the loop's turns that had a step, from the first push to the last."""
    ticks = [note for note in notes if note.name == "EventLoop.tick"]
    ahead = [note.begin for note in notes if note.name == "EventLoop.go_on_ahead" and note.end - note.begin > LEAST_MS]
    in_vain = [note.begin for note in notes if note.name == "EventLoop.take_in" and note.end - note.begin > LEAST_MS]
    found: dict[str, Any] = {}
    kinds: dict[str, list[tuple[Note, int]]] = {"moving": [], "committing": [], "quiet": []}
    for before, tick in pairwise(ticks):
        if tick.end - tick.begin < LEAST_MS or not pushes[0].begin - 100 < tick.begin < pushes[-1].end + 50:
            continue
        kind = _when(tick, pushes)
        if kind:
            kinds[kind].append((tick, int(tick.word) - int(before.word)))
    for kind, mine in kinds.items():
        if mine:
            took = [tick.end - tick.begin for tick, _ in mine]
            found[kind] = {
                "steps": len(mine),
                "mean": round(statistics.mean(took), 3),
                "longest": round(max(took), 2),
                "ahead": sum(_within(ahead, tick) for tick, _ in mine),
                "taken_in": sum(_within(in_vain, tick) for tick, _ in mine),
                "preempted": sum(count for _, count in mine),
            }
    return found


def late(notes: list[Note], pushes: list[Push]) -> dict[str, Any]:
    """Of the loop's turns that had a step and that no push touches."""
    ticks = [note for note in notes if note.name == "EventLoop.tick" and note.end - note.begin >= LEAST_MS]
    if not ticks:
        return {}
    pid, began, span = ticks[0].pid, [note.begin for note in notes], (pushes[0].begin - 100, pushes[-1].end + 50)
    apart: list[tuple[float, dict[str, float]]] = []
    for before, tick in pairwise(ticks):
        if not span[0] < tick.begin < span[1] or tick.begin - before.end > MAKING_MS or _when(tick, pushes) != "quiet":
            continue
        took: dict[str, float] = {}
        for note in notes[bisect_left(began, before.end - 20) : bisect_left(began, tick.end)]:
            if note.pid == pid and note.name != "EventLoop.tick" and before.end < note.end <= tick.end:
                took[note.name] = took.get(note.name, 0.0) + note.end - max(note.begin, before.end)
        apart.append((tick.end - before.end, took))
    if not apart:
        return {}
    each = np.array([gap for gap, _ in apart])
    usual = float(np.median(each))
    slow, others = ([took for gap, took in apart if (gap > 1.2 * usual) is late] for late in (True, False))
    longer: dict[str, tuple[float, int]] = {}
    for name in {name for took in slow for name in took}:
        means = [sum(took.get(name, 0.0) for took in some) / max(len(some), 1) for some in (slow, others)]
        longer[name] = round(means[0] - means[1], 3), sum(name in took for took in slow)
    most = dict(sorted(longer.items(), key=lambda item: -item[1][0])[:8])
    percentiles = [round(float(np.percentile(each, p)), 2) for p in (50, 90, 99, 99.9)]
    return {"steps": len(apart), "apart": percentiles, "late": len(slow), "longer": most}


def _when(tick: Note, pushes: list[Push]) -> str:
    """What a push did meanwhile; "" while its trainer made weights."""
    for one in pushes:
        if one.begin < tick.end and tick.begin < one.sealed:
            return "moving"
        if one.sealed <= tick.begin < one.end + AFTER_MS:
            return "committing"
        if one.begin - MAKING_MS < tick.end <= one.begin:
            return ""
    return "quiet"


def _within(times: list[float], note: Note) -> bool:
    at = bisect_left(times, note.begin)
    return at < len(times) and times[at] < note.end


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pushes", type=int, default=8, help="of each way, idle and generating")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1200, help="new ones of each sequence")
    parser.add_argument("--trainer", default="cuda:0", help="its device (%(default)s)")
    add_out(parser)
    args = parser.parse_args()
    notes = folder_of("timeline")  # this process is the trainer
    import torch

    torch.cuda.set_device(args.trainer)
    options = on_gpus(SETTINGS)
    ways, done = ("shm", "cuda_ipc", "device"), dict[str, list[Push]]()
    with EmptyService(SHAPES[MODEL], 1, notes / "service.log", *options) as service:
        trainer = Trainer(torch, service.push_endpoint)
        trainer.push("shm")
        while service.metric("rollout_replica_ready") != 1:
            time.sleep(0.05)
        for way in ways * 2:
            trainer.push(way)
        time.sleep(SETTLE_S)

        def in_turns(pause_s: float) -> list[Push]:
            found = []
            for turn in range(args.pushes):
                for way in sorted(ways, reverse=bool(turn % 2)):
                    found.append(push(trainer, way))
                    time.sleep(pause_s)
            return found

        done["idle"] = in_turns(0.02)
        others = threading.Thread(target=lambda: asyncio.run(generate(service.url, args.sequences, args.tokens)))
        others.start()
        time.sleep(0.6)
        done["generating"] = in_turns(0.06)
        others.join()
    held, result = read(notes), dict[str, Any](card=torch.cuda.get_device_name(), trainer=args.trainer)
    for kind, pushes in done.items():
        for way in ways:
            mine = [one for one in pushes if one.way == way]
            stages = {
                s: round(1e3 * statistics.median(one.report.seconds[s] for one in mine), 1)
                for s in mine[0].report.seconds
            }
            stages["live"] = round(1e3 * statistics.median(one.report.live_s for one in mine), 1)
            rows = functions(held, mine)
            result[f"{kind} {way}"] = {"stages": stages, "functions": rows}
            print(f"-- {kind} {way}: {stages}")
            if kind == "generating":
                result[f"{kind} {way}"]["steps"] = taken = steps(held, mine)
                for when, row in taken.items():
                    print(f"   {when:12}", row)
            for name, (first, last, count, took) in rows.items():
                print(f"   {first:7.2f} {last:7.2f} x{count:<4.0f} {took:7.2f} {name}")
    result["late"] = late(held, done["generating"])
    print("-- late", result["late"])
    keep(result, args.out)


if __name__ == "__main__":
    main()

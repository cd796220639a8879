"""What a commit's gap between tokens is made of, commit by commit, in the client, the rank's loop and its device.

    python -m benchmarks.gpu.at_commits [--pushes 102] [--sequences 64] [--ways shm] [--out OUT.json]

The load and the pushes of `benchmarks.gpu.commits`, with the service's functions noted as they run
(benchmarks.gpu.noting), which makes a step some 0.3 ms longer. Of each commit, milliseconds of one clock:

    gap             from the last token of the version before, as the client sees it, to the first of the new one
    usual           median gap that no push touches near it; steps: one over the other
    taking_in       from the end of the last step under the version before until its tokens are handed out
    to_flip         from then until the rank begins to flip; negative: it flipped while that step was computed
    flipping        until it has
    to_launch       until the first step under the new version is launched; negative: it was launched before the flip
    computing       from that, or the end of the step before if that is later, to the first step's end
    handing_out     from that until its tokens are handed out
    asked           when the store said to flip, from the end of the last step before
    missed          steps under the version before that ended between that and the last one
    recording       from the flip's end until the store said that the version is live
    said            when that was acted on, from the first step's end: negative is in time
    behind          when the step behind it was launched, from the first step's end: negative is in time

Printed are the medians of all commits, and of the tenth of them with the longest gaps in steps.
"""

import argparse
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.gpu.commits import LEAST_NEAR, NEAR_S, Way, a_round, waiting
from benchmarks.gpu.direct import MODEL, SETTINGS, Trainer
from benchmarks.gpu.noting import Note, folder_of, read
from benchmarks.gpu.report import add_out, keep, on_gpus
from benchmarks.gpu.service import EmptyService
from benchmarks.gpu.shapes import SHAPES

Row = dict[str, float]


class Notes:
    """When named functions of one process began and ended, in the order of their begins."""

    def __init__(self, notes: Sequence[Note], pid: int) -> None:
        self._by_name: dict[str, list[Note]] = {}
        for note in notes:
            if note.pid == pid:
                self._by_name.setdefault(note.name, []).append(note)

    @classmethod
    def of_whom(cls, notes: Sequence[Note], name: str) -> "Notes":
        """Of the process that ran this function first."""
        return cls(notes, next(note.pid for note in notes if note.name == name))

    def of(self, name: str, word: str = "") -> list[Note]:
        """Those of this function, about this word."""
        return [note for note in self._by_name.get(name, []) if not word or note.word == word]


def first_after(times: Sequence[float], at: float) -> float:
    """The first of rising times that is not before `at`; not a number: none is."""
    index = bisect_left(times, at)
    return times[index] if index < len(times) else float("nan")


def last_before(times: Sequence[float], at: float) -> float:
    """The last of rising times that is not after `at`; not a number: none is."""
    index = bisect_right(times, at)
    return times[index - 1] if index else float("nan")


def apart(
    notes: Notes, store: Notes, gaps: Sequence[tuple[float, float, int, bool]], quiet: Sequence[tuple[float, float]]
) -> list[Row]:
    """A row for each gap in which the version changes. gaps: as `commits.gaps` has them. quiet: (when, seconds) of
    those that no push touches, by time.
    """
    ends = sorted(note.end for note in notes.of("DeviceLogits.wait"))
    handed = sorted(note.end for note in notes.of("EventLoop.reply"))
    launches = sorted(note.end for note in notes.of("GpuDecoder.decode"))
    flips = notes.of("Actions.start", "UPDATE FLIP")
    asked, final = ([note.begin for note in store.of("Replicas.send", word)] for word in ("Flip", "Finalize"))
    begun = [note.begin for note in flips]
    said = [note.begin for note in notes.of("Scheduler.enter")]
    times = [when for when, _ in quiet]
    rows = []
    for start, end, _, changes in gaps:
        near = [s for _, s in quiet[bisect_left(times, start - NEAR_S) : bisect_left(times, end + NEAR_S)]]
        at = bisect_right(begun, 1e3 * end) - 1
        if not changes or len(near) < LEAST_NEAR or at < 0:
            continue
        flip, usual = flips[at], 1e3 * statistics.median(near)
        acted_on = first_after(said, flip.end)  # no step under the new version is waited for before
        ended, first = last_before(ends, acted_on), first_after(ends, acted_on)
        out, next_out = first_after(handed, ended), first_after(handed, first)
        told = last_before(asked, flip.begin)
        launched = first_after(launches, flip.end)
        if launched > first_after(handed, flip.end) and last_before(launches, flip.begin) > told:
            launched = last_before(launches, flip.begin)  # else it was launched after the flip, before anything is said
        behind = first_after(launches, max(launched, flip.end) + 0.001)
        rows.append(
            {
                "gap": 1e3 * (end - start),
                "usual": usual,
                "steps": 1e3 * (end - start) / usual,
                "taking_in": out - ended,
                "to_flip": flip.begin - out,
                "flipping": flip.end - flip.begin,
                "to_launch": launched - flip.end,
                "computing": first - max(launched, ended),
                "handing_out": next_out - first,
                "asked": told - ended,
                "missed": float(bisect_left(ends, ended) - bisect_right(ends, told)),
                "recording": first_after(final, flip.end) - flip.end,
                "said": acted_on - first,
                "behind": behind - first,
                "at": 1e3 * start,
            }
        )
    return rows


def shown(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Medians of all, and of the tenth with the longest gaps."""
    worst = sorted(rows, key=lambda row: row["steps"])[-max(1, len(rows) // 10) :]
    names = [name for name in rows[0] if name != "at"]
    return {
        name: {
            "all": round(float(np.nanmedian([row[name] for row in rows])), 3),
            "worst": round(float(np.nanmedian([row[name] for row in worst])), 3),
        }
        for name in names
    }


def quiet_of(way: Way) -> list[tuple[float, float]]:
    """(when, seconds) of the gaps that no push touches."""

    def touched(gap: tuple[float, float, int, bool]) -> bool:
        return any(gap[0] < end and start < gap[1] for start, end in way.pushes)

    return [(gap[0], (gap[1] - gap[0]) / gap[2]) for gap in way.gaps if not touched(gap)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.at_commits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--pushes", type=int, default=102, help="of each way")
    parser.add_argument("--ways", nargs="+", default=["shm", "cuda_ipc"], help="of transport (%(default)s)")
    add_out(parser)
    args = parser.parse_args()
    written = folder_of("at_commits")
    import torch

    ways = {way: Way() for way in args.ways}
    with EmptyService(SHAPES[MODEL], 1, written / "service.log", *on_gpus(SETTINGS)) as service:
        trainer = Trainer(torch, service.push_endpoint)
        trainer.push("shm")
        while service.metric("rollout_replica_ready") != 1:
            time.sleep(0.05)
        for name in args.ways * 2:
            trainer.push(name)
        while waiting(ways, args.pushes):
            for name, way in waiting(ways, args.pushes):
                a_round(service.url, trainer, name, way, args.sequences, args.pushes)
    found = read(written)
    rank, store = Notes.of_whom(found, "EventLoop.tick"), Notes.of_whom(found, "Replicas.send")
    result: dict[str, Any] = {"card": torch.cuda.get_device_name(), "sequences": args.sequences}
    for name, way in ways.items():
        rows = apart(rank, store, way.gaps, quiet_of(way))
        gaps = np.percentile([row["steps"] for row in rows], (50, 90, 99)).round(2).tolist()
        result[name] = {"commits": len(rows), "p50_90_99": gaps}
        result[name] |= {"medians": shown(rows), "each": [{k: round(v, 3) for k, v in row.items()} for row in rows]}
        print(f"-- {name}: {len(rows)} commits, gaps in steps {gaps} (50, 90, 99 %)")
        for part, row in result[name]["medians"].items():
            print(f"   {part:12} {row['all']:8.3f} {row['worst']:8.3f}")
    keep(result, args.out)


if __name__ == "__main__":
    main()

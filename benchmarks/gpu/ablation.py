"""What makes decode steps longer beside a push: pieces of a push, each alone and each left out, in a real service.

    python -m benchmarks.gpu.ablation [--pushes 30] [--only WORDS] [--out OUT.json]

A torch trainer on the replica's GPU pushes the same bytes again and again while 64 sequences generate
(benchmarks.gpu.commits). Where bytes are the same, a piece of a push may be left out and the push is still proved:

    pause                 the trainer does nothing, as long as a push takes: what the clocks add
    copies, one copy      the trainer copies to the host as in a push, or all in one piece; nothing is pushed
    hash                  the trainer hashes as in a push
    host                  a push of tensors on the CPU: the trainer does nothing on the GPU
    WAY                   a push by `shm`, `cuda_ipc`
    WAY -copies           ... of which the trainer copies nothing to the host but the first 16 MiB
    WAY -hash             ... of which it hashes nothing
    WAY -copies-hash      ... neither: what is left are the store, and the rank's copies and digests

The rank times each step on its device, from its inputs to its drawing, and how long the device stood idle before it
(`noting.DeviceSteps`); it notes what its loop does. A step is one of a push if it was under way between the push's
begin and its seal. Each is compared with the steps within a quarter of a second of it that no push touches: steps
become longer with the sequences.

    client        gaps of a stream, during pushes over others: mean, median
    device        time of a step on the device, the same
    idle_ms       between two steps on the device, during pushes and at other times
    loop          turns of the rank's loop, the same as `client`; preempted: how often its thread lost its core in one
    more_ms       of all steps from a push's begin until 20 ms after its end, how much longer they took in all, a push
    longer        of a turn's functions, mean milliseconds during pushes beyond the others'
"""

import argparse
import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from benchmarks.gpu.commits import Way, Window, a_round, judged
from benchmarks.gpu.direct import MODEL, SETTINGS, Trainer
from benchmarks.gpu.noting import DEVICE_STEP, LOOP_ONLY, Note, folder_of, read
from benchmarks.gpu.report import add_out, keep, on_gpus
from benchmarks.gpu.service import SETTLE_S, EmptyService
from benchmarks.gpu.shapes import SHAPES
from rollout_client.cuda_batch import Batch
from rollout_client.cuda_copy import AHEAD, CudaCopier
from rollout_client.cuda_slots import Place

NEAR_MS, LEAST_NEAR = 250.0, 10
LEAST_MS = 0.1
"""A turn of the loop that took less had no step."""
PAUSE_S = 0.024
WAYS = ("shm", "cuda_ipc")


class Done(NamedTuple):
    """What was no push, as `commits` looks at it."""

    seconds: dict[str, float]


class Pieces(Trainer):
    """A trainer whose pushes have pieces left out, and which does single pieces."""

    def __init__(self, torch: Any, endpoint: str) -> None:
        super().__init__(torch, endpoint)
        self.on_host = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        self._real = Place.send, CudaCopier._hash, CudaCopier._copy
        self._hashed: Any = None
        self._lying: Any = None
        self._copier: Any = None
        pieces = self

        def copy(copier: Any, place: Any, lying: Any, *others: Any) -> None:
            pieces._copier, pieces._lying = copier, lying
            pieces._real[2](copier, place, lying, *others)

        CudaCopier._copy = copy  # type: ignore[method-assign]
        nbytes = sum(2 * tensor.numel() for tensor in self.tensors.values())
        self._pinned = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=True)
        self._whole = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()

    def prepare(self) -> None:
        """The same weights; every way's bytes are in the arena already."""
        self.torch.cuda.synchronize()

    def send(self, way: str) -> Any:
        """What a row's name says."""
        alone: dict[str, Callable[[], object]] = {
            "pause": partial(time.sleep, PAUSE_S),
            "copies": self._copies,
            "one copy": self._one_copy,
            "hash": self._hash_alone,
        }
        if way in alone:
            began = time.monotonic()
            alone[way]()
            took = time.monotonic() - began
            return Done({"begin": 0.0, "commit": 0.0, "total": took})
        if way == "host":
            self.version += 1
            return self.ways["shm"].push(self.on_host, self.version)
        name, *without = way.replace(" ", "").split("-")
        if "copies" in without:
            Place.send = self._first_sends()  # type: ignore[method-assign]
        if "hash" in without:
            CudaCopier._hash = self._known_hashes  # type: ignore[assignment, method-assign]
        try:
            return super().send(name)
        finally:
            Place.send, CudaCopier._hash = self._real[:2]  # type: ignore[method-assign]

    def _first_sends(self) -> Any:
        """Sends the marks that a slot is tried with and what they were written over, of each push."""
        sent = 0

        def send(place: Any, *what: Any) -> None:
            nonlocal sent
            sent += 1
            if sent <= 2:
                self._real[0](place, *what)

        return send

    def _known_hashes(self, device: Any, lying: Any) -> Any:
        if self._hashed is None:
            self._hashed = self._real[1](self._copier, device, lying)
        return self._hashed

    def _copies(self) -> None:
        """As in a push: events, and looks at them."""
        with self.torch.cuda.stream(self._stream):
            place = Place(memoryview(self._pinned.numpy()), self._copier._driver, self._stream)
            waiting: list[Batch] = []
            for some in self._lying.batches:
                batch = Batch(some)
                batch.proven_as(dict.fromkeys((piece.number for piece in some), 0))
                batch.send(place)
                waiting.append(batch)
                while len(waiting) > AHEAD and waiting[0].done():
                    waiting.pop(0)
        self._stream.synchronize()

    def _one_copy(self) -> None:
        copy = self._copier._driver.cuMemcpyDtoHAsync_v2
        code = copy(self._pinned.data_ptr(), self._whole.data_ptr(), self._whole.numel(), self._stream.cuda_stream)
        assert not code, f"cuMemcpyDtoHAsync: {code}"
        self._stream.synchronize()

    def _hash_alone(self) -> None:
        """And as long a pause as a push takes."""
        device = next(iter(self.tensors.values())).device
        until = time.monotonic() + PAUSE_S
        for some in self._real[1](self._copier, device, self._lying):
            some.through.synchronize()
        time.sleep(max(0.0, until - time.monotonic()))


class Steps(NamedTuple):
    """when: milliseconds of the clock, at the end. value: what is compared. more: other numbers of the same step."""

    when: list[float]
    value: list[float]
    more: list[dict[str, float]]


def device_steps(notes: list[Note]) -> Steps:
    """Of the rank; `more` has how long the device stood idle before each."""
    found = Steps([], [], [])
    for note in notes:
        if note.name == DEVICE_STEP:
            took, idle = map(float, note.word.split())
            found.when.append(note.end)
            found.value.append(took)
            found.more.append({"idle": idle})
    return found


def turns(notes: list[Note]) -> Steps:
    """Of the rank's loop; `more` has the time of each function in a turn, and how often the thread lost its core."""
    found, held = Steps([], [], []), list[Note]()
    before: Note | None = None
    pids = {note.pid for note in notes if note.name == "EventLoop.tick"}
    for note in sorted((one for one in notes if one.pid in pids), key=lambda one: one.end):
        if note.name == DEVICE_STEP:
            continue
        if note.name != "EventLoop.tick":
            held.append(note)
            continue
        if before is not None and note.end - note.begin >= LEAST_MS:
            more: dict[str, float] = defaultdict(float)
            for one in held:
                more[one.name] += one.end - max(one.begin, before.end)
            more["preempted"] = int(note.word) - int(before.word)
            found.when.append(note.end)
            found.value.append(note.end - before.end)
            found.more.append(more)
        before, held = note, []
    return found


def compared(steps: Steps, way: Way) -> dict[str, Any]:
    """during: over quiet ones near it, mean and median. Means of `more`: during, and quiet."""
    moves = [(1e3 * start, 1e3 * end) for start, end in way.moves]
    pushes = [(1e3 * start, 1e3 * end) for start, end in way.pushes]
    first, last = bisect_left(steps.when, pushes[0][0] - 300), bisect_left(steps.when, pushes[-1][1] + 50)
    moving, quiet, touched = list[int](), list[int](), list[int]()
    for at in range(first, last):
        span = steps.when[at] - steps.value[at], steps.when[at]
        (touched if _touches(span, pushes) else quiet).append(at)
        if _touches(span, moves):
            moving.append(at)
    times = [steps.when[at] for at in quiet]

    def usual(at: int) -> float | None:
        when = steps.when[at]
        near = quiet[bisect_left(times, when - NEAR_MS) : bisect_left(times, when + NEAR_MS)]
        return statistics.median(steps.value[n] for n in near) if len(near) >= LEAST_NEAR else None

    ratios = [steps.value[at] / near for at in moving if (near := usual(at))]
    more = [steps.value[at] - near for at in touched if (near := usual(at))]
    if not ratios:
        return {}
    names = {name for at in (*moving, *quiet) for name in steps.more[at]}
    means = {
        name: tuple(round(statistics.mean(steps.more[at].get(name, 0.0) for at in some), 3) for some in (moving, quiet))
        for name in names
    }
    return {
        "during": [round(statistics.mean(ratios), 3), round(statistics.median(ratios), 3)],
        "more_ms": round(sum(more) / len(pushes), 2),
        "steps": [len(moving), len(quiet)],
        "ms": [round(statistics.mean(steps.value[at] for at in some), 3) for some in (moving, quiet)],
        "means": means,
    }


def _touches(span: Window, windows: list[Window]) -> bool:
    at = bisect_left(windows, span[1], key=lambda window: window[0])
    return at > 0 and windows[at - 1][1] > span[0]


def row(way: Way, notes: list[Note]) -> dict[str, Any]:
    """A row of the table."""
    client = judged(way.gaps, way.moves, way.pushes)
    device, loop = compared(device_steps(notes), way), compared(turns(notes), way)
    found = {
        "push_ms": round(statistics.median(way.totals), 1),
        "pushes": len(way.pushes),
        "client": [client["during"], client["during_median"]],
        "device": device.get("during"),
        "device_ms": device.get("ms"),
        "device_more_ms": device.get("more_ms"),
        "idle_ms": device.get("means", {}).get("idle"),
        "loop": loop.get("during"),
        "loop_ms": loop.get("ms"),
        "loop_more_ms": loop.get("more_ms"),
    }
    means = loop.get("means", {})
    found["preempted"] = means.pop("preempted", None)
    longer = {name: round(during - quiet, 3) for name, (during, quiet) in means.items()}
    found["longer"] = dict(sorted(longer.items(), key=lambda item: -item[1])[:8])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--pushes", type=int, default=30, help="of each row")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows")
    add_out(parser)
    args = parser.parse_args()
    notes = folder_of("ablation", **{LOOP_ONLY: "1"})
    import torch

    rows = args.only or [
        *("pause", "copies", "one copy", "hash", "host", *WAYS),
        *(f"{way} {without}" for way in reversed(WAYS) for without in ("-copies", "-hash", "-copies-hash")),
    ]
    result: dict[str, Any] = {"card": torch.cuda.get_device_name(), "sequences": args.sequences}
    options = on_gpus(SETTINGS)
    with EmptyService(SHAPES[MODEL], 1, notes / "service.log", *options) as service:
        trainer = Pieces(torch, service.push_endpoint)
        trainer.send("shm")
        while service.metric("rollout_replica_ready") != 1:
            time.sleep(0.05)
        for name in (*WAYS, *WAYS, "host", "host", *WAYS):
            trainer.send(name)
        time.sleep(SETTLE_S)
        for name in rows:
            way = Way()
            a_round(service.url, trainer, name, way, args.sequences, args.pushes)
            result[name] = row(way, read(notes))
            print(f"{name:24}", result[name], flush=True)
            keep(result, args.out)


if __name__ == "__main__":
    main()

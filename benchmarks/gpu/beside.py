"""How long decode steps take while the parts of a push run beside them, each alone and together.

    python -m benchmarks.gpu.beside [--sequences 64] [--seconds 0.4] [--only WORDS] [--out OUT.json]

Steps are launched ahead and drawn from, as a rank does it, without its scheduler and messages. Beside them: copies of
this process into its spare weight slot, its own digests, and another process (a trainer's) that copies to the host,
hashes as many batches by themselves as a push has or all at once, copies within the device, or has twelve threads hash
the arena's slot. GB/s are of what runs beside the steps.

Rows "from the loop" give 64 MiB to the bus before each step is launched, in the thread that launches it, as a rank's
loop does with what it hears of a push: on the stream of its weight slots, or on one that was made after the decoder's;
while what a step needs of the host is brought by a kernel, as it is (worker/gpu/carrying.py), or by a copy engine.
"""

import argparse
import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from benchmarks.gpu.report import add_out, keep

SLOT = Path("/dev/shm/benchmark-beside")
BATCHES = [297 << 20, *[35 << 20] * 24]
"""Bytes: about Qwen3-0.6B's, whose embedding is the first."""
TOTAL, PIECE = sum(BATCHES), 16 << 20
EACH_STEP = 64 << 20
SPANS = [(sum(BATCHES[:n]), size) for n, size in enumerate(BATCHES)]
Numbers = npt.NDArray[np.uint8]
Beside = Callable[[threading.Event], int]
"""Runs until it is told to stop; the bytes that it has moved or hashed."""


def slot() -> Numbers:
    """Memory that both processes map."""
    with SLOT.open("a+b") as file:
        file.truncate(TOTAL)
        return np.frombuffer(mmap.mmap(file.fileno(), TOTAL), np.uint8)


def trainer() -> None:
    """Does what it is told by a line of words and seconds, and says GB/s."""
    import torch

    from rollout_client.cuda_hash import CudaHash

    arena = slot()
    pinned = int(torch.cuda.cudart().cudaHostRegister(arena.ctypes.data, TOTAL, 1))
    assert pinned == 0, f"cudaHostRegister: {pinned}"
    weights = torch.empty(TOTAL, dtype=torch.uint8, device="cuda").random_()
    other = torch.empty_like(weights)
    tensors = [weights[start : start + size] for start, size in SPANS]
    dma = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoHAsync_v2
    dma.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    streams = {what: torch.cuda.Stream() for what in ("copy", "hash", "hash-at-once", "within")}
    hasher, pool, view = CudaHash(torch), ThreadPoolExecutor(12), memoryview(arena)

    def begin(what: str) -> Any:
        with torch.cuda.stream(streams.get(what, streams["copy"])):
            if what == "copy":
                for start, size in SPANS:
                    dma(arena.ctypes.data + start, weights.data_ptr() + start, size, streams[what].cuda_stream)
            elif what == "hash":
                return [hasher.start([tensor], streams[what]) for tensor in tensors]
            elif what == "hash-at-once":
                return hasher.start(tensors, streams[what])
            elif what == "within":
                for tensor, (start, size) in zip(tensors, SPANS, strict=True):
                    other[start : start + size].copy_(tensor, non_blocking=True)
            else:
                starts = range(0, TOTAL, 1 << 20)
                list(pool.map(lambda start: xxhash.xxh3_64_intdigest(view[start : start + (1 << 20)]), starts))
        return None

    for what in (*streams, "host"):
        begin(what)
    torch.cuda.synchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        *what, seconds = line.split()
        print("begun", flush=True)
        began, rounds = time.monotonic(), 0
        while time.monotonic() < began + float(seconds):
            kept = [begin(one) for one in what]
            torch.cuda.synchronize()
            del kept
            rounds += 1
        print(rounds * TOTAL / (time.monotonic() - began) / 1e9, flush=True)


def decode(
    bench: Any, rows: int, stop: threading.Event, ended: list[float], before: Callable[[], object] = lambda: None
) -> None:
    """Steps of `rows` sequences until told to stop; when each one's tokens were there. before: each is launched."""
    from worker.engine.base import Cuts

    bench.driver.enter()
    batch, every = bench.batch(rows), np.arange(rows)
    plain = np.ones(rows, np.float32), np.zeros(rows, np.bool_)
    cuts = Cuts(np.zeros(rows, np.int32), np.ones(rows, np.float32), np.zeros(rows, np.float32))
    logits = bench.decoder.forward(batch)
    while not stop.is_set():
        before()
        drawing = logits.begin(every, *plain, np.random.random(rows), cuts)
        logits = drawing.follow(batch, every.astype(np.int32))
        drawing.drawn()
        ended.append(time.monotonic())
    logits.begin(every, *plain, np.random.random(rows), cuts).drawn()


class Rank:
    """What a rank does for a push beside its steps."""

    def __init__(self, bench: Any) -> None:
        from rollout_client.cuda_hash import SOURCE
        from worker.gpu.compiler import compiled
        from worker.gpu.driver import Module

        self.driver, self.arena = bench.driver, slot()
        self.spare = bench.slots.regions[1]
        self.spare.fill()
        self.driver.register(self.arena.ctypes.data, TOTAL, read_only=True)
        self.stream = self.driver.stream()
        self.module = Module(self.driver, compiled(SOURCE, {}, self.driver.capability))
        self.pieces = min(TOTAL, self.spare.nbytes) // PIECE
        self.table = self.driver.pinned((self.pieces, 2), np.uint64)
        self.table[:, 0] = self.spare.address + np.arange(self.pieces) * PIECE
        self.table[:, 1] = PIECE
        self.out = self.driver.pinned(self.pieces, np.uint64)
        self.tiny = self.driver.pinned(256 * self.pieces, np.uint8)

    def copies(self, size: int) -> Beside:
        """Into the spare slot, in copies of at most so many bytes."""

        def run(stop: threading.Event) -> int:
            self.driver.enter()
            to, source = self.spare.address, self.arena.ctypes.data
            done, limit = 0, min(TOTAL, self.spare.nbytes)
            while not stop.is_set():
                for start, length in SPANS:
                    for at in range(start, min(start + length, limit), size):
                        part = min(size, start + length - at, limit - at)
                        self.driver.from_address(to + at, source + at, part, self.stream)
                        done += part
                self.driver.wait(self.stream)
            return done

        return run

    def give(self, stream: Any) -> int:
        """A part of a push to the bus; bytes."""
        for at in range(0, EACH_STEP, PIECE):
            self.driver.from_address(self.spare.address + at, self.arena.ctypes.data + at, PIECE, stream)
        return EACH_STEP

    def digests(self, stop: threading.Event) -> int:
        """Of the whole slot, 2 ms apart."""
        from rollout_client.cuda_hash import THREADS
        from worker.gpu.driver import Pointer

        self.driver.enter()
        done = 0
        while not stop.is_set():
            arguments = [Pointer(array.ctypes.data) for array in (self.table, self.out, self.tiny)]
            self.module.launch("xxh3", (self.pieces,), THREADS, self.stream, arguments)
            self.driver.wait(self.stream)
            done += self.pieces * PIECE
            time.sleep(0.002)
        return done


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.beside",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each measurement (%(default)s)")
    parser.add_argument("--only", default="", help="rows whose names have this in them")
    add_out(parser)
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        trainer()
        return
    from benchmarks.gpu.decode import Bench

    command = [sys.executable, "-m", "benchmarks.gpu.beside", "--trainer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the trainer has ended"
        bench = Bench("Qwen3-0.6B", [args.sequences], 516, {})
        rank, found = Rank(bench), {}

        def measure(
            name: str, beside: Beside | None = None, told: str = "", before: Callable[[], int] = lambda: 0
        ) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            if args.only not in name:
                return
            stop, end, ended, moved = threading.Event(), threading.Event(), list[float](), list[int]()
            steps = threading.Thread(target=decode, args=(bench, args.sequences, stop, ended, before))
            steps.start()
            time.sleep(0.1)
            if told:
                process.stdin.write(f"{told} {args.seconds}\n")
                process.stdin.flush()
                process.stdout.readline()
            began = time.monotonic()
            other = threading.Thread(target=lambda: moved.append(beside(end) if beside is not None else 0))
            other.start()
            rate = float(process.stdout.readline()) if told else 0.0
            time.sleep(0.0 if told else args.seconds)
            until = time.monotonic()
            end.set()
            other.join()
            rate = rate or moved[0] / (time.monotonic() - began) / 1e9
            stop.set()
            steps.join()
            mine = [b - a for a, b in pairwise(ended) if a >= began and b <= until]
            found[name] = {"step_ms": round(1e3 * statistics.mean(mine), 3), "GBps": round(rate, 1)}
            print(f"{name:44}", found[name], flush=True)

        def from_the_loop(name: str, stream: Any, carry: Any) -> None:
            """carry: brings what a step needs."""
            inputs, drawing = bench.decoder._inputs, bench.decoder.drawing
            takers = [one._courier for one in (inputs, drawing._asked, drawing._sources)]
            for taker in takers:
                taker._carry = carry
            measure(f"from the loop: {name}", before=lambda: rank.give(stream))
            for taker in takers:
                taker._carry = kernel

        kernel, engine = bench.decoder._inputs._carry, rank.driver.to_device
        measure("nothing")
        from_the_loop("slots' stream, by a kernel", bench.slots.stream, kernel)
        from_the_loop("slots' stream, by an engine", bench.slots.stream, engine)
        from_the_loop("a later stream, by a kernel", rank.stream, kernel)
        from_the_loop("a later stream, by an engine", rank.stream, engine)
        measure("rank: copies as batches arrive", rank.copies(TOTAL))
        measure("rank: copies of 4 MiB", rank.copies(4 << 20))
        measure("rank: digests", rank.digests)
        measure("trainer: copies to the host", told="copy")
        measure("trainer: digests, a launch for each batch", told="hash")
        measure("trainer: digests, one launch", told="hash-at-once")
        measure("trainer: copies within the device", told="within")
        measure("twelve threads hash on the host", told="host")
        measure("a push, digests a launch for each batch", rank.copies(TOTAL), "copy hash")
        measure("a push, digests in one launch", rank.copies(TOTAL), "copy hash-at-once")
        process.stdin.close()
    os.unlink(SLOT)
    keep(found, args.out)


if __name__ == "__main__":
    main()

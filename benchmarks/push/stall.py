"""What a commit costs those who are served: gaps between tokens of 16 sequences that decode while versions are pushed.

The replica has cores of its own, half of those that this process may use: as many threads (`worker.threads`), each rank
moved there once it serves. The trainer, the store, the API and the clients share the other half; on two cores that is
one thread each for decode and copy. `--shared` gives everybody all cores instead, which says what sharing them costs: a
gap then holds what the copy takes from the decode, too.

The trainer's pushes are seconds apart. The clients are a process of their own (`decoding.py`). `stall_ms` of each push
is the commit's own part: how long the replica's loop stood still. The median step is that of the gaps that no push
touches, while the pushes last: sequences grow meanwhile, and steps with them.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.service import EmptyService
from benchmarks.gpu.shapes import SHAPES
from benchmarks.push import source
from benchmarks.push.rounds import load, write
from rollout_client import WeightPublisher
from weight_manager.families import manifest_for


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.push.stall", description=__doc__)
    parser.add_argument("--shapes", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--pushes", type=int, default=6)
    parser.add_argument("--quiet-s", type=float, default=25.0)
    parser.add_argument("--every-s", type=float, default=8.0)
    parser.add_argument("--shared", action="store_true", help="everybody on all cores; not the row that is kept")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    decode = cores if args.shared else cores[len(cores) // 2 :]
    rest = cores if args.shared else cores[: len(cores) // 2]
    if not rest:
        parser.error("one core cannot be parted: it takes two, or --shared")
    os.sched_setaffinity(0, rest)  # what is started from here inherits it
    shapes = {p.name: p.shape for p in manifest_for(SHAPES[args.shapes], "float32").parameters}
    with tempfile.TemporaryDirectory(prefix="bench-stall-", dir="/dev/shm") as scratch:
        tensors = source.read(source.write(Path(scratch), shapes))[1]
        for tensor in tensors.values():
            np.multiply(tensor - 0.5, 0.02, out=tensor)
        options = ("--dtype", args.dtype, "--set", "worker.max_model_len=1024", "--set", "worker.max_batch=16")
        options += ("--set", f"worker.threads={len(decode)}")
        with (
            EmptyService(SHAPES[args.shapes], 1, Path(scratch) / "log", *options) as service,
            WeightPublisher(service.push_endpoint, run_id="push", transport="shm", progress=False) as publisher,
        ):
            publisher.push(tensors, 1, timeout_s=300)
            service.wait_ready()
            move_ranks(service.pid, decode)
            publisher.push(tensors, 2, timeout_s=300)
            words = [sys.executable, "-m", "benchmarks.push.decoding", service.url, str(args.sequences)]
            clients = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            time.sleep(args.quiet_s)
            began, pushes = time.monotonic(), []
            for version in range(3, 3 + args.pushes):
                start = time.monotonic()
                report = publisher.push(tensors, version, timeout_s=300)
                pushes.append({"start": start, "end": time.monotonic(), "stall_ms": report.stall_ms} | report.seconds)
                time.sleep(args.every_s)
            ended = time.monotonic()
            gaps = json.loads(clients.communicate("", timeout=120)[0])
    # steps grow with their sequences, so those between the pushes are what a push's gaps are compared with
    steady = [gap for at, gap in gaps if began <= at <= ended and not any(beside(at, gap, p) for p in pushes)]
    before = [gap for at, gap in gaps if began - args.quiet_s / 2 < at < began]
    under = [gap for at, gap in gaps if began <= at <= ended]
    # a commit is over in the last moments of a push: gaps that end within a second of it
    commits = [gap for at, gap in gaps if any(p["end"] - 0.2 <= at <= p["end"] + 1.0 for p in pushes)]
    for push in pushes:
        at, gap = max(((at, gap) for at, gap in gaps if push["start"] <= at <= push["end"] + 1.0), key=lambda it: it[1])
        push["worst_gap"] = {"after_s": round(at - push["start"], 3), "ms": round(gap * 1e3, 1)}
    step = float(np.median(steady))
    result: dict[str, Any] = {
        "model": args.shapes,
        "dtype": args.dtype,
        "sequences": args.sequences,
        "placed": {"replica": decode, "everybody else": rest},
        "load": load(),
        "median_step_ms": round(step * 1e3, 1),
        "median_step_before_the_first_push_ms": round(float(np.median(before)) * 1e3, 1),
        "p99_gap_ms": {
            "between pushes": round(float(np.percentile(steady, 99)) * 1e3, 1),
            "while pushing": round(float(np.percentile(under, 99)) * 1e3, 1),
            "around commits": round(float(np.percentile(commits, 99)) * 1e3, 1),
        },
        "max_gap_ms": round(max(under) * 1e3, 1),
        "gaps": len(under),
        "pushes": pushes,
    }
    ratios = {
        f"p99 {name} over step": round(v / result["median_step_ms"], 3) for name, v in result["p99_gap_ms"].items()
    }
    write("stall_shared" if args.shared else "stall", result, ratios, dict.fromkeys(ratios, ("<=", 2.0)))
    print({k: v for k, v in result.items() if k != "pushes"}, [p["stall_ms"] for p in pushes])
    return 0


def move_ranks(service: int, cores: list[int]) -> None:
    """Every thread of every rank of the service with that pid. Raises RuntimeError if it has none."""
    ranks = [pid for pid in descendants(service) if "worker" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
    if not ranks:
        raise RuntimeError(f"the service {service} has no rank processes")
    for pid in ranks:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), cores)


def descendants(pid: int) -> list[int]:
    """Processes that came from that one."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def beside(at: float, gap: float, push: dict[str, Any]) -> bool:
    """Whether a gap that ended then overlaps a push, or the second after it."""
    return bool(at > push["start"] and at - gap < push["end"] + 1.0)


if __name__ == "__main__":
    sys.exit(main())

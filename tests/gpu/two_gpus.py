"""Sums over the GPUs of one host: `python -m tests.gpu.two_gpus [RANKS]`, not a test that pytest collects.

Each rank is a process on a GPU of its own. Prints what was found as JSON; exit status 1 if anything was wrong. With one
rank it shows only that communicators come and go, and what they hold.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from worker.gpu.driver import Driver
from worker.gpu.nccl import BFLOAT16, NcclGroups
from worker.orders import GroupDead

ROUNDS, DEADLINE_S = 50, 20.0
TOKENS, WIDTH = 64, 1024


class Files:
    """What the signal group does in a service: rank 0's bytes, given to all."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.turn = folder, rank, 0

    def __call__(self, mine: bytes) -> bytes:
        self.turn += 1
        path = self.folder / f"id.{self.turn}"
        if self.rank == 0:
            path.with_suffix(".new").write_bytes(mine)
            path.with_suffix(".new").rename(self.folder / f"id.{self.turn}")
        while not path.exists():
            time.sleep(0.001)
        return path.read_bytes()


def run_rank(folder: Path, rank: int, size: int) -> dict[str, object]:
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    while not all((folder / f"pid.{r}").exists() and (folder / f"pid.{r}").read_text() for r in range(size)):
        time.sleep(0.01)
    pids = [int((folder / f"pid.{r}").read_text()) for r in range(size)]
    driver, stream, count = Driver(rank), None, TOKENS * WIDTH
    stream = driver.stream()
    place = driver.allocate(2 * count, "hidden states")
    started, free = time.perf_counter(), driver.memory()[0]
    groups = NcclGroups(driver, rank, size, exchange=Files(folder, rank), pids=pids, deadline_s=DEADLINE_S)
    found: dict[str, object] = {"rank": rank, "card": driver.name, "first_s": round(time.perf_counter() - started, 3)}

    def right() -> bool:
        mine = np.full(count, 0x3F80 if rank % 2 == 0 else 0x4000, np.uint16)  # 1.0 or 2.0
        driver.to_device(place, mine, stream)
        with groups.under_way():
            graph = driver.captured(stream, lambda: groups.all_reduce(place, count, BFLOAT16, stream))
            driver.launch(graph, stream)
            driver.wait(stream)
        driver.drop(graph)
        got = np.empty(count, np.uint16)
        driver.to_host(got, place, stream)
        driver.wait(stream)
        total = sum(1.0 if r % 2 == 0 else 2.0 for r in range(size))
        return bool(((got.astype(np.uint32) << 16).view(np.float32) == total).all())

    wrong, shut, again, held = int(not right()), [], [], free - driver.memory()[0]
    for _ in range(ROUNDS):
        start = time.perf_counter()
        groups.shutdown()
        shut.append(time.perf_counter() - start)
        left = free - driver.memory()[0]
        start = time.perf_counter()
        groups.restart()
        again.append(time.perf_counter() - start)
        wrong += not right()
    found |= {"rounds": ROUNDS, "wrong": wrong, "held_MB": held >> 20, "left_MB_when_shut": left >> 20}
    found |= {
        "shutdown_ms": round(1e3 * float(np.median(shut)), 1),
        "restart_ms": round(1e3 * float(np.median(again)), 1),
    }
    if size == 1:
        return found
    if rank == size - 1:
        (folder / "last").write_text("")
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    while not (folder / "last").exists():
        time.sleep(0.01)
    start = time.perf_counter()
    try:
        right()  # the last rank never comes
        found["killed"] = "the sum ended as if nothing had happened"
    except GroupDead as error:
        found["killed"] = f"{error}, after {time.perf_counter() - start:.2f} s of which it lived 1 s"
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", nargs="?", type=int, default=2)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(run_rank(options.folder, options.rank, options.ranks)), flush=True)
        os._exit(0)  # threads of an aborted communicator may not end
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.gpu.two_gpus", str(options.ranks), "--folder", folder, "--rank"]
        ranks = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True) for r in range(options.ranks)]
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    expected = options.ranks - (options.ranks > 1)  # the last one was killed
    reports = [json.loads(text.splitlines()[-1]) for text in said if text.strip()]
    for report in reports:
        print(json.dumps(report))
    dead = all("is gone" in str(report.get("killed", "is gone")) for report in reports)
    return int(len(reports) != expected or any(report["wrong"] for report in reports) or not dead)


if __name__ == "__main__":
    sys.exit(main())

"""What links to many replicas cost one API process while nothing is asked of it: CPU and memory a replica.

    python -m benchmarks.host.links [--replicas 10,100,400] [--seconds 15]

Each replica is a socket of one process that answers as rank 0 does when it is busy: statistics once a second, a
thousand token times among them. It stands for replicas on other hosts, whose links an API of a node keeps all.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from benchmarks.host.results import keep
from tests.processor import used
from tests.reference.checkpoint import Checkpoint
from tests.unit.api.scripted import ScriptedStore
from worker import messages
from worker.generation_metrics import GenerationMetrics
from worker.messages import Stats

SAMPLES = 1000
START_S = 30.0


def main() -> None:
    """Print and keep the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", default="10,100,400", help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="(%(default)s)")
    options = parser.parse_args()
    counts = [int(count) for count in options.replicas.split(",")]
    keep("links", {f"{count} replicas": measure(count, options.seconds) for count in counts})


def measure(count: int, seconds: float) -> dict[str, float]:
    """Of an API process with so many links."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        Checkpoint.random(directory / "model", 1)
        listed = {replica: f"ipc://{directory}/r{replica}" for replica in range(count)}
        (directory / "replicas.json").write_text(json.dumps(listed))
        api = {
            "run_dir": scratch,
            "model": str(directory / "model"),
            "port": 0,
            "replicas_file": f"{scratch}/replicas.json",
        }
        (directory / "config.json").write_text(json.dumps({"api": api}))
        replicas = multiprocessing.get_context("spawn").Process(target=_stand, args=(scratch, list(listed.values())))
        replicas.start()
        process = subprocess.Popen(
            [sys.executable, "-m", "api", "--config", f"{scratch}/config.json"], stderr=subprocess.DEVNULL
        )
        try:
            until = time.monotonic() + START_S
            while not (directory / "http_url").exists() and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(5.0)  # all links are up, and all have been heard
            if process.poll() is not None:
                raise RuntimeError(f"the API left with {process.returncode}")
            before, began = used([process.pid]).seconds, time.monotonic()
            time.sleep(seconds)
            share = (used([process.pid]).seconds - before) / (time.monotonic() - began)
            resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        finally:
            process.terminate()
            replicas.terminate()
            process.wait(20)
            replicas.join(20)
    return {
        "core_share": round(share, 4),
        "ms_per_replica_s": round(1e3 * share / count, 3),
        "mb": round(resident / 1e6),
    }


def _stand(run_dir: str, endpoints: list[str]) -> None:
    asyncio.run(_answer(Path(run_dir), endpoints))


async def _answer(run_dir: Path, endpoints: list[str]) -> None:
    store = ScriptedStore(run_dir)
    assert store
    await asyncio.gather(*(_replica(number, endpoint) for number, endpoint in enumerate(endpoints)))


async def _replica(number: int, endpoint: str) -> None:
    socket: Any = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.bind(endpoint)
    origins: set[bytes] = set()
    due = time.monotonic() + 1 + number % 97 / 97
    while True:
        if await socket.poll(max(0.0, due - time.monotonic()) * 1e3):
            origin, *_ = await socket.recv_multipart()
            if origin not in origins:
                origins.add(origin)
                await socket.send_multipart([origin, _statistics(number)])
        if time.monotonic() >= due:
            due += 1.0
            for origin in origins:
                await socket.send_multipart([origin, _statistics(number)])


def _statistics(replica: int) -> bytes:
    counters = GenerationMetrics().counters
    times = {"itl_s": [0.025 + i * 1e-6 for i in range(SAMPLES)], "step_s": [0.025] * 40, "ttft_s": [0.2] * 10}
    return messages.encode(
        Stats("", replica, "serving", None, 0, 1, 64, 0, 0, 100, 1000, 16, counters=counters, histograms=times)
    )


if __name__ == "__main__":
    main()

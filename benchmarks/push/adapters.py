"""Pushes of a rank-16 LoRA adapter to a service that generates: how long until it is live, and what it holds up.

``python -m benchmarks.push.adapters`` serves SmolLM2 on one replica, keeps `--clients` requests running on it from
processes of their own, and pushes an adapter on all projections of all layers again and again through shared memory:
from `push_adapter()` to committed, checksums on. The first push of the name is said apart. A stall is the longest pause
between two tokens of any running request that a push falls into, less the median pause: bar, one step. What the machine
does by itself is said beside it: the same of as long a time in the middle between two pushes. A service that has just
started fills in its KV cache for some ten seconds, with half of a core: pushes begin after that.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.settling import wait_until_filled
from rollout_client import RolloutClient, WeightPublisher
from tests.integration.live import LiveService
from weight_manager.checkpoint import read_config
from weight_manager.families import manifest_for

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
console = Console(width=120)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.push.adapters", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pushes", type=int, default=40)
    parser.add_argument("--clients", type=int, default=4, help="0: the service is idle")
    parser.add_argument("--every-s", type=float, default=0.5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--blocks", type=int, help="of KV cache: a few are filled in soon, also where others compute")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/push_adapters.json"))
    args = parser.parse_args()
    versions = [adapter(args.model, args.rank, seed) for seed in range(2)]
    config = {"r": args.rank, "lora_alpha": 2 * args.rank, "target_modules": MODULES}
    blocks = [] if args.blocks is None else ["--set", f"worker.num_blocks={args.blocks}"]
    service = LiveService(args.model, "--dtype", args.dtype, *blocks).start()
    try:
        wait_until_filled(service.log)
        times = Tokens(service, args.clients)
        with WeightPublisher(service.push_endpoint, run_id="bench", progress=False) as publisher, times:
            reports = []
            for number in range(args.pushes + 5):
                time.sleep(args.every_s)
                began = time.monotonic()
                report = publisher.push_adapter("bench", versions[number % 2], config, number + 1)
                reports.append((began, time.monotonic(), report))
        result = summary(reports, times, args)
    finally:
        service.stop()
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    console.print_json(json.dumps(result))
    return 0


def adapter(model: Path, rank: int, seed: int) -> dict[str, Any]:
    """On every projection, as PEFT names it, float32."""
    rng, tensors = np.random.default_rng(seed), {}
    for p in manifest_for(read_config(model), "float32").parameters:
        if p.name.endswith("_proj.weight"):
            module = "base_model.model." + p.name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = rng.standard_normal((rank, p.shape[1]), dtype=np.float32)
            tensors[f"{module}.lora_B.weight"] = np.zeros((p.shape[0], rank), np.float32)
    return tensors


class Tokens:
    """Clients that stream one request after another, each a process of its own, and when their tokens came."""

    def __init__(self, service: LiveService, clients: int) -> None:
        self.arrivals: list[list[float]] = []
        spawning = multiprocessing.get_context("spawn")
        self._stop, self._found = spawning.Event(), spawning.Queue()
        self._clients = [
            spawning.Process(target=_stream, args=(service.url, self._stop, self._found)) for _ in range(clients)
        ]

    def __enter__(self) -> "Tokens":
        for client in self._clients:
            client.start()
        time.sleep(8.0 if self._clients else 0.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.arrivals = [self._found.get(timeout=60.0) for _ in self._clients]
        for client in self._clients:
            client.join()

    def longest(self, began: float, ended: float) -> float | None:
        """Seconds between two tokens of a client, of those that touch this time."""
        pauses = (pair for times in self.arrivals for pair in itertools.pairwise(times))
        return max((b - a for a, b in pauses if a <= ended and b >= began), default=None)


def _stream(url: str, stop: Any, found: Any) -> None:
    """One client: times of `time.monotonic`, which all processes share."""
    times: list[float] = []
    with RolloutClient(url) as client:
        while not stop.is_set():
            for _ in client.stream("Tell me about the sea.", max_tokens=200, temperature=1.0, ignore_eos=True):
                times.append(time.monotonic())
                if stop.is_set():
                    break
    found.put(times)


def summary(reports: list[Any], times: Tokens, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds. reports: (began, ended, report) of each push, the first five to get warm."""
    warm = reports[5:]
    every = [b - a for list_ in times.arrivals for a, b in itertools.pairwise(list_)]
    step = median(every) if every else 0.0
    between = []
    for (_, before, _), (began, ended, _) in itertools.pairwise(warm):
        middle = (before + began - (ended - began)) / 2
        between.append((middle, middle + ended - began))
    pushes = [(began, ended) for began, ended, _ in warm]
    phases = {name: round(1e3 * median(r.seconds[name] for *_, r in warm), 2) for name in warm[0][2].seconds}
    return {
        "model": args.model.name,
        "dtype": args.dtype,
        "rank": args.rank,
        "clients": args.clients,
        "pushes": len(warm),
        "bytes": warm[0][2].nbytes,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "first_push_ms": round(1e3 * (reports[0][1] - reports[0][0]), 2),
        "push_ms": spread([1e3 * (ended - began) for began, ended in pushes]),
        "phases_ms": phases,
        "step_ms": round(1e3 * step, 2),
        "stall_ms": spread(stalls(times, pushes, step)),
        "without_a_push_ms": spread(stalls(times, between, step)),
    }


def stalls(times: Tokens, spans: list[tuple[float, float]], step: float) -> list[float]:
    """Of each time, milliseconds."""
    return [1e3 * (longest - step) for span in spans if (longest := times.longest(*span)) is not None]


def spread(found: list[float]) -> dict[str, float]:
    """Empty of nothing."""
    if not found:
        return {}
    return {"best": round(min(found), 2), "median": round(median(found), 2), "worst": round(max(found), 2)}


if __name__ == "__main__":
    sys.exit(main())

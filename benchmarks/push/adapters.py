"""Pushes of a rank-16 LoRA adapter to a service that generates: how long until it is live, and what it holds up.

``python -m benchmarks.push.adapters`` serves SmolLM2 on one replica, keeps `--clients` requests running on it, and
pushes an adapter on all projections of all layers again and again through shared memory: from `push_adapter()` to
committed, checksums on. A stall is the longest pause between two tokens of any running request that a push falls into,
less the median pause: bar, one step.
"""

import argparse
import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

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
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/push_adapters.json"))
    args = parser.parse_args()
    versions = [adapter(args.model, args.rank, seed) for seed in range(2)]
    config = {"r": args.rank, "lora_alpha": 2 * args.rank, "target_modules": MODULES}
    service = LiveService(args.model, "--dtype", args.dtype).start()
    try:
        times = Tokens(service, args.clients)
        with WeightPublisher(service.push_endpoint, run_id="bench", progress=False) as publisher, times:
            reports = []
            for number in range(args.pushes + 5):
                time.sleep(args.every_s)
                began = time.monotonic()
                report = publisher.push_adapter("bench", versions[number % 2], config, number + 1)
                reports.append((began, time.monotonic(), report))
        result = summary(reports[5:], times, args)
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
    """Clients that stream one request after another, and when their tokens came."""

    def __init__(self, service: LiveService, clients: int) -> None:
        self.arrivals: list[list[float]] = [[] for _ in range(clients)]
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(service.client(), number)) for number in range(clients)
        ]

    def __enter__(self) -> "Tokens":
        for thread in self._threads:
            thread.start()
        time.sleep(2.0 if self._threads else 0.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def pauses(self, began: float, ended: float) -> list[float]:
        """Between two tokens of a client, of those that touch this time."""
        found = []
        for times in self.arrivals:
            found += [b - a for a, b in itertools.pairwise(times) if a <= ended and b >= began]
        return found

    def _run(self, client: RolloutClient, number: int) -> None:
        with client:
            while not self._stop.is_set():
                times = self.arrivals[number]
                for _ in client.stream("Tell me about the sea.", max_tokens=200, temperature=1.0, ignore_eos=True):
                    times.append(time.monotonic())
                    if self._stop.is_set():
                        break
                times.append(time.monotonic())


def summary(reports: list[Any], times: Tokens, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds."""
    took = sorted(1e3 * (ended - began) for began, ended, _ in reports)
    every = [p for list_ in times.arrivals for p in (b - a for a, b in itertools.pairwise(list_))]
    step = median(every) if every else 0.0
    stalls = sorted(1e3 * (max(pauses) - step) for b, e, _ in reports if (pauses := times.pauses(b, e)))
    phases = {name: round(1e3 * median(r.seconds[name] for _, _, r in reports), 2) for name in reports[0][2].seconds}
    return {
        "model": args.model.name,
        "dtype": args.dtype,
        "rank": args.rank,
        "clients": args.clients,
        "pushes": len(reports),
        "bytes": reports[0][2].nbytes,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "push_ms": {"best": round(took[0], 2), "median": round(median(took), 2), "worst": round(took[-1], 2)},
        "phases_ms": phases,
        "step_ms": round(1e3 * step, 2),
        "stall_ms": {"median": round(median(stalls), 2), "worst": round(stalls[-1], 2)} if stalls else {},
    }


if __name__ == "__main__":
    sys.exit(main())

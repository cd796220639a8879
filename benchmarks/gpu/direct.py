"""A torch trainer and replicas on GPUs, and sleep. Pushes by the arena alone ("shm") against pushes from GPU to GPU,
which are live once the arena has them ("cuda_ipc") or before ("device").

``python -m benchmarks.gpu.direct --replicas 1 --out OUT.json`` on a host with a GPU and torch. Times in milliseconds.
Replicas take the GPUs in turn, from the first one; the trainer is on the first one, too, or on `--trainer cuda:1`.
live: from the call until the version is live. loop: processor time of the store's loop. limit: of one copy of as many
bytes into ordinary pinned memory, in the same run.
"""

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.gpu.limit import PinnedCopy
from benchmarks.gpu.report import add_out, on_gpus, report
from benchmarks.gpu.service import SETTLE_S, EmptyService
from benchmarks.gpu.shapes import SHAPES
from rollout_client import AsyncRolloutClient, PushReport, WeightPublisher
from weight_manager.families import manifest_for

MODEL = "Qwen3-0.6B"
ROUNDS, PAUSE_S = 9, 0.05
SEQUENCES, PROMPT, TOKENS = 64, 32, 1000
KV_BLOCKS = 11_700
"""Of 16 tokens: 21.5 GB."""
SETTINGS = (
    "worker.max_batch=64",
    "worker.max_tokens_per_step=4096",
    "worker.max_model_len=2048",
    f"worker.num_blocks={KV_BLOCKS}",
    "api.log_level=warning",
)


class Trainer:
    """Random weights on the device, and a publisher for each way."""

    def __init__(self, torch: Any, endpoint: str, model: str = MODEL) -> None:
        self.torch, self.version = torch, 0
        generator = torch.Generator("cuda").manual_seed(0)
        self.tensors: dict[str, Any] = {}
        for parameter in manifest_for(SHAPES[model], "bfloat16").parameters:
            made = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")
            norm = parameter.name.endswith("norm.weight")
            self.tensors[parameter.name] = made.fill_(1.0) if norm else made.normal_(0, 0.03, generator=generator)
        self.ways = {
            "shm": WeightPublisher(endpoint, run_id="direct", transport="shm"),
            "cuda_ipc": WeightPublisher(endpoint, run_id="direct", transport="cuda_ipc"),
            "device": WeightPublisher(endpoint, run_id="direct", transport="cuda_ipc", durability="device"),
        }

    def push(self, way: str) -> PushReport:
        self.prepare()
        return self.send(way)

    def prepare(self) -> None:
        """Other weights; they keep their size over any number of pushes."""
        for tensor in self.tensors.values():
            tensor.mul_(1.01 if self.version % 2 else 1 / 1.01)
        self.torch.cuda.synchronize()

    def send(self, way: str) -> PushReport:
        self.version += 1
        return self.ways[way].push(self.tensors, self.version)

    def in_turns(self, loop_ms: Callable[[], float], pause_s: float = 0.0) -> dict[str, Any]:
        """Medians of each stage, by way. Who goes first changes, so that both ways fill both slots of the arena.

        loop_ms: processor time of the store's loop so far.
        """
        reports: dict[str, list[PushReport]] = {way: [] for way in self.ways}
        loop: dict[str, list[float]] = {way: [] for way in self.ways}
        for turn in range(ROUNDS):
            for way in sorted(self.ways, reverse=bool(turn % 2)):
                self.prepare()
                before = loop_ms()
                reports[way].append(self.send(way))
                loop[way].append(loop_ms() - before)
                time.sleep(pause_s)
        return {way: summary(done, loop[way]) for way, done in reports.items()}


def summary(reports: list[PushReport], loop: list[float]) -> dict[str, Any]:
    stages = ("begin", "move", "seal", "commit", "total")
    found = {stage: round(1e3 * statistics.median(r.seconds[stage] for r in reports), 1) for stage in stages}
    totals = [round(1e3 * r.seconds["total"], 1) for r in reports]
    stalls = [round(max(r.stall_ms.values(), default=0.0), 1) for r in reports]
    live = sorted(round(1e3 * r.live_s, 1) for r in reports)
    found |= {
        "loop": round(statistics.median(loop), 1),
        "live": statistics.median(live),
        "lives": [round(1e3 * r.live_s, 1) for r in reports],
    }
    return found | {"totals": totals, "filled": [r.filled for r in reports], "stall": stalls}


async def generate(url: str) -> None:
    rng = np.random.default_rng(0)
    client = AsyncRolloutClient(url)
    prompts = [rng.integers(1000, 150_000, PROMPT).tolist() for _ in range(SEQUENCES)]
    await asyncio.gather(*(client.generate(prompt_ids=p, max_tokens=TOKENS, ignore_eos=True) for p in prompts))
    await client.aclose()


def sleep_and_wake(torch: Any, url: str) -> dict[str, Any]:
    """seen: bytes that this process sees come free on the first GPU; said: what the service says."""
    free = torch.cuda.mem_get_info(0)[0]
    began = time.perf_counter()
    said = httpx.post(f"{url}/v1/rollout/memory/release", json={}, timeout=60).raise_for_status().json()
    asleep = time.perf_counter()
    seen = torch.cuda.mem_get_info(0)[0] - free
    woken = time.perf_counter()
    httpx.post(f"{url}/v1/rollout/memory/resume", json={}, timeout=60).raise_for_status()
    resume = time.perf_counter() - woken
    return {"release_ms": round(1e3 * (asleep - began), 1), "resume_ms": round(1e3 * resume, 1)} | {
        "said": said["released_bytes"],
        "seen": seen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.direct", description=__doc__)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--model", choices=sorted(SHAPES), default=MODEL)
    parser.add_argument("--trainer", default="cuda:0", help="its device (%(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a replica's model")
    add_out(parser)
    args = parser.parse_args()
    import torch

    torch.cuda.set_device(args.trainer)

    log = Path(tempfile.mkdtemp(prefix="direct-")) / "service.log"
    options = on_gpus(SETTINGS, "--tp", str(args.tp))
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "replicas": args.replicas,
        "trainer": args.trainer,
        "tp": args.tp,
    }
    result["log"] = str(log)
    with EmptyService(SHAPES[args.model], args.replicas, log, *options) as service:
        trainer = Trainer(torch, service.push_endpoint, args.model)
        trainer.push("shm")
        while service.metric("rollout_replica_ready") != args.replicas:
            time.sleep(0.05)
        for way in tuple(trainer.ways) * 2:
            trainer.push(way)
        time.sleep(SETTLE_S)
        nbytes = sum(2 * tensor.numel() for tensor in trainer.tensors.values())
        limit = nbytes / PinnedCopy(torch, torch.device("cuda"), nbytes).rate()
        result |= {"bytes": nbytes, "limit": round(1e3 * limit, 1)}
        result["idle"] = trainer.in_turns(service.loop_ms)
        busy: dict[str, Any] = {}
        pushes = threading.Thread(target=lambda: busy.update(trainer.in_turns(service.loop_ms, PAUSE_S)))
        pushes.start()
        asyncio.run(generate(service.url))
        pushes.join()
        result["busy"] = busy
        result["sleep"] = [sleep_and_wake(torch, service.url) for _ in range(3)]
    report(result, args.out)


if __name__ == "__main__":
    main()

"""One model: versions pushed from the device while replicas idle, and while all of them generate."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.limit import PinnedCopy
from benchmarks.gpu.service import EmptyService
from benchmarks.gpu.shapes import SHAPES
from rollout_client import WeightPublisher
from rollout_client.push_report import PushReport
from weight_manager.families import manifest_for

WARM_UP_S, PAUSE_S = 8.0, 1.0


class Trainer:
    """Holds the tensors, changes them all between two pushes, and times the pushes."""

    def __init__(self, torch: Any, device: Any, shape: str) -> None:
        self._torch, self._device = torch, device
        self.digest = ""
        generator = torch.Generator(device).manual_seed(0)
        self.tensors = {
            p.name: torch.empty(p.shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
            for p in manifest_for(SHAPES[shape], "bfloat16").parameters
        }
        self.nbytes = sum(t.numel() * 2 for t in self.tensors.values())
        self.version = 0

    def push(self, publisher: WeightPublisher) -> dict[str, float]:
        """Milliseconds from the call to the answer that every replica serves it, and of its stages."""
        with self._torch.no_grad():
            for tensor in self.tensors.values():
                tensor.mul_(1.03)  # more than bfloat16 rounds away
        if self._device.type == "cuda":
            self._torch.cuda.synchronize()
        return self._timed(publisher, lambda: self.tensors)

    def push_by_cpu(self, publisher: WeightPublisher) -> dict[str, float]:
        """The last version again, as a trainer does it that knows no other way: tensor.cpu(), then push."""
        return self._timed(publisher, lambda: {name: t.cpu() for name, t in self.tensors.items()})

    def _timed(self, publisher: WeightPublisher, tensors: Callable[[], dict[str, Any]]) -> dict[str, float]:
        self.version += 1
        started = time.perf_counter()
        report = publisher.push(tensors(), self.version, timeout_s=300.0)
        self.digest = report.digest
        return _milliseconds(report, time.perf_counter() - started)


def measure(
    torch: Any, device: Any, shape: str, out: Path, *, replicas: int, pushes: int, clients: int, options: list[str]
) -> dict[str, Any]:
    """Everything about one shape."""
    trainer = Trainer(torch, device, shape)
    copy = PinnedCopy(torch, device, trainer.nbytes)
    with (
        EmptyService(SHAPES[shape], replicas, out / f"{shape}.log", *options) as service,
        WeightPublisher(service.push_endpoint, run_id="gpu", transport="shm") as publisher,
    ):
        first = trainer.push(publisher)
        service.wait_ready()
        second = trainer.push(publisher)  # the other slot: pinned here
        limit = copy.rate()
        quiet = [trainer.push(publisher) for _ in range(pushes)]
        load = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.gpu.load",
                service.url,
                str(clients),
                str(SHAPES[shape]["vocab_size"]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            time.sleep(WARM_UP_S)
            busy_limit = copy.rate()
            step_ms = mean_step_ms(service)
            given_up = service.metric("rollout_interrupted_steps_total")
            busy = []
            for _ in range(pushes):
                time.sleep(PAUSE_S)
                busy.append(trainer.push(publisher))
            time.sleep(PAUSE_S)
            given_up = service.metric("rollout_interrupted_steps_total") - given_up
            generated = json.loads(load.communicate("", timeout=120)[0])
        finally:
            load.kill()
            load.wait()
        digest = trainer.digest
        by_cpu = trainer.push_by_cpu(publisher)
    least = trainer.nbytes / limit * 1e3
    return {
        "model": shape,
        "bytes": trainer.nbytes,
        "tensors": len(trainer.tensors),
        "replicas": replicas,
        "limit_gb_per_s": round(limit / 1e9, 2),
        "limit_gb_per_s_while_generating": round(busy_limit / 1e9, 2),
        "limit_ms": round(least, 1),
        "first_push_ms": first,
        "second_push_ms": second,
        "by_way_of_the_cpu_ms": by_cpu,
        "idle_replicas": summary(quiet, least),
        "generating_replicas": summary(busy, least),
        "step_ms": step_ms,
        "generated": generated | {"steps_given_up": given_up},
        "same_digest_by_way_of_the_cpu": digest == trainer.digest,
    }


def mean_step_ms(service: EmptyService) -> float:
    """Of a replica that generates, without a push."""
    ends = []
    for wait in (2.0, 4.0):  # the figures come once a second
        time.sleep(wait)
        ends.append([service.metric(f"rollout_step_seconds_{what}") for what in ("sum", "count")])
    (seconds, steps), (more, after) = ends
    return round((more - seconds) / max(after - steps, 1) * 1e3, 1)


def summary(runs: list[dict[str, float]], least: float) -> dict[str, Any]:
    """Medians, and the least a push can take over what it took: to every byte checked, and to committed."""
    middle = {stage: round(float(np.median([run[stage] for run in runs])), 1) for stage in runs[0]}
    return {
        "median_ms": middle,
        "all_total_ms": [run["total"] for run in runs],
        "limit_over_checked": round(least / middle["checked"], 3),
        "limit_over_committed": round(least / middle["total"], 3),
    }


def _milliseconds(report: PushReport, total: float) -> dict[str, float]:
    seconds = report.seconds
    stages = {stage: round(seconds[stage] * 1e3, 1) for stage in ("begin", "move", "seal", "commit")}
    checked = stages["begin"] + stages["move"] + stages["seal"]
    store = {f"store_{s}": round(seconds.get(f"store_{s}", 0.0) * 1e3, 1) for s in ("prepare", "commit")}
    stall = {"stall_max": round(max(report.stall_ms.values(), default=0.0), 1)}
    return stages | {"checked": round(checked, 1), "total": round(total * 1e3, 1)} | store | stall

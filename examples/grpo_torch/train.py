"""The training loop of grpo_paddle/train.py: the same service, task and report, another trainer."""

import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from examples.grpo_paddle import checkpoint
from examples.grpo_paddle.progress import Progress
from examples.grpo_paddle.report import Report
from examples.grpo_paddle.rollouts import Rollouts, RolloutStream
from examples.grpo_paddle.service import Service
from examples.grpo_paddle.shape import Shape
from examples.grpo_torch.learner import Learner, warm_up
from examples.grpo_torch.model import initial_weights
from rollout_client import WeightPublisher

GROUP, KEEP = 16, 8


def run(
    out: Path, steps: int, replicas: int, seed: int, device: str, workers: str, console: Console
) -> dict[str, float]:
    """Train and leave summary.json, reward.png and service.log in `out`; returns the summary.

    device: the trainer's. workers: the service's --device.
    """
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shape = Shape()
    weights = initial_weights(shape, seed, torch.device(device))
    console.print(f"warming up on {device}: 40 supervised steps")
    warm_up(weights, shape, rng)
    checkpoint.write(out / "model", shape, {name: tensor.detach().cpu() for name, tensor in weights.items()})
    learner = Learner(weights, shape, GROUP)
    versions: OrderedDict[int, dict[str, Any]] = OrderedDict({0: _copy(weights)})
    console.print(f"starting {replicas} replicas")
    transport: Literal["auto", "cuda_ipc"] = "cuda_ipc" if workers == "gpu" else "auto"
    with (
        Service(out / "model", replicas, out, "--device", workers) as access,
        WeightPublisher(access.push_endpoint, run_id="grpo-torch", transport=transport) as publisher,
        RolloutStream(access.url, rng, group=GROUP) as stream,
        Progress(console, steps) as progress,
    ):
        report = Report()
        for version in range(1, steps + 1):
            rollouts = stream.take()
            present = rollouts.versions >= 0
            newest = np.where(present, rollouts.versions, -1).max(1)
            gap = max(_gaps(learner, versions, rollouts, newest))
            learner.step(rollouts.batch)
            versions[version] = _copy(weights)
            if len(versions) > KEEP:
                versions.popitem(last=False)
            stream.feed()
            started = time.monotonic()
            pushed = publisher.push(versions[version], version, in_flight="keep")
            report.push_ms.append((time.monotonic() - started) * 1e3)
            report.stall_ms.extend(pushed.stall_ms.values())
            report.logprob_gap_max = max(report.logprob_gap_max, gap)
            report.rewards.append(float(rollouts.batch.rewards.mean()))
            report.staleness.append(float(version - 1 - rollouts.versions[present].mean()))
            report.mixed += int((newest > rollouts.versions[:, 0]).sum())
            report.tokens += rollouts.tokens
            progress.update(report, version)
    return report.write(out)


def _copy(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def _gaps(learner: Learner, versions: dict[int, dict[str, Any]], rollouts: Rollouts, newest: Any) -> list[float]:
    """Of the answers that one version made whole: nothing that was computed again can be of another. The mixed ones,
    with what their spans say of them, are recomputed in grpo_paddle/history.py."""
    whole = newest == rollouts.versions[:, 0]
    made_by = np.unique(newest[whole]).tolist()
    return [learner.logprob_gap(versions[v], rollouts.batch, whole & (newest == v)) for v in made_by] or [0.0]

"""The training loop: rollouts -> check -> learn -> push, with generation going on all the while."""

import time
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import paddle
from rich.console import Console

from examples.grpo_paddle import checkpoint
from examples.grpo_paddle.access import Access
from examples.grpo_paddle.grpo import Learner
from examples.grpo_paddle.history import History
from examples.grpo_paddle.model import initial_weights
from examples.grpo_paddle.progress import Progress
from examples.grpo_paddle.report import Report
from examples.grpo_paddle.rollouts import RolloutStream
from examples.grpo_paddle.sft import warm_up
from examples.grpo_paddle.shape import Shape
from rollout_client.publisher import WeightPublisher

GROUP = 16


def run(
    out: Path, steps: int, seed: int, console: Console, service: AbstractContextManager[Access]
) -> dict[str, float]:
    """Train and leave model/, summary.json and reward.png in `out`; returns the summary.

    service: entered once `out`/model is written.
    """
    out.mkdir(parents=True, exist_ok=True)
    paddle.seed(seed)
    rng = np.random.default_rng(seed)
    shape = Shape()
    weights = initial_weights(shape, seed)
    console.print("warming up: 40 supervised steps")
    warm_up(weights, shape, rng)
    checkpoint.write(out / "model", shape, weights)
    history = History(shape)
    history.add(0, weights)  # what the service loads from disk
    learner = Learner(weights, shape, GROUP)
    with (
        service as access,
        WeightPublisher(
            access.push_endpoint, run_id=access.run_id, token=access.push_token, transport=access.transport
        ) as publisher,
    ):
        first = 1
        if not access.serves_ours:
            publisher.push(history.add(first, weights), first)
            first += 1
        with (
            RolloutStream(access.url, rng, group=GROUP, token=access.data_token) as stream,
            Progress(console, steps) as progress,
        ):
            console.print(f"serving at {access.url}; every step pushes a version")
            report = Report()
            for version in range(first, first + steps):
                rollouts = stream.take()
                gap = history.logprob_gap(rollouts)
                learner.step(rollouts.batch)
                snapshot = history.add(version, weights)
                stream.feed()
                started = time.monotonic()
                pushed = publisher.push(snapshot, version, in_flight="keep")
                report.push_ms.append((time.monotonic() - started) * 1e3)
                report.stall_ms.extend(pushed.stall_ms.values())
                report.logprob_gap_max = max(report.logprob_gap_max, gap)
                report.rewards.append(float(rollouts.batch.rewards.mean()))
                present = rollouts.versions >= 0
                report.staleness.append(float(version - 1 - rollouts.versions[present].mean()))
                report.mixed += int((np.where(present, rollouts.versions, -1).max(1) > rollouts.versions[:, 0]).sum())
                report.tokens += rollouts.tokens
                report.rescored += rollouts.rescored
                report.unequal += rollouts.unequal
                progress.update(report, version)
    return report.write(out)


def write_untrained(directory: Path, seed: int) -> None:
    """A checkpoint that a service can start from; an attached trainer's first push replaces its weights."""
    shape = Shape()
    checkpoint.write(directory, shape, initial_weights(shape, seed))

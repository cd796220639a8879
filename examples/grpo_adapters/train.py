"""Two runs, a step of each in turn: rollouts under the run's adapter -> learn -> push that adapter.

One run's reward is for digits in rising order, the other's for digits in falling order: the part of the answer's places
that are right. The base, which both share and nobody changes, has been warmed up on problems of both kinds, so that it
answers either way; each adapter learns its own.
"""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812 (its usual name)
from rich.console import Console

from examples.grpo_adapters.lora import CONFIG, Adapter
from examples.grpo_paddle import checkpoint
from examples.grpo_paddle.batch import Batch, advantages
from examples.grpo_paddle.model import OneVersion, forward, initial_weights, token_logprobs
from examples.grpo_paddle.rollouts import Samples, collate
from examples.grpo_paddle.service import Service
from examples.grpo_paddle.shape import Shape
from examples.grpo_paddle.task import ANSWER_LEN, DIGITS, Ids, problems
from rollout_client import AsyncRolloutClient, WeightPublisher

WARM_UP = 300
PROMPTS, GROUP, CLIP, LR = 12, 12, 0.2, 5e-3


class Run:
    """One trainer: its adapter, its task, its own connection to the store. falling: which order is rewarded."""

    def __init__(self, name: str, base: dict[str, Any], shape: Shape, endpoint: str, seed: int, *, falling: bool):
        self.name = name
        self.rewards: list[float] = []  # mean of each step
        self.push_ms: list[float] = []
        self._shape, self._falling = shape, falling
        self._rng = np.random.default_rng(seed)
        self.adapter = Adapter(base, seed)
        parameters = list(self.adapter.halves.values())
        clip = paddle.nn.ClipGradByGlobalNorm(1.0)
        self._optimizer = paddle.optimizer.AdamW(LR, parameters=parameters, weight_decay=0.0, grad_clip=clip)
        self.publisher = WeightPublisher(endpoint, run_id=name, progress=False)

    def push(self, version: int) -> None:
        """The adapter, and nothing else."""
        began = time.monotonic()
        self.publisher.push_adapter(self.name, self.adapter.state_dict(), CONFIG, version)
        self.push_ms.append((time.monotonic() - began) * 1e3)

    async def step(self, client: AsyncRolloutClient, version: int) -> None:
        """Rollouts under what was pushed last, one update, one push."""
        prompts, answers = problems(self._rng, PROMPTS)
        if self._falling:
            answers = _falling(answers)
        options: dict[str, Any] = {"n": GROUP, "max_tokens": ANSWER_LEN, "ignore_eos": True, "adapter": self.name}
        replies = await asyncio.gather(*(client.generate(prompt_ids=p, **options) for p in prompts.tolist()))
        outputs = [output for reply in replies for output in reply.outputs]
        wide, right = np.repeat(prompts, GROUP, axis=0), np.repeat(answers, GROUP, axis=0)
        batch = collate([Samples(wide, right, outputs)]).batch
        scored = np.array([_places(o.token_ids, a) for o, a in zip(outputs, right, strict=True)], np.float32)
        self.rewards.append(float(scored.mean()))
        self._learn(batch, scored)
        self.push(version)

    def _learn(self, batch: Batch, scored: Any) -> None:
        gain = advantages(scored, GROUP)
        keep = np.flatnonzero(gain)
        if keep.size == 0:
            return
        weights = OneVersion(self.adapter.weights())
        logprobs = token_logprobs(weights, self._shape, paddle.to_tensor(batch.ids[keep]), batch.first)
        ratio = paddle.exp(logprobs - paddle.to_tensor(batch.logprobs[keep]))
        advantage, mask = paddle.to_tensor(gain[keep, None]), paddle.to_tensor(batch.mask[keep])
        objective = paddle.minimum(ratio * advantage, paddle.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        (-(objective * mask).sum() / mask.sum()).backward()
        self._optimizer.step()
        self._optimizer.clear_grad()


def _falling(answers: Ids) -> Ids:
    """The same digits from the largest down, and the end token."""
    return np.concatenate([answers[:, :DIGITS][:, ::-1], answers[:, DIGITS:]], axis=1)


def _warm_up(weights: dict[str, Any], shape: Shape, rng: np.random.Generator) -> None:
    """Train the base in place on solved problems, half of them of each kind."""
    optimizer = paddle.optimizer.AdamW(2e-3, parameters=list(weights.values()), weight_decay=0.0)
    for _ in range(WARM_UP):
        prompts, answers = problems(rng, 64)
        answers = np.where(rng.random((64, 1)) < 0.5, answers, _falling(answers))
        ids = paddle.to_tensor(np.concatenate([prompts, answers], axis=1))
        logits = forward(OneVersion(weights), shape, ids[:, :-1])[:, prompts.shape[1] - 1 :]
        F.cross_entropy(logits, ids[:, prompts.shape[1] :].unsqueeze(-1)).backward()
        optimizer.step()
        optimizer.clear_grad()


def _places(tokens: list[int], answer: Ids) -> float:
    """Share of the answer's places that are right."""
    return float(np.mean([a == b for a, b in zip(tokens, answer.tolist(), strict=True)]))


def run(out: Path, steps: int, replicas: int, seed: int, console: Console) -> dict[str, Any]:
    """Train both, and leave model/ and summary.json in `out`; returns the summary."""
    out.mkdir(parents=True, exist_ok=True)
    paddle.seed(seed)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # Paddle has set the root's to INFO: a line a request
    shape = Shape()
    base = initial_weights(shape, seed)
    console.print(f"warming the base up: {WARM_UP} supervised steps")
    _warm_up(base, shape, np.random.default_rng(seed))
    checkpoint.write(out / "model", shape, base)
    with Service(out / "model", replicas, out) as access:
        runs = [
            Run("rising", base, shape, access.push_endpoint, seed + 1, falling=False),
            Run("falling", base, shape, access.push_endpoint, seed + 2, falling=True),
        ]
        asyncio.run(_train(runs, access.url, steps, console))
        for one in runs:
            one.publisher.close()
    summary = {one.name: _summary(one) for one in runs}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


async def _train(runs: list[Run], url: str, steps: int, console: Console) -> None:
    async with AsyncRolloutClient(url) as client:
        for one in runs:
            one.push(0)
        for version in range(1, steps + 1):
            for one in runs:
                await one.step(client, version)
            if version % 10 == 0:
                console.print(f"step {version}: " + ", ".join(f"{o.name} {np.mean(o.rewards[-10:]):.2f}" for o in runs))


def _summary(one: Run) -> dict[str, float]:
    first, last = one.rewards[:5], one.rewards[-5:]
    return {
        "reward_first": round(float(np.mean(first)), 3),
        "reward_last": round(float(np.mean(last)), 3),
        "push_ms_median": round(float(np.median(one.push_ms)), 1),
    }

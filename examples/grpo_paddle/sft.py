"""A short supervised warm-up, so that a random policy sometimes earns the first reward."""

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812 (its usual name)

from examples.grpo_paddle.model import OneVersion, forward
from examples.grpo_paddle.shape import Shape
from examples.grpo_paddle.task import PROMPT_LEN, problems


def warm_up(weights: dict[str, Any], shape: Shape, rng: np.random.Generator, steps: int = 40, batch: int = 64) -> None:
    """Train `weights` in place on solved problems; ends weak on purpose, GRPO does the rest."""
    optimizer = paddle.optimizer.AdamW(1.2e-3, parameters=list(weights.values()), weight_decay=0.0)
    for _ in range(steps):
        ids = paddle.to_tensor(np.concatenate(problems(rng, batch), axis=1))
        logits = forward(OneVersion(weights), shape, ids[:, :-1])[:, PROMPT_LEN - 1 :]
        F.cross_entropy(logits, ids[:, PROMPT_LEN:].unsqueeze(-1)).backward()
        optimizer.step()
        optimizer.clear_grad()

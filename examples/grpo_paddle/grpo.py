"""One GRPO update: group-relative advantages, PPO's clipped ratio against the policy that sampled.

GRPO: Shao et al. 2024 (DeepSeekMath); the clip: Schulman et al. 2017. The behaviour logprobs are those the
workers reported, token by token, so a rollout that is a version or two old is corrected for exactly.
"""

from typing import Any

import numpy as np
import paddle

from examples.grpo_paddle.batch import Batch, advantages
from examples.grpo_paddle.model import OneVersion, token_logprobs
from examples.grpo_paddle.shape import Shape


class Learner:
    """Holds the trainable weights and their optimizer."""

    def __init__(self, weights: dict[str, Any], shape: Shape, group: int, lr: float = 6e-4, clip: float = 0.2):
        self.weights = weights
        self._shape, self._group, self._clip = shape, group, clip
        self._optimizer = paddle.optimizer.AdamW(
            lr,
            parameters=list(weights.values()),
            weight_decay=0.0,
            grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
        )

    def step(self, batch: Batch) -> None:
        """Update the weights in place; a batch without any difference in reward changes nothing."""
        advantage = advantages(batch.rewards, self._group)
        keep = np.flatnonzero(advantage)
        if keep.size == 0:
            return
        gain = paddle.to_tensor(advantage[keep, None])
        mask = paddle.to_tensor(batch.mask[keep])
        logprobs = token_logprobs(OneVersion(self.weights), self._shape, paddle.to_tensor(batch.ids[keep]), batch.first)
        ratio = paddle.exp(logprobs - paddle.to_tensor(batch.logprobs[keep]))
        clipped = paddle.clip(ratio, 1 - self._clip, 1 + self._clip)
        objective = paddle.minimum(ratio * gain, clipped * gain)
        (-(objective * mask).sum() / mask.sum()).backward()
        self._optimizer.step()
        self._optimizer.clear_grad()

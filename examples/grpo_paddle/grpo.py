"""One GRPO update: group-relative advantages, PPO's clipped ratio against the policy that sampled.

GRPO: Shao et al. 2024 (DeepSeekMath); the clip: Schulman et al. 2017. The behaviour logprobs are those the
workers reported, token by token, so a rollout that is a version or two old is corrected for exactly.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from examples.grpo_paddle.model import OneVersion, Shape, token_logprobs
from examples.grpo_paddle.task import Ids, Rewards

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """Rollouts to learn from. Rows of one prompt are neighbours.

    ids: [B, T] prompt and answer, padded with the end token. logprobs, mask: [B, T - first], behaviour logprob
    of each answer token and 1 where there is one. rewards: [B].
    """

    ids: Ids
    first: int
    logprobs: Float32
    mask: Float32
    rewards: Rewards


def advantages(rewards: Rewards, group: int) -> Float32:
    """[B] rewards -> [B] advantages, normalised within each group of `group` neighbours."""
    grouped = rewards.reshape(-1, group)
    centred = grouped - grouped.mean(axis=1, keepdims=True)
    scaled: Float32 = (centred / (grouped.std(axis=1, keepdims=True) + 1e-4)).reshape(-1).astype(np.float32)
    return scaled


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

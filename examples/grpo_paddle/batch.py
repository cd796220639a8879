"""What any trainer learns from, whatever framework it is written in."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

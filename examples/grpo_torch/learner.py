"""The update of grpo_paddle/grpo.py and the warm-up of grpo_paddle/sft.py, in torch."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from examples.grpo_paddle.batch import Batch, advantages
from examples.grpo_paddle.shape import Shape
from examples.grpo_paddle.task import PROMPT_LEN, problems
from examples.grpo_torch.model import forward, token_logprobs


def warm_up(weights: dict[str, Any], shape: Shape, rng: np.random.Generator, steps: int = 40, batch: int = 64) -> None:
    """Train `weights` in place on solved problems; ends weak on purpose, GRPO does the rest."""
    device = next(iter(weights.values())).device
    optimizer = torch.optim.AdamW(weights.values(), lr=1.2e-3, weight_decay=0.0)
    for _ in range(steps):
        ids = torch.from_numpy(np.concatenate(problems(rng, batch), axis=1)).to(device)
        logits = forward(weights, shape, ids[:, :-1])[:, PROMPT_LEN - 1 :]
        optimizer.zero_grad()
        F.cross_entropy(logits.transpose(1, 2), ids[:, PROMPT_LEN:]).backward()
        optimizer.step()


class Learner:
    """Holds the trainable weights and their optimizer."""

    def __init__(self, weights: dict[str, Any], shape: Shape, group: int, lr: float = 6e-4, clip: float = 0.2):
        self.weights = weights
        self._shape, self._group, self._clip = shape, group, clip
        self._device = next(iter(weights.values())).device
        self._optimizer = torch.optim.AdamW(weights.values(), lr=lr, weight_decay=0.0)

    def step(self, batch: Batch) -> None:
        """Update the weights in place; a batch without any difference in reward changes nothing."""
        advantage = advantages(batch.rewards, self._group)
        keep = np.flatnonzero(advantage)
        if keep.size == 0:
            return
        gain, mask, behaviour = (self._put(a) for a in (advantage[keep, None], batch.mask[keep], batch.logprobs[keep]))
        ratio = torch.exp(
            token_logprobs(self.weights, self._shape, self._put(batch.ids[keep]), batch.first) - behaviour
        )
        clipped = torch.clip(ratio, 1 - self._clip, 1 + self._clip)
        objective = torch.minimum(ratio * gain, clipped * gain)
        self._optimizer.zero_grad()
        (-(objective * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self._optimizer.step()

    def logprob_gap(self, weights: dict[str, Any], batch: Batch, rows: Any) -> float:
        """Largest |logprob the worker reported - logprob under these weights| of some rows; 0 if there are none."""
        if not rows.any():
            return 0.0
        with torch.no_grad():
            expected = token_logprobs(weights, self._shape, self._put(batch.ids[rows]), batch.first).cpu().numpy()
        return float(np.abs((expected - batch.logprobs[rows]) * batch.mask[rows]).max())

    def _put(self, array: Any) -> Any:
        return torch.from_numpy(array).to(self._device)

"""The last few weight versions, and the proof that the right weights made the right tokens.

A worker that keeps its KV cache over an update leaves the keys and values of earlier positions to the older
weights. So position p is recomputed with the weights that made it: those of the token sampled from it, or of
the first answer token for the prompt. Where a span says that the worker computed everything again, for it had lost
its cache, all that comes before the span is of its version, and what follows takes a forward pass of its own.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from examples.grpo_paddle.batch import Float32
from examples.grpo_paddle.model import MixedVersions, OneVersion, Operators, token_logprobs
from examples.grpo_paddle.rollouts import Rollouts
from examples.grpo_paddle.shape import Shape
from examples.grpo_paddle.task import Ids


class History:
    """Copies of the weights by version, the oldest dropped first."""

    def __init__(self, shape: Shape, keep: int = 8):
        self._shape, self._keep = shape, keep
        self._versions: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def add(self, version: int, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Remember a copy of `weights` under this version; returns the copy."""
        copy = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self._versions[version] = copy
        while len(self._versions) > self._keep:
            self._versions.popitem(last=False)
        return copy

    def logprob_gap(self, rollouts: Rollouts) -> float:
        """Largest |logprob the worker reported - logprob recomputed under the version its span claims|.

        Raises KeyError for a version that was never pushed or is no longer kept.
        """
        made_by = np.where(rollouts.versions < 0, rollouts.versions[:, :1], rollouts.versions)
        gap = 0.0
        for begin in np.unique(rollouts.renewed):
            tokens = (rollouts.renewed == begin) * rollouts.batch.mask
            rows = tokens.any(axis=1)
            owner = np.concatenate([np.repeat(made_by[:, begin, None], begin, axis=1), made_by[:, begin:]], axis=1)
            expected = self._expected(rollouts.batch.ids[rows], rollouts.batch.first, owner[rows])
            gap = max(gap, float(np.abs((expected - rollouts.batch.logprobs[rows]) * tokens[rows]).max()))
        return gap

    def _expected(self, ids: Ids, first: int, made_by: Ids) -> Float32:
        """Logprobs [B, answer] of the answers in ids [B, T], where made_by [B, answer] computed what each token is
        sampled from, and the first of a row its whole prompt."""
        mixed = made_by.min(axis=1) != made_by.max(axis=1)
        expected = np.zeros(made_by.shape, np.float32)
        for version in np.unique(made_by[~mixed]):
            rows = ~mixed & (made_by[:, 0] == version)
            expected[rows] = self._logprobs(OneVersion(self._versions[int(version)]), ids[rows], first)
        if mixed.any():
            present = np.unique(made_by[mixed])
            prompt = np.repeat(made_by[mixed, :1], first - 1, axis=1)
            owner = np.searchsorted(present, np.concatenate([prompt, made_by[mixed]], axis=1))
            ops = MixedVersions([self._versions[int(version)] for version in present], owner)
            expected[mixed] = self._logprobs(ops, ids[mixed], first)
        return expected

    def _logprobs(self, ops: Operators, ids: Ids, first: int) -> Float32:
        with paddle.no_grad():
            result: Float32 = token_logprobs(ops, self._shape, paddle.to_tensor(ids), first).numpy()
        return result

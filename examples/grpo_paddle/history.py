"""The last few weight versions, and the proof that the right weights made the right tokens.

A worker that keeps its KV cache over an update leaves the keys and values of earlier positions to the older
weights. So position p is recomputed with the weights that made it: those of the token sampled from it, or of
the first answer token for the prompt.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from examples.grpo_paddle.model import MixedVersions, OneVersion, Operators, Shape, token_logprobs
from examples.grpo_paddle.rollouts import Rollouts


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
        batch, versions = rollouts.batch, rollouts.versions
        present = np.unique(versions[versions >= 0])
        if len(present) == 1:
            ops: Operators = OneVersion(self._versions[int(present[0])])
        else:
            filled = np.where(versions < 0, versions[:, :1], versions)
            prompt = np.repeat(filled[:, :1], batch.first - 1, axis=1)
            owner = np.searchsorted(present, np.concatenate([prompt, filled], axis=1))
            ops = MixedVersions([self._versions[int(version)] for version in present], owner)
        with paddle.no_grad():
            expected = token_logprobs(ops, self._shape, paddle.to_tensor(batch.ids), batch.first).numpy()
        return float(np.abs((expected - batch.logprobs) * batch.mask).max())

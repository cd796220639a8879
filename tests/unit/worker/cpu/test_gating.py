"""What the gate of a feed-forward network makes, and that nothing beside it is written, whatever its size."""

import numpy as np
import pytest

from worker.models.compiled_program import gating
from worker.models.onednn_backend import compiled_kernels

GUARD = 64
"""Numbers on both sides of what is written."""


def _swish(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("columns", [1, 16, 48])
@pytest.mark.parametrize("features", [1, 4, 12, 15, 16, 17, 31, 48, 1100])
@pytest.mark.parametrize("biased", [False, True])
def test_only_its_own_numbers_are_written(features, columns, biased):
    native, why = compiled_kernels(64)
    assert native is not None, why
    rng = np.random.default_rng(features)
    gate_up = rng.standard_normal((2 * features, columns), np.float32)
    bias = rng.standard_normal(2 * features, np.float32)
    memory = np.full(features * columns + 2 * GUARD, 7, np.float32)
    made = memory[GUARD:-GUARD].reshape(features, columns)
    gating(native, gate_up, made, lambda: bias.ctypes.data if biased else 0)()
    both = gate_up + bias[:, None] if biased else gate_up
    np.testing.assert_allclose(made, _swish(both[:features]) * both[features:], rtol=2e-5, atol=2e-6)
    assert (memory[:GUARD] == 7).all()
    assert (memory[-GUARD:] == 7).all()

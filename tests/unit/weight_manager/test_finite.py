import numpy as np
import pytest

from rollout_client.digest import digest_of
from weight_manager import finite
from weight_manager.finite import BLOCK_BYTES, ENDS, all_finite, ends_finite, prove_rows

SIZE = 3 * (BLOCK_BYTES // 2) + 5


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def loop(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(finite, "_loops", lambda: None)
    elif finite._loops() is None:
        pytest.skip("no C compiler here")


def make(dtype, at=None, value=0.0):
    flat = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    if at is not None:
        flat[at] = value
    return flat if dtype == "float32" else (flat.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("at", [0, 1, ENDS, BLOCK_BYTES // 4, SIZE // 2, SIZE - 1])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_element_is_enough(dtype, at, value):
    flat = make(dtype, at, value)
    assert not all_finite(flat)
    assert ends_finite(flat) == (ENDS <= at < SIZE - ENDS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("largest", [0.0, 3.0e38, -3.0e38])
def test_whatever_is_a_number_passes(dtype, largest):
    """3e38 everywhere: finite, though the sum is not."""
    flat = make(dtype, slice(None) if largest else None, largest)
    assert all_finite(flat)
    assert ends_finite(flat)


@pytest.mark.parametrize("size", [0, 1, 2])
def test_few_elements(size):
    assert all_finite(np.zeros(size, np.float32))
    assert ends_finite(np.zeros(max(size, 1), np.uint16))


def test_infinities_that_cancel_out_are_seen():
    assert not all_finite(np.array([np.inf, -np.inf, 1], np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("at", "found"), [(9, True), (10, False), (29, False), (30, True), (49, True), (50, False)])
def test_rows_are_looked_at_and_nothing_between_them(dtype, at, found):
    flat = make(dtype, at, np.nan)
    starts, sizes = (np.array(rows, np.int64) * flat.itemsize for rows in ([50, 10], [20, 20]))
    digests, finite_all = prove_rows(flat, starts, sizes)
    assert finite_all is found
    assert digests.tolist() == [digest_of(flat[start : start + 20].data) for start in (50, 10)]

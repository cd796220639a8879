import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_client.patches import apply, differing, hasher, patched, to_gaps, update

pytestmark = pytest.mark.usefixtures("way")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 300_000), st.lists(st.integers(0, 299_999)), st.sampled_from(["<u2", "<u4"]))
def test_a_patch_makes_the_one_the_other(size, places, dtype):
    before = np.arange(size).astype(dtype)
    after = before.copy()
    after[[place for place in places if place < size]] += 1
    index = differing(before, after)
    mine = before.copy()
    state = hasher()
    patch = update(mine, after, index.size, state)
    assert state.intdigest() == xxhash.xxh3_64_intdigest(after.data)
    assert patch is not None
    gaps, values = patch
    assert np.array_equal(mine, after)
    assert np.array_equal(gaps, to_gaps(index))
    assert np.array_equal(values, after[index])
    target, state = np.zeros_like(before), hasher()
    assert patched(target, before, gaps, values, state)
    assert np.array_equal(target, after)
    assert state.intdigest() == xxhash.xxh3_64_intdigest(after.data)
    assert apply(before, gaps, values)
    assert np.array_equal(before, after)


def test_what_is_not_worth_a_patch_is_none():
    before, after, state = np.zeros(9000, "<u2"), np.ones(9000, "<u2"), hasher()
    assert update(before, after, 500, state) is None
    assert state.intdigest() == xxhash.xxh3_64_intdigest(after.data)


def test_a_long_way_is_told_in_few_bytes():
    assert to_gaps(np.array([0, 1, 256, 512, 1200])).tolist() == [0, 0, 254, 255, 0, 255, 255, 177]


def test_bits_count_not_values():
    before = np.array([np.nan, 0.0, 1.0], np.float32).view("<u4")
    after = np.array([np.nan, -0.0, 1.0], np.float32).view("<u4")
    assert differing(before, after).tolist() == [1]


@pytest.mark.parametrize(("gaps", "values"), [([10], [1]), ([0, 0], [1]), ([0], [1, 2]), ([255], [1])])
def test_what_does_not_fit_is_refused_and_writes_nowhere_else(gaps, values):
    around = np.zeros(30, "<u2")
    patch = np.array(gaps, np.uint8), np.array(values, "<u2")
    assert not apply(around[10:20], *patch)
    assert not around.any()
    assert not patched(around[10:20], np.zeros(10, "<u2"), *patch, hasher())
    assert not around[:10].any()
    assert not around[20:].any()

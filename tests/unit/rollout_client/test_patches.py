import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.patches import apply, differing, to_gaps


@given(st.integers(1, 3000), st.lists(st.integers(0, 2999)), st.sampled_from(["<u2", "<u4"]))
def test_a_patch_makes_the_one_the_other(size, places, dtype):
    before = np.arange(size).astype(dtype)
    after = before.copy()
    after[[place for place in places if place < size]] += 1
    index = differing(before, after)
    gaps = to_gaps(index)
    assert apply(before, gaps, after[index])
    assert np.array_equal(before, after)


def test_a_long_way_is_told_in_few_bytes():
    assert to_gaps(np.array([0, 1, 256, 512, 1200])).tolist() == [0, 0, 254, 255, 0, 255, 255, 177]


def test_bits_count_not_values():
    before = np.array([np.nan, 0.0, 1.0], np.float32).view("<u4")
    after = np.array([np.nan, -0.0, 1.0], np.float32).view("<u4")
    assert differing(before, after).tolist() == [1]


@pytest.mark.parametrize(("gaps", "values"), [([10], [1]), ([0, 0], [1]), ([0], [1, 2]), ([255], [1])])
def test_what_does_not_fit_changes_nothing(gaps, values):
    target = np.zeros(10, "<u2")
    assert not apply(target, np.array(gaps, np.uint8), np.array(values, "<u2"))
    assert not target.any()

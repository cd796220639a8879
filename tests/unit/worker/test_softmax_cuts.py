"""top-k, top-p and min-p against their definitions, spelled out over the whole sorted vocabulary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.base import Float32
from worker.messages import SamplingParams
from worker.softmax import largest, open_ids, truncates


def _reference(weights: Float32, sampling: SamplingParams) -> list[int]:
    """Sort by weight falling, then id; cut; keep what is left in id order."""
    order = sorted((i for i in range(len(weights)) if weights[i] > 0), key=lambda i: (-weights[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        goal = sampling.top_p * sum(float(weights[i]) for i in order)
        reached, kept = 0.0, []
        for i in order:
            kept.append(i)
            reached += float(weights[i])
            if reached >= goal:
                break
        order = kept
    return sorted(i for i in order if weights[i] >= np.float32(sampling.min_p))


def _open(scaled: Float32, sampling: SamplingParams) -> tuple[list[int], list[int]]:
    scaled = scaled - scaled.max()
    weights = np.exp(scaled)
    found = open_ids(scaled, weights, float(weights.sum(dtype=np.float64)), sampling).tolist()
    return found, _reference(weights, sampling)


@given(
    st.lists(st.sampled_from([0.0, -0.5, -1.0, -1.5, -3.0, -6.0, -20.0, -np.inf]), min_size=2, max_size=12),
    st.integers(0, 6),
    st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.99, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3, 0.9, 1.0]),
)
def test_matches_the_definition_with_ties(values: list[float], top_k: int, top_p: float, min_p: float) -> None:
    scaled = np.array([0.0, *values], np.float32)
    sampling = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    if truncates(sampling, len(scaled)):
        found, expected = _open(scaled, sampling)
        assert found == expected
        assert found


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 8.0])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=50),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.999),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=500, top_p=0.8, min_p=0.01),
    ],
    ids=lambda sampling: f"k{sampling.top_k}-p{sampling.top_p}-m{sampling.min_p}",
)
def test_matches_the_definition_on_a_real_vocabulary(spread: float, sampling: SamplingParams) -> None:
    scaled = np.random.default_rng(0).standard_normal(5000, dtype=np.float32) * np.float32(spread)
    found, expected = _open(scaled, sampling)
    assert found == expected


def test_largest_is_ordered_and_leaves_masked_ids_out() -> None:
    values = np.array([1, 3, -np.inf, 3, 2], np.float32)
    assert largest(values, 3).tolist() == [1, 3, 4]
    assert largest(values, 2).tolist() == [1, 3]
    assert largest(values, 9).tolist() == [1, 3, 4, 0]


@pytest.mark.parametrize(
    ("sampling", "cuts"),
    [
        (SamplingParams(), False),
        (SamplingParams(top_k=10), False),  # the whole vocabulary
        (SamplingParams(top_k=9), True),
        (SamplingParams(top_p=0.99), True),
        (SamplingParams(min_p=0.01), True),
    ],
)
def test_knows_when_nothing_is_cut(sampling: SamplingParams, cuts: bool) -> None:
    assert truncates(sampling, 10) is cuts

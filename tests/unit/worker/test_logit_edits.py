"""Masks, bias and penalties against their formulas."""

import numpy as np
import pytest

from worker.engine.base import Float32
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams


def _edited(sampling: SamplingParams, prompt: list[int], output: list[int], stops: set[int] = frozenset()) -> Float32:  # type: ignore[assignment]
    edits = LogitEdits(sampling, prompt, frozenset(stops))
    for token in output:
        edits.record(token)
    row = np.array([2.0, -2.0, 1.0, -1.0, 0.5, 0.0], np.float32)
    if edits.active:
        edits.apply(row)
    return row


def test_nothing_asked_nothing_done() -> None:
    assert not LogitEdits(SamplingParams(stop_token_ids=[1]), [0], frozenset([1])).active


def test_repetition_penalty_moves_prompt_and_output_towards_less_likely() -> None:
    row = _edited(SamplingParams(repetition_penalty=2.0), [0, 1, 0], [1, 4, 4])
    assert row.tolist() == [1.0, -4.0, 1.0, -1.0, 0.25, 0.0]


def test_presence_counts_once_and_frequency_each_time_output_only() -> None:
    assert _edited(SamplingParams(presence_penalty=0.5), [0], [2, 2]).tolist() == [2.0, -2.0, 0.5, -1.0, 0.5, 0.0]
    assert _edited(SamplingParams(frequency_penalty=0.5), [0], [2, 2, 3]).tolist() == [2.0, -2.0, 0.0, -1.5, 0.5, 0.0]


def test_bias_comes_before_penalties() -> None:
    row = _edited(SamplingParams(logit_bias={3: 3.0, 5: -1.0}, repetition_penalty=2.0), [3], [])
    assert row.tolist() == [2.0, -2.0, 1.0, 1.0, 0.5, -1.0]


def test_only_allowed_ids_stay() -> None:
    row = _edited(SamplingParams(allowed_token_ids=[1, 4, 4]), [], [])
    assert np.isfinite(row).tolist() == [False, True, False, False, True, False]
    assert row[1] == -2.0


@pytest.mark.parametrize(("output", "masked"), [([], True), ([0], True), ([0, 0], False)])
def test_stop_ids_are_masked_until_min_tokens(output: list[int], masked: bool) -> None:
    row = _edited(SamplingParams(min_tokens=2), [], output, {2, 3})
    assert np.isneginf(row[[2, 3]]).all() == masked
    assert np.isfinite(row[[0, 1, 4, 5]]).all()


def test_a_huge_bias_stays_finite() -> None:
    assert np.isfinite(_edited(SamplingParams(logit_bias={0: 1e300, 1: -1e300}), [], [])).all()


def test_the_last_token_of_a_bad_word_is_masked_after_the_others() -> None:
    words = [[4], [1, 2], [3, 1, 2], [0, 0, 5]]
    masked = {
        (): {4},
        (1,): {4, 2},
        (3, 1): {4, 2},
        (1, 3): {4},
        (0,): {4},
        (0, 0): {4, 5},
        (0, 0, 1): {4, 2},
        (2, 0, 0): {4, 5},
    }
    for output, ids in masked.items():
        row = _edited(SamplingParams(bad_words=words), [1, 0, 0], list(output))
        assert set(np.flatnonzero(np.isneginf(row)).tolist()) == ids, output


def test_a_longer_bad_word_than_the_output_masks_nothing() -> None:
    assert np.isfinite(_edited(SamplingParams(bad_words=[[0, 1, 2]]), [0], [1])).all()

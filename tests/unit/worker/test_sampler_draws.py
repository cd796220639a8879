"""Looking numbers up in a cumulative distribution."""

import numpy as np
import pytest

from worker.sampler import RowSampler
from worker.softmax import locate


def test_locate_never_takes_a_column_without_weight() -> None:
    weights = np.array([[0, 1, 0, 3, 0]], np.float32).repeat(4, axis=0)
    column, share = locate(weights, np.array([0.0, 0.25, 0.625, 1.0]))
    assert column.tolist() == [1, 3, 3, 3]
    assert share == pytest.approx([0.0, 0.0, 0.5, 1.0])


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 1000, 70000])
def test_equals_a_plain_cumulative_sum_for_every_vocabulary(vocab: int) -> None:
    """70000 logits do not fit in a piece; 257 leave a block nearly empty."""
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((9, vocab), dtype=np.float32) * 4
    rows = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8])
    numbers = rng.random(9)
    inverse = np.where(rows % 2, np.float32(1.0), np.float32(1 / 0.7)).astype(np.float32)
    drawn = RowSampler(vocab).draw(logits, rows, inverse, np.zeros(9, np.bool_), numbers)
    scaled = (logits.astype(np.float64) - logits.max(axis=1, keepdims=True)) * inverse[:, None]
    probabilities = np.exp(scaled) / np.exp(scaled).sum(axis=1, keepdims=True)
    reached = probabilities.cumsum(axis=1)
    for row, token in enumerate(drawn.tokens):
        before = reached[row, token] - probabilities[row, token]
        assert before - 1e-5 <= numbers[row] <= reached[row, token] + 1e-5
        assert drawn.logprobs[row] == pytest.approx(np.log(probabilities[row, token]), abs=2e-6)


def test_rows_may_repeat_skip_and_go_backwards() -> None:
    logits = np.random.default_rng(0).standard_normal((6, 300), dtype=np.float32)
    sampler = RowSampler(300)
    rows = np.array([5, 5, 0, 2, 3])
    numbers = np.array([0.1, 0.9, 0.5, 0.5, 0.5])
    ones, cold = np.ones(5, np.float32), np.array([False, False, False, True, False])
    together = sampler.draw(logits, rows, ones, cold, numbers)
    for i in range(5):
        alone = sampler.draw(logits, rows[[i]], ones[[i]], cold[[i]], numbers[[i]])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs[0] == together.logprobs[i]
    assert together.tokens[3] == logits[2].argmax()


def test_the_ends_of_the_unit_interval_are_in_the_vocabulary() -> None:
    logits = np.zeros((2, 300), np.float32)
    drawn = RowSampler(300).draw(
        logits, np.arange(2), np.ones(2, np.float32), np.zeros(2, np.bool_), np.array([0.0, 1 - 2.0**-53])
    )
    assert drawn.tokens.tolist() == [0, 299]

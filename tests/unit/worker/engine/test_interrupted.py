"""A step given up anywhere leaves nothing behind that the step done again would see."""

import numpy as np
import pytest

from worker.engine.base import Interrupted, never


@pytest.mark.parametrize("backend", ["native", "mkl"], indirect=True)
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_a_step_given_up_at_any_operation_and_done_again_is_the_same_step(checkpoint, feeder, backend, model):
    held = checkpoint(model)
    sequences = [list(range(1, 12)), list(range(20, 27))]
    plain, broken = feeder(held.engine(), sequences), feeder(held.engine(), sequences)
    given_up = 0
    for counts in ({0: 5, 1: 3}, {0: 1, 1: 1}, {0: 4}, {0: 1, 1: 3}):
        plain.step(counts)
        for allowed in (0, 1, 2, 5, 9, 14):
            left = iter(range(allowed))
            broken.engine.asked = lambda left=left: next(left, None) is None
            with pytest.raises(Interrupted):
                broken.step(counts)
            given_up += 1
        broken.engine.asked = never
        broken.step(counts)
    assert given_up == 24
    for index in range(len(sequences)):
        np.testing.assert_array_equal(broken.all_logits(index), plain.all_logits(index))

"""A step given up anywhere leaves nothing behind that the step done again would see."""

import numpy as np
import pytest

from tests.unit.worker.engine.test_draft_layer import draft
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


@pytest.mark.parametrize("backend", ["native", "mkl"], indirect=True)
@pytest.mark.parametrize("model", ["ernie45_mtp", "ernie45_moe_mtp"])
def test_drafts_given_up_and_made_again_are_the_same_drafts(checkpoint, feeder, backend, model):
    """The drafting layer reads the hidden states that the model's steps leave, and both may be given up."""
    held = checkpoint(model)
    sequences = [list(range(1, 15)), list(range(20, 30))]
    plain, broken = (feeder(held.engine(speculative="mtp"), sequences) for _ in range(2))
    given_up = 0

    def interrupted(step):
        nonlocal given_up
        for allowed in (0, 1, 3, 7, 11, 16, 24, 31, 40):
            left = iter(range(allowed))
            broken.engine.asked = lambda left=left: next(left, None) is None
            try:
                step()
            except Interrupted:
                given_up += 1
            else:
                return
        broken.engine.asked = never
        step()

    def drafted(run):
        return draft(run, [0, 1])

    for counts in ({0: 5, 1: 3}, {0: 1, 1: 1}, {0: 2, 1: 1}, {0: 1, 1: 2}):
        plain.step(counts)
        interrupted(lambda counts=counts: broken.step(counts))
        found: list[np.ndarray] = []
        interrupted(lambda found=found: found.append(drafted(broken)))
        np.testing.assert_array_equal(found[0], drafted(plain))
    assert given_up > 40
    for index in range(len(sequences)):
        np.testing.assert_array_equal(broken.all_logits(index), plain.all_logits(index))

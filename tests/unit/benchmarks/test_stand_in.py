"""The stand-in gives what a scheduler needs and nothing that depends on weights."""

import numpy as np

from benchmarks.host.stand_in import StandInEngine, StandInSampler
from worker.engine.base import EngineSpec, ForwardBatch
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.sampler import Pick

SPEC = EngineSpec(vocab_size=100, max_model_len=64, block_size=4, num_blocks=16, eos_token_ids=(99,))


def pick(position: int, seed: int = 1) -> Pick:
    sampling = SamplingParams()
    return Pick(0, sampling, LogitEdits(sampling, [1], frozenset()), seed, 0, position)


def test_a_step_has_a_row_for_every_wanted_token():
    ids = np.array([1, 2, 3], np.int32)
    one = np.array([3], np.int32)
    batch = ForwardBatch(ids, ids, ids, one, one, np.zeros((1, 1), np.int32), ids[:2], np.zeros((0, 2), np.int32))
    logits = StandInEngine(SPEC).forward(batch)
    assert logits is not None
    assert len(logits) == 2


def test_its_tokens_are_below_the_limit_differ_along_a_sequence_and_repeat_with_the_seed():
    sampler, logits = StandInSampler(50), np.empty((1, 0), np.float32)
    drawn = [draw.token for draw in sampler.sample(logits, [pick(at) for at in range(40)])]
    assert all(0 < token < 50 for token in drawn)
    assert len(set(drawn)) > 20
    assert drawn == [draw.token for draw in sampler.sample(logits, [pick(at) for at in range(40)])]
    assert drawn != [draw.token for draw in sampler.sample(logits, [pick(at, seed=2) for at in range(40)])]

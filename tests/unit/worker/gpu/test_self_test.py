"""Which tensors a device's self-test makes up."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine_cases import MODELS, Checkpoint
from weight_manager.families import decoder_spec
from worker.gpu.self_test import _batches, _first_tokens, _names, _renamed, _short
from worker.gpu.weights import placement
from worker.models.decoder import collect


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "ernie45_moe"])
def test_no_two_of_them_share_memory_and_a_model_can_be_made_of_them(family):
    model = Checkpoint(MODELS / family, dtype="bfloat16")
    spec, chosen = _short(decoder_spec(model.config))
    tensors = placement(model.layout, 0).tensors(1 << 20)
    names = _names(SimpleNamespace(tensors=lambda slot: tensors, element=2), chosen)
    collect(spec, {_renamed(name, chosen): tensor for name, tensor in names.items()})
    spans = sorted((t.address, t.address + 2 * math.prod(t.shape), name) for name, t in names.items())
    for (_, end, before), (start, _, after) in pairwise(spans):
        assert end <= start, f"{before} and {after}"


def test_a_small_vocabulary_has_all_tokens_of_the_steps():
    steps = [*_batches(12, 16, 14), *(_first_tokens(rows, 8, 16, 14) for rows in (1, 8, 64))]
    assert max(step.token_ids.max() for step in steps) < 14
    assert len(np.unique(_first_tokens(64, 8, 16, 14).token_ids)) > 4

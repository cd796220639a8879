"""The numpy operations that a device is compared with, against HF's logits."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.engine_cases import MODELS, Checkpoint, Feeder
from weight_manager.families import decoder_spec
from worker.engine.base import EngineSpec
from worker.gpu.reference import ReferenceOps, widened
from worker.models.decoder import collect, hidden

FAMILIES = sorted(path.name for path in MODELS.iterdir())


class ReferenceEngine:
    """Steps of a checkpoint by `ReferenceOps`."""

    spec = EngineSpec(vocab_size=96, max_model_len=64, block_size=4, num_blocks=64, eos_token_ids=())

    def __init__(self, model):
        self.model = decoder_spec(model.config)
        self.weights = collect(self.model, {name: widened(view) for name, view in model.views().items()})
        heads = (self.model.heads, self.model.kv_heads)
        self.ops = ReferenceOps(self.model, *heads, self.spec.max_model_len, self.spec.num_blocks, self.spec.block_size)

    def forward(self, batch):
        self.ops.begin(batch)
        x = self.ops.norm(hidden(self.ops, self.model, self.weights), self.weights.norm)
        return x[batch.logits_rows] @ self.weights.head.T


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_computes_what_hf_does(family):
    expected = load_file(MODELS / family / "expected.safetensors")
    ids, logits = expected["ids"].tolist(), expected["logits"]
    run = Feeder(ReferenceEngine(Checkpoint(MODELS / family)), [ids, ids[::-1]])
    run.step({0: 7, 1: 5})
    run.step({0: 1, 1: 6})
    run.step({1: 1, 0: 9})
    while run.done[0] < len(ids):
        run.step({0: 1})
    np.testing.assert_allclose(run.all_logits(0), logits, atol=2e-5, rtol=0)

"""The drafting layer's logits equal those of a reference put together from transformers' parts."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from worker.engine.base import ForwardBatch

CASES = ["ernie45_mtp", "ernie45_moe_mtp"]
BACKENDS = ["native", "mkl", "paddle"]


def draft(run, sequences):
    """The draft after the next token of each of these sequences; the model has seen those before it."""
    engine, size = run.engine, run.engine.spec.block_size
    at = np.array([run.done[i] for i in sequences], np.int32)
    width = max(len(run.tables[i]) for i in sequences)
    tables = np.array([run.tables[i] + [0] * (width - len(run.tables[i])) for i in sequences], np.int32)
    return engine.forward(
        ForwardBatch(
            token_ids=np.array([run.sequences[i][p] for i, p in zip(sequences, at, strict=True)], np.int32),
            positions=at,
            slots=np.array([t[p // size] * size + p % size for t, p in zip(tables, at, strict=True)], np.int32),
            query_lens=np.ones(len(at), np.int32),
            context_lens=at + 1,
            block_tables=tables,
            logits_rows=np.arange(len(at), dtype=np.int32),
            block_copies=np.zeros((0, 2), np.int32),
            draft=True,
        )
    ).copy()


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_drafts_equal_the_reference(checkpoint, feeder, backend, name):
    tiny = checkpoint(name)
    expected = load_file(tiny.path / "expected.safetensors")
    ids = expected["ids"].tolist()
    run = feeder(tiny.engine(speculative="mtp"), [ids, ids[5:]])
    run.step({0: 17, 1: 3})
    drafted = {17: draft(run, [0, 1])[0]}
    run.step({0: 2, 1: 1})
    for at in range(19, len(ids) - 1):
        both = at < len(ids) - 6 and at % 2 == 1
        drafted[at] = draft(run, [1, 0] if both else [0])[-1]
        run.step({0: 1, 1: 1} if both else {0: 1})
    gap = max(np.abs(logits - expected["draft_logits"][at - 1]).max() for at, logits in drafted.items())
    assert gap < 2e-5
    assert np.abs(run.all_logits(0) - expected["logits"][:-1]).max() < 2e-5, "drafts changed what the model says"


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_token_that_was_not_taken_leaves_no_trace(checkpoint, feeder, backend):
    """Its cells are written again before anybody looks at them."""
    tiny = checkpoint("ernie45_mtp")
    expected = load_file(tiny.path / "expected.safetensors")
    ids = expected["ids"].tolist()
    wrong = [*ids[:12], (ids[12] + 1) % 96, *ids[13:]]
    run = feeder(tiny.engine(speculative="mtp"), [wrong])
    run.step({0: 11})
    run.step({0: 2})
    run.done[0], run.sequences[0] = 12, ids
    found = [draft(run, [0])[0]]
    run.step({0: 2})
    found.append(draft(run, [0])[0])
    for at, logits in zip((12, 14), found, strict=True):
        assert np.abs(logits - expected["draft_logits"][at - 1]).max() < 2e-5
    assert np.abs(run.all_logits(0)[-2:] - expected["logits"][12:14]).max() < 2e-5


def test_copied_blocks_bring_their_hidden_states(checkpoint, feeder):
    tiny = checkpoint("ernie45_mtp")
    expected = load_file(tiny.path / "expected.safetensors")
    ids = expected["ids"].tolist()
    run = feeder(tiny.engine(speculative="mtp"), [ids])
    run.step({0: 10})
    source, target = run.tables[0][2], 63 if 63 not in run.tables[0] else 62
    run.tables[0][2] = target
    run.step({0: 1}, copies=[(source, target)])
    assert np.abs(draft(run, [0])[0] - expected["draft_logits"][10]).max() < 2e-5


def test_bfloat16_drafts_are_close(checkpoint, feeder):
    tiny = checkpoint("ernie45_mtp", dtype="bfloat16")
    expected = load_file(tiny.path / "expected.safetensors")
    run = feeder(tiny.engine(speculative="mtp"), [expected["ids"].tolist()])
    run.step({0: 20})
    assert np.abs(draft(run, [0])[0] - expected["draft_logits"][19]).max() < 0.15


def test_a_checkpoint_without_the_layer_is_refused(checkpoint):
    with pytest.raises(ValueError, match="num_nextn_predict_layers"):
        checkpoint("ernie45").engine(speculative="mtp")

"""The engine against HF's logits, and against itself however a sequence was cut, batched and placed."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.products import WHY_NOT_BFLOAT16

MODELS = Path(__file__).parents[3] / "fixtures" / "models"
BACKENDS = ["native", "mkl", "paddle"]
FAMILIES = sorted(path.name for path in MODELS.iterdir())


pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.parametrize("backend", BACKENDS, indirect=True)]


@pytest.fixture(params=FAMILIES)
def case(request, checkpoint):
    expected = load_file(MODELS / request.param / "expected.safetensors")
    return checkpoint(request.param), expected["ids"].tolist(), expected["logits"]


def test_logits_equal_hf(case, feeder):
    model, ids, logits = case
    # Token by token beside a chunked neighbour: rows of both kinds in one step.
    run = feeder(model.engine(), [ids, ids[::-1]])
    run.step({0: 7, 1: 5})
    run.step({0: 1, 1: 6})
    run.step({1: 1, 0: 9})
    while run.done[0] < len(ids):
        run.step({0: 1})
    np.testing.assert_allclose(run.all_logits(0), logits, atol=2e-5, rtol=0)


def test_a_neighbour_changes_nothing(checkpoint, feeder):
    model = checkpoint("qwen3")
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 96, n).tolist() for n in (9, 13, 4, 20)]
    alone = []
    for s in sequences:
        run = feeder(model.engine(), [s], seed=2)
        run.step({0: len(s)})
        alone.append(run.all_logits(0))
    together = feeder(model.engine(), sequences, seed=3)
    together.step({0: 9, 2: 1})
    together.step({1: 12, 2: 1, 3: 19})
    together.step({3: 1, 2: 2, 1: 1})
    for i, expected in enumerate(alone):
        np.testing.assert_allclose(together.all_logits(i), expected, atol=2e-5, rtol=0)


def test_a_copied_block_is_a_copy(checkpoint, feeder):
    model = checkpoint("llama")
    run = feeder(model.engine(), [list(range(8)), [*range(6), 50, 51]])
    run.step({0: 6})
    # The second sequence shares the full first block, and gets a copy of the half-filled second one.
    run.tables[1][0] = run.tables[0][0]
    run.done[1] = 6
    run.step({0: 2, 1: 2}, copies=[(run.tables[0][1], run.tables[1][1])])
    fresh = feeder(model.engine(), [[*range(6), 50, 51]])
    fresh.step({0: 8})
    np.testing.assert_allclose(run.all_logits(1), fresh.all_logits(0)[6:], atol=2e-5, rtol=0)


def test_only_the_wanted_rows(checkpoint, feeder):
    engine = checkpoint("llama").engine()
    seen = []
    forward = engine.forward
    engine.forward = lambda batch: seen.append(batch) or forward(batch)
    run = feeder(engine, [list(range(10))])
    run.step({0: 10})
    batch = seen[0]
    for rows in ([9], [2, 5], []):
        logits = forward(batch.__class__(**{**vars(batch), "logits_rows": np.array(rows, np.int32)}))
        assert logits.shape == (len(rows), 96)
        np.testing.assert_allclose(logits, run.all_logits(0)[rows], atol=2e-5, rtol=0)


def test_bind_swaps_weights(checkpoint, feeder):
    model = checkpoint("llama")
    engine = model.engine()
    old, new = engine.prepare(model.views()), engine.prepare(model.views(change=lambda x: x * 1.5))
    results = []
    for prepared in (old, new, old):
        engine.bind(prepared)
        run = feeder(engine, [list(range(10))])
        run.step({0: 10})
        results.append(run.all_logits(0))
    assert np.abs(results[0] - results[1]).max() > 0.1
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda v: v.pop("model.norm.weight"), "model.norm.weight: missing"),
        (lambda v: v.update({"model.norm.weight": np.zeros(31, np.float32)}), r"model.norm.weight: expected \(32,\)"),
        (lambda v: v.update({"lm_head.weight": np.zeros((96, 32), np.uint16)}), "lm_head.weight: expected .*float32"),
    ],
)
def test_prepare_refuses_and_names_the_tensor(checkpoint, spoil, message):
    model = checkpoint("llama")
    engine = model.engine()
    views = dict(model.views())
    spoil(views)
    with pytest.raises(ValueError, match=message):
        engine.prepare(views)


def test_kv_is_released_and_made_again(checkpoint, feeder):
    model = checkpoint("llama")
    engine = model.engine()
    freed = engine.release_kv()
    assert freed == 64 * 4 * 2 * 16 * 2 * 2 * 4  # blocks, size, KV heads, width, K and V, layers, bytes
    assert engine.release_kv() == 0
    engine.allocate_kv()
    engine.allocate_kv()
    run = feeder(engine, [list(range(10))])
    run.step({0: 10})
    assert np.isfinite(run.all_logits(0)).all()


def test_sizes_come_from_the_checkpoint_unless_configured(checkpoint):
    spec = checkpoint("llama").engine(max_model_len=None, num_blocks=None, block_size=16, max_batch=2, bound=False).spec
    assert (spec.vocab_size, spec.max_model_len, spec.block_size, spec.num_blocks) == (96, 64, 16, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_says_whether_it_holds_copies(checkpoint, backend, dtype):
    """As large as the views: a float32 of each bfloat16, where there are no products of bfloat16."""
    model = checkpoint("llama", dtype=dtype)
    engine = model.engine(bound=False)
    views = model.views()
    held = [a for a in _arrays(engine.prepare(views)) if a.ndim == 2]
    paddles = backend == "paddle"
    assert engine.copies == (dtype == "bfloat16" and (paddles or WHY_NOT_BFLOAT16 is not None))
    assert held or paddles
    assert all(any(np.shares_memory(a, view) for view in views.values()) != engine.copies for a in held)


def _arrays(handle):
    """Of a handle of oneDNN's backend: arrays by name, with their addresses."""
    weights, _ = handle
    return [array for array, _ in weights.values()] if isinstance(weights, dict) else []

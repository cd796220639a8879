"""The fake replays what it should and nothing else."""

import numpy as np
import pytest

from tests.fake_engine import FakeEngine, fake_logits, replay, views_hash
from worker.engine.base import EngineSpec, ForwardBatch

SPEC = EngineSpec(vocab_size=16, max_model_len=32, block_size=4, num_blocks=4, eos_token_ids=())


def _batch(
    tokens: list[int], start: int, table: list[int], *, copies: tuple[tuple[int, int], ...] = ()
) -> ForwardBatch:
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    blocks = np.array(table, np.int32)
    return ForwardBatch(
        token_ids=np.array(tokens, np.int32),
        positions=positions,
        slots=blocks[positions // 4] * 4 + positions % 4,
        query_lens=np.array([len(tokens)], np.int32),
        context_lens=np.array([start + len(tokens)], np.int32),
        block_tables=blocks[None],
        logits_rows=np.array([len(tokens) - 1], np.int32),
        block_copies=np.array(copies, np.int32).reshape(-1, 2),
    )


def _engine(value: float = 1.0, **options: bool) -> FakeEngine:
    engine = FakeEngine(SPEC, **options)
    engine.bind(engine.prepare({"w": np.array([value])}))
    engine.allocate_kv()
    return engine


def test_logits_follow_from_weights_and_every_token_so_far() -> None:
    engine = _engine()
    weights = views_hash({"w": np.array([1.0])})
    engine.forward(_batch([1, 2, 3, 4, 5], 0, [2, 0]))
    logits = engine.forward(_batch([6], 5, [2, 0]))
    assert logits is not None
    assert np.array_equal(logits[0], fake_logits(weights, [1, 2, 3, 4, 5, 6], 16))
    assert replay(weights, [1, 2, 3, 4, 5], [6, int(logits.argmax())], 16)[1] == int(logits.argmax())
    assert not np.array_equal(logits[0], fake_logits(weights + 1, [1, 2, 3, 4, 5, 6], 16))
    assert not np.array_equal(logits[0], fake_logits(weights, [1, 2, 3, 5, 4, 6], 16))


@pytest.mark.parametrize("table", [[0, 2], [2, 1], [2, 2]])
def test_a_wrong_block_table_shows(table: list[int]) -> None:
    engine = _engine()
    engine.forward(_batch([1, 2, 3, 4, 5], 0, [2, 0]))
    logits = engine.forward(_batch([6], 5, table))
    assert logits is not None
    assert not np.array_equal(logits[0], fake_logits(views_hash({"w": np.array([1.0])}), [1, 2, 3, 4, 5, 6], 16))


def test_blocks_are_copied_before_the_step() -> None:
    engine = _engine()
    engine.forward(_batch([1, 2], 0, [0]))
    logits = engine.forward(_batch([3], 2, [1], copies=((0, 1),)))
    assert logits is not None
    assert np.array_equal(logits[0], fake_logits(views_hash({"w": np.array([1.0])}), [1, 2, 3], 16))


@pytest.mark.parametrize("kv_weights", [False, True])
def test_kv_of_other_weights_matters_when_asked(kv_weights: bool) -> None:
    engine = _engine(kv_weights=kv_weights)
    engine.forward(_batch([1, 2], 0, [0]))
    engine.bind(engine.prepare({"w": np.array([2.0])}))
    logits = engine.forward(_batch([3], 2, [0]))
    assert logits is not None
    pure = fake_logits(views_hash({"w": np.array([2.0])}), [1, 2, 3], 16)
    assert np.array_equal(logits[0], pure) is not kv_weights


def test_it_refuses_what_a_model_would() -> None:
    engine = FakeEngine(SPEC, names=frozenset({"a", "b"}))
    with pytest.raises(ValueError, match="tensor b is missing"):
        engine.prepare({"a": np.zeros(1)})
    with pytest.raises(ValueError, match="tensor c is unknown"):
        engine.prepare({"a": np.zeros(1), "b": np.zeros(1), "c": np.zeros(1)})
    with pytest.raises(RuntimeError, match="without weights"):
        engine.forward(_batch([1], 0, [0]))
    engine.bind(engine.prepare({"a": np.zeros(1), "b": np.zeros(1)}))
    with pytest.raises(RuntimeError, match="without a KV cache"):
        engine.forward(_batch([1], 0, [0]))
    engine.allocate_kv()
    assert engine.release_kv() == 4 * 4 * 3 * 8
    assert engine.release_kv() == 0


def test_other_ranks_keep_their_logits() -> None:
    engine = FakeEngine(SPEC, rank=1)
    engine.bind(engine.prepare({}))
    engine.allocate_kv()
    assert engine.forward(_batch([1], 0, [0])) is None
    assert engine.steps == 1


def test_a_hash_sees_names_dtypes_and_shapes() -> None:
    zero = np.zeros(4, np.float32)
    hashes = [
        views_hash(views)
        for views in ({"a": zero}, {"b": zero}, {"a": zero.reshape(2, 2)}, {"a": zero.view(np.int32)}, {"a": zero[:2]})
    ]
    assert len(set(hashes)) == 5
    assert views_hash({"a": zero, "b": zero + 1}) == views_hash({"b": zero + 1, "a": zero})

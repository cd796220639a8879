"""The engine contract's data."""

import dataclasses

import numpy as np
import pytest

from worker.engine.base import ForwardBatch, joined


def _ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("rows", "copies", "kind", "adapters"),
    [((0, 2), 2, {}, (7, 0)), ((), 0, {"draft": True}, ()), ((1,), 0, {"former": True}, ()), ((1,), 0, {}, ())],
)
def test_a_batch_survives_packing(
    rows: tuple[int, ...], copies: int, kind: dict[str, bool], adapters: tuple[int, ...]
) -> None:
    batch = ForwardBatch(
        token_ids=_ints(5, 6, 7),
        positions=_ints(9, 0, 1),
        slots=_ints(33, 40, 41),
        query_lens=_ints(1, 2),
        context_lens=_ints(10, 2),
        block_tables=np.array([[1, 2, 8], [10, 0, 0]], np.int32),
        logits_rows=_ints(*rows),
        block_copies=np.arange(copies * 2, dtype=np.int32).reshape(-1, 2),
        **kind,
        adapters=_ints(*adapters),
    )
    flat = batch.pack()
    assert flat.dtype == np.int32
    assert flat.ndim == 1
    again = ForwardBatch.unpack(flat)
    for field in dataclasses.fields(batch):
        before, after = getattr(batch, field.name), getattr(again, field.name)
        if field.name in ("draft", "former"):
            assert after is before is kind.get(field.name, False)
            continue
        assert after.dtype == np.int32
        assert after.shape == before.shape
        assert np.array_equal(after, before)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [((), (), ()), ((4,), (), (4, 0, 0)), ((), (0, 5), (0, 0, 5)), ((4,), (5, 0), (4, 5, 0))],
)
def test_joined_batches_keep_whose_adapter_is_whose(
    first: tuple[int, ...], second: tuple[int, ...], both: tuple[int, ...]
) -> None:
    def batch(sequences: int, adapters: tuple[int, ...]) -> ForwardBatch:
        each = np.zeros(sequences, np.int32)
        return ForwardBatch(
            token_ids=each,
            positions=each,
            slots=each,
            query_lens=each + 1,
            context_lens=each + 1,
            block_tables=each.reshape(-1, 1),
            logits_rows=each,
            block_copies=np.zeros((0, 2), np.int32),
            adapters=_ints(*adapters),
        )

    assert joined(batch(1, first), batch(2, second)).adapters.tolist() == list(both)

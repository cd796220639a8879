"""The step after the one under way, launched behind it before its tokens are known.

A device that samples for itself can go on at once: while it computes, the host appends the tokens, looks for ends and
answers. That is possible when the next step is the same sequences, one token further. Of a sequence that turns out to
have ended, the token that was computed too many is dropped; what it wrote lies in blocks that whoever gets them next
writes later, because a device does one step after the other.
"""

from collections.abc import Sequence as Rows

import numpy as np

from worker.engine.base import ForwardBatch, Int32
from worker.kv_cache import KvCache
from worker.step import Step, StepRow


def steady(step: Step) -> bool:
    """One token for each of its sequences, each of which makes the next."""
    return not step.draft and all(
        row.length == 1 and row.samples and not row.scored and not row.proposed and row.sequence.request.forked
        for row in step.rows
    )


def following(rows: Rows[StepRow]) -> list[int]:
    """Indices of the rows whose sequences go on, as far as is known: those that reach their limit do not."""
    return [
        index
        for index, row in enumerate(rows)
        if row.sequence.running and row.sequence.length + 1 < row.sequence.request.rules.limit
    ]


def batch_after(batch: ForwardBatch, rows: Rows[StepRow], going: list[int], kv: KvCache) -> ForwardBatch | None:
    """`batch` of a steady step, one token further for the rows `going`; None when there are not enough blocks.

    Token ids are the device's to fill in.
    """
    size = kv.block_size
    for index in going:
        row = rows[index]
        if (row.start + 1) % size == 0 and not kv.extend(row.sequence.kv, row.start + 2):
            return None
    keep: Int32 = np.array(going, np.int32)
    positions = batch.positions[keep] + 1
    tables, columns = batch.block_tables[keep], -(-int(positions.max() + 1) // size)
    if columns > tables.shape[1]:
        tables = np.pad(tables, ((0, 0), (0, columns - tables.shape[1])))
    for line in np.flatnonzero(positions % size == 0):
        block = int(positions[line]) // size
        tables[line, block] = rows[going[line]].sequence.kv.table[block]
    lines = np.arange(len(going), dtype=np.int32)
    return ForwardBatch(
        token_ids=np.zeros(len(going), np.int32),
        positions=positions,
        slots=tables[lines, positions // size] * size + positions % size,
        query_lens=np.ones(len(going), np.int32),
        context_lens=positions + 1,
        block_tables=tables,
        logits_rows=lines,
        block_copies=np.zeros((0, 2), np.int32),
    )

"""A step's numbers on the device: packed into one pinned buffer, carried at once while the step before computes, and
copied to where captured graphs read them once that is through.

    decode steps   [stride, 0, 0, 0 | tokens N | positions N | adapters | tables N * stride | copies]
    other steps    [stride, 0, 0, 0 | tokens N | positions N | slots N | sequences N | single rows | tiles | adapters
                    | starts | contexts | tables | logits' rows | copies]

N: the step's rows; those beyond the batch have position -1. What a captured graph reads has addresses that depend on
the step's kind alone (`StepInputs.kind`): there is room for a few more single rows and tiles than the batch has.
"""

from dataclasses import dataclass

import numpy as np

from worker.engine.base import ForwardBatch, Int32
from worker.gpu.adapters import MOST_RANKS
from worker.gpu.adapters import words as adapter_words
from worker.gpu.carrying import Carry, Courier
from worker.gpu.driver import Driver, Handle

_HEAD = 4
_ALIGN = 4  # int32 words: 16 bytes
_FEWEST, _MANY = 4, 32  # single rows, tiles: room for a power of two up to _MANY, then for a multiple of it


@dataclass(frozen=True)
class StepInputs:
    """Addresses of int32 arrays on the device, 0 = not there. rows: of the step, padding included.

    singles: rows that attend alone (None = every row). tiles: of `prefill`, [room][2]. Beyond those that there are both
    say -1. wanted: rows whose logits are wanted, None = all.
    """

    rows: int
    stride: int
    tokens: int
    positions: int
    tables: int
    fused: bool  # one token a sequence: keys and values are written by the attention itself
    slots: int = 0
    sequences: int = 0
    starts: int = 0
    contexts: int = 0
    singles: tuple[int, int] | None = None  # address, room
    tiles: tuple[int, int] | None = None  # address, room
    wanted: tuple[int, int] | None = None  # address, count
    copies: tuple[int, int] | None = None
    adapters: int = 0  # `DeviceAdapters.lists`
    ranks: int = 0  # room between A and B of a row, in numbers

    @property
    def kind(self) -> tuple[int, int, int, int]:
        """All that launches up to the last layer follow from, beside the weights: (rows, single rows, tiles, ranks).
        Decode steps have neither of the middle ones.
        """
        singles, tiles = (0 if part is None else part[1] for part in (self.singles, self.tiles))
        return self.rows, singles, tiles, self.ranks


class Inputs:
    """Of the steps of one stream."""

    def __init__(self, driver: Driver, carry: Carry, stream: Handle, tokens: int, sequences: int, blocks: int) -> None:
        """Room for steps of so many tokens over so many sequences of so many KV blocks each."""
        words = (
            _HEAD + 16 * _ALIGN + 8 * tokens + 6 * sequences + sequences * blocks + 3 * _MANY + adapter_words(tokens)
        )
        self._sequences = sequences
        self._carry, self._stream = carry, stream
        self._device = driver.allocate(4 * words, "step inputs")
        self._courier = Courier(driver, carry, stream, driver.stream(urgent=True), words, "step inputs")

    def fixed(self, rows: int, *, adapted: bool = False) -> StepInputs:
        """Addresses of a decode step of so many rows. adapted: with adapters."""
        tokens = self._device + 4 * _HEAD
        positions = tokens + 4 * _whole(rows)
        end = positions + 4 * _whole(rows)
        if not adapted:
            return StepInputs(rows, self._device, tokens, positions, end, fused=True)
        tables = end + 4 * _whole(adapter_words(rows))
        return StepInputs(rows, self._device, tokens, positions, tables, fused=True, adapters=end, ranks=MOST_RANKS)

    def decode(self, batch: ForwardBatch, rows: int, adapters: Int32 | None = None) -> StepInputs:
        """Copy a batch of one token a sequence, as a step of `rows` rows; its addresses are those of `fixed`. adapters:
        `DeviceAdapters.lists`.
        """
        (buffer, there), count = self._courier.begin(), len(batch.token_ids)
        width, padded = batch.block_tables.shape[1], _whole(rows)
        buffer[0] = width
        tokens, positions = buffer[_HEAD : _HEAD + rows], buffer[_HEAD + padded : _HEAD + padded + rows]
        tokens[:count], tokens[count:] = batch.token_ids, 0
        positions[:count], positions[count:] = batch.positions, -1
        end = _HEAD + 2 * padded
        if adapters is not None:
            buffer[end : end + len(adapters)] = adapters
            end = _whole(end + len(adapters))
        tables = buffer[end : end + count * width].reshape(count, width)
        tables[:] = batch.block_tables
        end = _whole(end + rows * width)
        copies = None
        if len(batch.block_copies):
            buffer[end : end + batch.block_copies.size] = batch.block_copies.reshape(-1)
            copies = (self._device + 4 * end, len(batch.block_copies))
            end += batch.block_copies.size
        self._send(there, end)
        found = self.fixed(rows, adapted=adapters is not None)
        return found if copies is None else StepInputs(**{**vars(found), "copies": copies})

    def ragged(self, batch: ForwardBatch, rows: int, tile_tokens: int, adapters: Int32 | None = None) -> StepInputs:
        """Copy any batch, as a step of `rows` rows. tile_tokens: that `prefill` takes at once; 0 = every row alone.
        adapters: `DeviceAdapters.lists`.
        """
        (buffer, staged), end = self._courier.begin(), _HEAD
        count, sequences = len(batch.token_ids), len(batch.query_lens)
        assert sequences <= self._sequences
        buffer[0] = batch.block_tables.shape[1]

        def put(values: Int32, length: int, beyond: int = 0) -> int:
            nonlocal end
            start = end
            buffer[start : start + values.size] = values.reshape(-1)
            buffer[start + values.size : start + length] = beyond
            end = _whole(start + length)
            return self._device + 4 * start

        starts = np.zeros(sequences + 1, np.int32)
        np.cumsum(batch.query_lens, out=starts[1:])
        long = batch.query_lens > 1 if tile_tokens else np.zeros(sequences, np.bool_)
        singles = starts[:-1][~long] if tile_tokens else np.arange(count, dtype=np.int32)
        tiles = tiles_of(batch.query_lens, batch.context_lens, long, tile_tokens)
        alone, together = min(_room(len(singles)), rows), _room(len(tiles))
        there = StepInputs(
            rows=rows,
            stride=self._device,
            fused=False,
            tokens=put(batch.token_ids, rows),
            positions=put(batch.positions, rows, -1),
            slots=put(batch.slots, rows, -1),
            sequences=put(np.repeat(np.arange(sequences, dtype=np.int32), batch.query_lens), rows),
            singles=(put(singles, alone, -1), alone),
            tiles=(put(tiles, 2 * together, -1), together),
            adapters=0 if adapters is None else put(adapters, adapters.size),
            ranks=0 if adapters is None else min(MOST_RANKS, _power(int(adapters[1]))),
            starts=put(starts, self._sequences + 1),
            contexts=put(batch.context_lens, self._sequences),
            tables=put(batch.block_tables, batch.block_tables.size),
            wanted=(put(batch.logits_rows, batch.logits_rows.size), batch.logits_rows.size),
            copies=(put(batch.block_copies, batch.block_copies.size), len(batch.block_copies)),
        )
        self._send(staged, end)
        return there

    def _send(self, staged: int, words: int) -> None:
        self._courier.send(words)
        self._carry.within(self._device, staged, self._stream, 4 * words)


def tiles_of(query_lens: Int32, context_lens: Int32, long: "np.typing.NDArray[np.bool_]", tile_tokens: int) -> Int32:
    """[count, 2] of (sequence, first of its new tokens) over the long sequences; those with the most to read first."""
    chosen = np.flatnonzero(long)
    if not len(chosen):
        return np.zeros((0, 2), np.int32)
    counts = -(-query_lens[chosen] // tile_tokens)
    sequence = np.repeat(chosen, counts)
    first = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_tokens
    reads = context_lens[sequence] - query_lens[sequence] + first
    order = np.argsort(-reads, kind="stable")
    return np.stack((sequence[order], first[order]), axis=1).astype(np.int32)


def _room(count: int) -> int:
    """Room for so many: few different ones, so that few graphs serve all steps."""
    if not count:
        return 0
    return max(_FEWEST, _power(count)) if count <= _MANY else -(-count // _MANY) * _MANY


def _power(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << (count - 1).bit_length()


def _whole(words: int) -> int:
    return -(-words // _ALIGN) * _ALIGN

"""Paged attention by MKL and oneDNN, for machines without a C compiler: KV blocks are read where they lie.

A step's queries are cut into tiles. In a tile every *unit* is a small matrix of queries that read one KV
head: for a decoding sequence the query heads of one group, for a prefill chunk one head's rows. Per layer:
one batched product for all scores, one softmax, then one batched product per block column for the values.
Addresses are worked out once a step and moved from layer to layer by adding a constant.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from weight_manager.families.spec import DecoderSpec
from worker.cpu.mkl import Addresses, Mkl, Product
from worker.cpu.onednn import ADD, LINEAR, MUL, TANH, OneDnn, eltwise
from worker.engine.base import Float32, ForwardBatch
from worker.models.kv_memory import KvMemory
from worker.models.shard import Shard

Int64 = npt.NDArray[np.int64]
_HIDDEN = np.float32(-1e30)
_CHUNK_ROWS = 64
"""Query rows of a prefill chunk in one tile: bounds the scores' memory at long contexts."""
_TILE_SCORES = 16 << 20
"""Scores in one tile of decoding sequences (64 MiB)."""


@dataclass(frozen=True)
class _Tile:
    """n units of m query rows each, over one context each.

    A unit's rows are the `m` heads of one token from (row, head) on, or with a mask one head of `m` tokens.
    rows, heads: [n], of the first. sequences: [n]. Cells are counted from the first that any unit sees, rounded down to
    `begin`, where a block begins. first, limit: [n], cells [first, limit) are seen. columns: of the scores; what a unit
    does not see stays hidden. mask: [m, columns] added to every unit's scores, or None.
    """

    m: int
    rows: Int64
    heads: Int64
    sequences: Int64
    begin: int
    first: Int64
    limit: Int64
    columns: int
    mask: Float32 | None


class BlockedAttention:
    """Attention over one rank's heads."""

    def __init__(self, dnn: OneDnn, mkl: Mkl, spec: DecoderSpec, shard: Shard) -> None:
        self._dnn, self._mkl, self._spec = dnn, mkl, spec
        self._heads, self._kv_heads, self._dim = shard.heads, shard.kv_heads, spec.head_dim
        self._windows = tuple(dict.fromkeys(attention.window for attention in spec.attention))
        self._scratch = [np.empty(0, np.float32), np.empty(0, np.float32)]

    def begin(self, batch: ForwardBatch, kv: KvMemory, rows: Float32, out: Float32, *, hide_first: bool) -> None:
        """Index everything the layers of this step read and write.

        rows: [T or more, (heads + 2 * kv_heads) * head_dim], q, k and v of every token; out: [.., heads * head_dim].
        hide_first: only the first token of a sequence sees its cell.
        """
        self._kv, self._hide_first = kv, hide_first
        block, offset = np.divmod(batch.slots.astype(np.int64), kv.block_size)
        heads = np.arange(self._kv_heads)
        self._cells = (block[:, None] * self._kv_heads + heads) * kv.block_size + offset[:, None]
        tokens, q_end, k_end = len(block), self._heads * self._dim, (self._heads + self._kv_heads) * self._dim
        shape = (tokens, self._kv_heads, self._dim)
        self._new = rows[:tokens, q_end:k_end].reshape(shape), rows[:tokens, k_end:].reshape(shape)
        self._layer = 0
        self._moved: list[Addresses] = []
        self._work = {
            window: [call for tile in self._tiles(batch, window) for call in self._calls(batch, tile, rows, out)]
            for window in self._windows
        }

    def __call__(self, layer: int) -> None:
        """Write k and v to the cache, then attend: `begin`'s rows -> its out. Layers come in rising order."""
        for cache, new in zip((self._kv.keys, self._kv.values), self._new, strict=True):
            cache[layer].reshape(-1, self._dim)[self._cells] = new
        step = (layer - self._layer) * self._kv.keys.strides[0]
        for addresses in self._moved:
            np.add(addresses, step, out=addresses)
        self._layer = layer
        for call in self._work[self._spec.attention_of(layer).window]:
            call()

    def _tiles(self, batch: ForwardBatch, window: int) -> Iterator[_Tile]:
        starts = np.cumsum(batch.query_lens, dtype=np.int64) - batch.query_lens
        widths = -(-batch.context_lens.astype(np.int64) // self._kv.block_size)
        # Long contexts last: the widest sequence of a tile sets the width of all its scores.
        decoding = np.flatnonzero(batch.query_lens == 1)
        decoding = decoding[np.argsort(widths[decoding], kind="stable")]
        while decoding.size:
            scores = np.arange(1, len(decoding) + 1) * widths[decoding] * (self._kv.block_size * self._heads)
            count = max(1, int((scores <= _TILE_SCORES).sum()))
            yield self._decode_tile(batch, decoding[:count], starts, int(widths[decoding[count - 1]]), window)
            decoding = decoding[count:]
        for sequence in np.flatnonzero(batch.query_lens > 1):
            end = int(starts[sequence] + batch.query_lens[sequence])
            for first in range(int(starts[sequence]), end, _CHUNK_ROWS):
                yield self._chunk_tile(batch, int(sequence), first, min(first + _CHUNK_ROWS, end), window)

    def _decode_tile(self, batch: ForwardBatch, sequences: Int64, starts: Int64, width: int, window: int) -> _Tile:
        per_kv = self._heads // self._kv_heads
        heads = np.tile(np.arange(0, self._heads, per_kv), len(sequences))
        sequences = np.repeat(sequences, self._kv_heads)
        limit, size = batch.context_lens[sequences].astype(np.int64), self._kv.block_size
        first = np.maximum(limit - window, 0) if window else np.zeros_like(limit)
        begin = int(first.min()) // size * size
        columns = width * size - begin
        return _Tile(per_kv, starts[sequences], heads, sequences, begin, first - begin, limit - begin, columns, None)

    def _chunk_tile(self, batch: ForwardBatch, sequence: int, first: int, end: int, window: int) -> _Tile:
        # Exactly as many columns as there are cells: these scores share their memory with other tiles'.
        own, size = batch.positions[first:end, None].astype(np.int64), self._kv.block_size
        begin = max(int(own[0, 0]) - window + 1, 0) // size * size if window else 0
        columns = int(own[-1, 0]) + 1 - begin
        cells = begin + np.arange(columns)
        visible = cells <= own
        if window:
            visible &= cells > own - window
        return _Tile(
            m=end - first,
            rows=np.full(self._heads, first),
            heads=np.arange(self._heads),
            sequences=np.full(self._heads, sequence),
            begin=begin,
            first=np.zeros(self._heads, np.int64),
            limit=np.full(self._heads, columns),
            columns=columns,
            mask=np.where(visible, np.float32(0), _HIDDEN),
        )

    def _calls(self, batch: ForwardBatch, tile: _Tile, q: Float32, out: Float32) -> Iterator[Callable[[], object]]:
        dim, size, columns, count = self._dim, self._kv.block_size, tile.columns, len(tile.rows)
        shape = (count * tile.m, columns)
        # A chunk's scores are written whole in every layer; hidden columns of decoding rows only here.
        scores = self._scratched(0, shape) if tile.mask is not None else np.full(shape, _HIDDEN)
        weights = self._scratched(1, shape)
        # One product per unit and block, by block column, then by how much of the block is filled.
        starts = np.arange(0, columns, size)[:, None]
        cells = np.minimum(tile.limit - starts, size).reshape(-1)
        order = np.lexsort((cells, np.repeat(np.arange(-(-columns // size)), count)))
        order = order[(cells > 0)[order] & (tile.first < starts + size).reshape(-1)[order]]
        cells, (column, unit) = cells[order], np.divmod(order, count)
        blocks = batch.block_tables[tile.sequences[unit], tile.begin // size + column].astype(np.int64)
        kv_heads = tile.heads[unit] // (self._heads // self._kv_heads)
        kv_bytes = (blocks * self._kv_heads + kv_heads) * (size * dim * 4)
        score_bytes = (unit * tile.m * columns + column * size) * 4
        keys, values = self._kv.keys.ctypes.data + kv_bytes, self._kv.values.ctypes.data + kv_bytes
        self._moved += [keys, values]
        queries, made = (
            rows.ctypes.data + tile.rows[unit] * rows.strides[0] + tile.heads[unit] * (dim * 4) for rows in (q, out)
        )
        q_stride, out_stride = (dim if tile.mask is None else rows.strides[0] // 4 for rows in (q, out))

        # Groups of equal products, each a run of the order above: (column, cells, start, end).
        cuts = np.flatnonzero(np.diff(column * (size + 1) + cells)) + 1
        edges = [0, *cuts.tolist(), len(cells)]
        groups = [(int(column[s]), int(cells[s]), e - s) for s, e in pairwise(edges)]
        found, used = scores.ctypes.data + score_bytes, weights.ctypes.data + score_bytes
        products = [Product(n, tile.m, filled, dim, q_stride, dim, columns) for _, filled, n in groups]
        yield self._mkl.products(products, queries, keys, found, transposed=True, alpha=self._spec.scale)
        yield from self._capped_and_hidden(tile, scores)
        if tile.mask is not None:
            per_unit = scores.reshape(count, tile.m, columns)
            yield self._dnn.binary(ADD, per_unit, tile.mask[None], per_unit)
        if self._hide_first and tile.begin == 0:
            last = batch.positions[tile.rows[:, None] + (np.arange(tile.m) if tile.mask is not None else 0)]
            later = np.broadcast_to(last > 0, (count, tile.m)).reshape(-1)
            yield lambda: scores[:, 0].__setitem__(later, _HIDDEN)
        yield self._dnn.softmax(scores, weights)
        yield lambda: _spoil_unseen(scores, weights)
        # Values column by column: each adds to what the ones before it left. Units may begin in different columns.
        begun = bool(tile.first.any())
        if begun:
            yield lambda: out.__setitem__(tile.rows, 0)
        start = 0
        for index, column_groups in groupby(groups, key=itemgetter(0)):
            products = [Product(n, tile.m, dim, filled, columns, dim, out_stride) for _, filled, n in column_groups]
            part = slice(start, start := start + sum(p.count for p in products))
            yield self._mkl.products(products, used[part], values[part], made[part], accumulate=begun or index > 0)

    def _capped_and_hidden(self, tile: _Tile, scores: Float32) -> Iterator[Callable[[], object]]:
        """What is done to all scores of a tile before they are masked."""
        cap, at = self._spec.score_cap, np.arange(tile.columns)
        if cap:
            post = [eltwise(TANH), eltwise(LINEAR, cap, 0.0)]
            yield self._dnn.binary(MUL, scores, np.full((1, 1), 1 / cap, np.float32), scores, post)
        if tile.mask is not None:
            return
        # The products leave alone what is beyond a unit's blocks, but not what is before its first cell.
        unseen = at < tile.first[:, None]
        if cap:
            unseen |= at >= tile.limit[:, None]
        if unseen.any():
            hidden = np.repeat(unseen, tile.m, axis=0)
            yield lambda: np.copyto(scores, _HIDDEN, where=hidden)

    def _scratched(self, which: int, shape: tuple[int, int]) -> Float32:
        """Tiles of a layer run one after the other, so they share this memory."""
        size = shape[0] * shape[1]
        if self._scratch[which].size < size:
            self._scratch[which] = np.empty(size, np.float32)
        return self._scratch[which][:size].reshape(shape)


def _spoil_unseen(scores: Float32, weights: Float32) -> None:
    """A row whose visible scores are minus infinity, or no numbers, would weigh what is hidden."""
    unseen = ~(scores.max(axis=1) > _HIDDEN)
    if unseen.any():
        weights[unseen] = np.nan

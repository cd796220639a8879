"""Paged attention on a CPU without Paddle's kernels: KV blocks are read where they lie.

A step's queries are cut into tiles. In a tile every *unit* is a small matrix of queries that read one KV
head: for a decoding sequence the query heads of one group, for a prefill chunk one head's rows. Per layer:
one batched product for all scores, one softmax, then one batched product per block column for the values.
Addresses are worked out once a step and moved from layer to layer by adding a constant.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.cpu.mkl import Addresses, Mkl, Product
from worker.cpu.onednn import ADD, OneDnn
from worker.engine.base import Float32, ForwardBatch

Int64 = npt.NDArray[np.int64]
_HIDDEN = np.float32(-1e30)
_CHUNK_ROWS = 64
"""Query rows of a prefill chunk in one tile: bounds the scores' memory at long contexts."""
_TILE_SCORES = 16 << 20
"""Scores in one tile of decoding sequences (64 MiB)."""


@dataclass(frozen=True)
class _Tile:
    """n units of m query rows each, over contexts of at most `width` blocks.

    A unit's rows are the `m` heads of one token from (row, head) on, or with a mask one head of `m` tokens.
    rows, heads: [n], of the first. sequences: [n]. limit: [n] columns that are written; those beyond stay
    hidden. mask: [m, columns] added to every unit's scores, or None.
    """

    m: int
    rows: Int64
    heads: Int64
    sequences: Int64
    width: int
    limit: Int64
    mask: Float32 | None


class KvBlocks:
    """Keys and values of one rank: float32 [layers, num_blocks, kv_heads, block_size, head_dim] each."""

    def __init__(self, layers: int, num_blocks: int, kv_heads: int, block_size: int, dim: int) -> None:
        shape = (layers, num_blocks, kv_heads, block_size, dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.block_size = block_size

    def begin(self, batch: ForwardBatch) -> None:
        """Copy shared blocks; clear the blocks this step begins.

        Cells not yet written get weight 0, and 0 * NaN is NaN: a request that overflowed must not reach the
        next one that is given its blocks.
        """
        block, offset = np.divmod(batch.slots, self.block_size)
        begun = block[offset == 0]
        for cache in (self.keys, self.values):
            if len(batch.block_copies):
                cache[:, batch.block_copies[:, 1]] = cache[:, batch.block_copies[:, 0]]
            if len(begun):
                cache[:, begun] = 0


class BlockedAttention:
    """Attention over one rank's heads."""

    def __init__(self, dnn: OneDnn, mkl: Mkl, heads: int, kv_heads: int, dim: int) -> None:
        self._dnn, self._mkl = dnn, mkl
        self._heads, self._kv_heads, self._dim = heads, kv_heads, dim
        self._scratch = [np.empty(0, np.float32), np.empty(0, np.float32)]

    def begin(self, batch: ForwardBatch, kv: KvBlocks, rows: Float32, out: Float32) -> None:
        """Index everything the layers of this step read and write.

        rows: [T or more, (heads + 2 * kv_heads) * head_dim], q, k and v of every token; out: [.., heads * head_dim].
        """
        self._kv = kv
        block, offset = np.divmod(batch.slots.astype(np.int64), kv.block_size)
        heads = np.arange(self._kv_heads)
        self._cells = (block[:, None] * self._kv_heads + heads) * kv.block_size + offset[:, None]
        tokens, q_end, k_end = len(block), self._heads * self._dim, (self._heads + self._kv_heads) * self._dim
        shape = (tokens, self._kv_heads, self._dim)
        self._new = rows[:tokens, q_end:k_end].reshape(shape), rows[:tokens, k_end:].reshape(shape)
        self._layer = 0
        self._moved: list[Addresses] = []
        self._work = [call for tile in self._tiles(batch) for call in self._calls(batch, tile, rows, out)]

    def __call__(self, layer: int) -> None:
        """Write k and v to the cache, then attend: `begin`'s rows -> its out. Layers come in rising order."""
        for cache, new in zip((self._kv.keys, self._kv.values), self._new, strict=True):
            cache[layer].reshape(-1, self._dim)[self._cells] = new
        step = (layer - self._layer) * self._kv.keys.strides[0]
        for addresses in self._moved:
            np.add(addresses, step, out=addresses)
        self._layer = layer
        for call in self._work:
            call()

    def _tiles(self, batch: ForwardBatch) -> Iterator[_Tile]:
        starts = np.cumsum(batch.query_lens, dtype=np.int64) - batch.query_lens
        widths = -(-batch.context_lens.astype(np.int64) // self._kv.block_size)
        # Long contexts last: the widest sequence of a tile sets the width of all its scores.
        decoding = np.flatnonzero(batch.query_lens == 1)
        decoding = decoding[np.argsort(widths[decoding], kind="stable")]
        while decoding.size:
            scores = np.arange(1, len(decoding) + 1) * widths[decoding] * (self._kv.block_size * self._heads)
            count = max(1, int((scores <= _TILE_SCORES).sum()))
            yield self._decode_tile(batch, decoding[:count], starts, int(widths[decoding[count - 1]]))
            decoding = decoding[count:]
        for sequence in np.flatnonzero(batch.query_lens > 1):
            end = int(starts[sequence] + batch.query_lens[sequence])
            for first in range(int(starts[sequence]), end, _CHUNK_ROWS):
                yield self._chunk_tile(batch, int(sequence), first, min(first + _CHUNK_ROWS, end))

    def _decode_tile(self, batch: ForwardBatch, sequences: Int64, starts: Int64, width: int) -> _Tile:
        per_kv = self._heads // self._kv_heads
        heads = np.tile(np.arange(self._kv_heads), len(sequences))
        sequences = np.repeat(sequences, self._kv_heads)
        limit = batch.context_lens[sequences].astype(np.int64)
        return _Tile(per_kv, starts[sequences], heads * per_kv, sequences, width, limit, None)

    def _chunk_tile(self, batch: ForwardBatch, sequence: int, first: int, end: int) -> _Tile:
        width = int(batch.positions[end - 1]) // self._kv.block_size + 1
        columns = np.arange(width * self._kv.block_size)
        mask = np.where(columns <= batch.positions[first:end, None], np.float32(0), _HIDDEN).astype(np.float32)
        return _Tile(
            m=end - first,
            rows=np.full(self._heads, first),
            heads=np.arange(self._heads),
            sequences=np.full(self._heads, sequence),
            width=width,
            limit=np.full(self._heads, len(columns)),
            mask=mask,
        )

    def _calls(self, batch: ForwardBatch, tile: _Tile, q: Float32, out: Float32) -> Iterator[Callable[[], object]]:
        dim, size, count = self._dim, self._kv.block_size, len(tile.rows)
        columns = tile.width * size
        shape = (count * tile.m, columns)
        # A chunk's scores are written whole in every layer; hidden columns of decoding rows only here.
        scores = self._scratched(0, shape) if tile.mask is not None else np.full(shape, _HIDDEN)
        weights = self._scratched(1, shape)
        # One product per unit and block, ordered by block column.
        column, unit = (a.reshape(-1) for a in np.meshgrid(np.arange(tile.width), np.arange(count), indexing="ij"))
        wide = np.minimum(tile.limit[unit] - column * size, size)
        column, unit, wide = column[wide > 0], unit[wide > 0], wide[wide > 0]
        blocks = batch.block_tables[tile.sequences[unit], column].astype(np.int64)
        kv_heads = tile.heads[unit] // (self._heads // self._kv_heads)
        kv_bytes = (blocks * self._kv_heads + kv_heads) * (size * dim * 4)
        score_bytes = (unit * tile.m * columns + column * size) * 4
        keys, values = self._kv.keys.ctypes.data + kv_bytes, self._kv.values.ctypes.data + kv_bytes
        queries, made = (
            rows.ctypes.data + tile.rows[unit] * rows.strides[0] + tile.heads[unit] * (dim * 4) for rows in (q, out)
        )
        q_stride, out_stride = (dim if tile.mask is None else rows.strides[0] // 4 for rows in (q, out))

        order = np.argsort(wide, kind="stable")
        groups = [
            Product(int(n), tile.m, int(w), dim, q_stride, dim, columns)
            for w, n in zip(*np.unique(wide, return_counts=True), strict=True)
        ]
        keys = keys[order]
        self._moved += [keys, values]
        found = scores.ctypes.data + score_bytes[order]
        yield self._mkl.products(groups, queries[order], keys, found, transposed=True, alpha=dim**-0.5)
        if tile.mask is not None:
            per_unit = scores.reshape(count, tile.m, columns)
            yield self._dnn.binary(ADD, per_unit, tile.mask[None], per_unit)
        yield self._dnn.softmax(scores, weights)

        used = weights.ctypes.data + score_bytes
        ends = np.searchsorted(column, np.arange(tile.width), side="right")
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            group, part = [Product(int(end - start), tile.m, dim, size, columns, dim, out_stride)], slice(start, end)
            yield self._mkl.products(group, used[part], values[part], made[part], accumulate=bool(start))

    def _scratched(self, which: int, shape: tuple[int, int]) -> Float32:
        """Tiles of a layer run one after the other, so they share this memory."""
        size = shape[0] * shape[1]
        if self._scratch[which].size < size:
            self._scratch[which] = np.empty(size, np.float32)
        return self._scratch[which][:size].reshape(shape)

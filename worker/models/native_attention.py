"""Paged attention by the compiled kernel: one call a layer, keys and values in float32 or bfloat16."""

import ctypes

import numpy as np
import numpy.typing as npt

from worker.cpu.native import Native
from worker.engine.base import Float32, ForwardBatch
from worker.models.kv_blocks import KvBlocks

_TILE_ROWS = 64
"""Query rows (tokens times query heads of a group) that run along one read of a prefill chunk's context."""

_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


class _Step(ctypes.Structure):
    """`Step` of attention.c."""

    _fields_ = [
        *((name, _Int) for name in ("heads", "kv_heads", "dim", "block_size", "kv_narrow")),
        ("scale", ctypes.c_float),
        ("pad", ctypes.c_float),
        ("rows", _Pointer),
        ("out", _Pointer),
        ("row_stride", _Int),
        ("out_stride", _Int),
        *((name, _Pointer) for name in ("positions", "slots", "tables")),
        *((name, _Int) for name in ("table_width", "tiles", "tokens")),
        *((name, _Pointer) for name in ("tile_sequence", "tile_first", "tile_tokens")),
        *((name, _Pointer) for name in ("keys", "values", "scratch")),
        *((name, _Int) for name in ("scratch_stride", "next_job", "next_thread")),
    ]


class NativeAttention:
    """Attention over one rank's heads; head_dim is a multiple of 16."""

    def __init__(self, native: Native, heads: int, kv_heads: int, dim: int) -> None:
        assert dim % 16 == 0
        assert native.number("step_bytes") == ctypes.sizeof(_Step)
        self._native = native
        self._attend, self._write_all = native.address("attend"), native.address("write_all")
        self._step = _Step(heads=heads, kv_heads=kv_heads, dim=dim, scale=dim**-0.5)
        self._address = ctypes.addressof(self._step)
        self._scratch = np.empty(0, np.float32)

    @staticmethod
    def kv_dtype(compute: np.dtype[np.generic]) -> np.dtype[np.generic]:
        """What keys and values are kept in: the dtype of the matrices."""
        return compute

    def begin(self, batch: ForwardBatch, kv: KvBlocks, rows: Float32, out: Float32) -> None:
        """What the layers of this step share.

        rows: [T or more, (heads + 2 * kv_heads) * head_dim], q, k and v of every token; out: [.., heads * head_dim].
        """
        step, group = self._step, self._step.heads // self._step.kv_heads
        tiles = _tiles(batch.query_lens, max(1, min(16, _TILE_ROWS // group)))
        self._chunked = len(batch.token_ids) > len(batch.query_lens)
        self._layers = [(keys, values) for keys, values in zip(_addresses(kv.keys), _addresses(kv.values), strict=True)]
        step.block_size, step.kv_narrow = kv.block_size, kv.keys.dtype == np.uint16
        step.rows, step.row_stride = rows.ctypes.data, rows.shape[1]
        step.out, step.out_stride = out.ctypes.data, out.shape[1]
        step.tables, step.table_width = batch.block_tables.ctypes.data, batch.block_tables.shape[1]
        step.positions, step.slots = batch.positions.ctypes.data, batch.slots.ctypes.data
        step.tokens, step.tiles = len(batch.token_ids), len(tiles[0])
        step.tile_sequence, step.tile_first, step.tile_tokens = (array.ctypes.data for array in tiles)
        width = (int(batch.context_lens.max()) // kv.block_size + 1) * kv.block_size + 16
        step.scratch_stride = int(tiles[2].max()) * group * width + step.dim * 16
        if self._scratch.size < step.scratch_stride * self._native.threads:
            self._scratch = np.empty(step.scratch_stride * self._native.threads, np.float32)
        step.scratch = self._scratch.ctypes.data
        self._kept = batch, kv, rows, out, tiles  # the kernel has only their addresses

    def __call__(self, layer: int) -> None:
        """Write k and v to the cache, then attend: `begin`'s rows -> its out."""
        step = self._step
        step.keys, step.values = self._layers[layer]
        if self._chunked:
            step.next_job = 0
            self._native.run(self._write_all, self._address)
        step.next_job = step.next_thread = 0
        self._native.run(self._attend, self._address)


def _tiles(query_lens: npt.NDArray[np.int32], size: int) -> tuple[npt.NDArray[np.int32], ...]:
    """(sequence, first row, tokens) of runs of at most `size` tokens."""
    per_sequence = -(-query_lens // size)
    sequence = np.repeat(np.arange(len(query_lens), dtype=np.int32), per_sequence)
    turn = np.arange(len(sequence)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)
    first = (np.cumsum(query_lens) - query_lens)[sequence] + turn * size
    tokens = np.minimum(query_lens[sequence] - turn * size, size)
    return sequence, first.astype(np.int32), tokens.astype(np.int32)


def _addresses(cache: npt.NDArray[np.generic]) -> list[int]:
    return [cache.ctypes.data + layer * cache.strides[0] for layer in range(len(cache))]

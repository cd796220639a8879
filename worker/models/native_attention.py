"""Placing and attending by the compiled kernels: two calls a layer, keys and values in float32 or bfloat16."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from weight_manager.families.spec import DecoderSpec
from worker.cpu.native import Native
from worker.engine.base import Float32, ForwardBatch
from worker.models.kv_memory import KvMemory
from worker.models.onednn_weights import NamedSlot
from worker.models.shard import Shard

_TILE_ROWS = 192
"""Query rows (tokens times query heads of a group) that run along one read of a prefill chunk's context: reading, and
turning keys over, is to be little beside computing, and all that a core works on is to stay in its cache."""
_TILE_TOKENS = 64
_FEW_ROWS, _SPARE_ROWS = 8, 8
"""Rows of a job that reads keys and values where they lie, at most; rows that other jobs are rounded up by, at most."""

_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


class _Step(ctypes.Structure):
    """`Step` of attention.h."""

    _fields_ = [
        *((name, _Int) for name in ("heads", "kv_heads", "dim", "block_size", "narrow", "interleaved", "hide_first")),
        *((name, ctypes.c_float) for name in ("scale", "eps", "score_cap", "pad")),
        ("qkv", _Pointer),
        ("columns", _Int),
        *((name, _Pointer) for name in ("queries", "out", "positions", "slots", "tables")),
        *((name, _Int) for name in ("table_width", "tiles", "tokens")),
        *((name, _Pointer) for name in ("tile_sequence", "tile_first", "tile_tokens")),
        *((name, _Int) for name in ("rotated", "window")),
        *((name, _Pointer) for name in ("cos", "sin", "keys", "values", "bias", "q_norm", "k_norm", "scratch")),
        *((name, _Int) for name in ("scratch_stride", "next_job", "next_thread")),
    ]


class NativeAttention:
    """Attention over one rank's heads; head_dim is a multiple of 16."""

    def __init__(self, native: Native, spec: DecoderSpec, shard: Shard) -> None:
        assert native.number("step_bytes") == ctypes.sizeof(_Step)
        self._native = native
        self._panel = native.number("panel_cells")
        self._step = _Step(
            heads=shard.heads,
            kv_heads=shard.kv_heads,
            dim=spec.head_dim,
            interleaved=any(rope.interleaved for rope in spec.ropes),
            scale=spec.scale,
            eps=spec.eps,
            score_cap=spec.score_cap,
        )
        self._spec, self._angles = spec, [(0, 0)] * len(spec.ropes)
        self._scratch = np.empty(0, np.float32)
        self._layers: list[tuple[int, int]] = []

    def begin(
        self,
        batch: ForwardBatch,
        kv: KvMemory,
        qkv: Float32,
        angles: Sequence[tuple[Float32, Float32]],
        queries: Float32,
        out: npt.NDArray[np.generic],
        *,
        hide_first: bool,
    ) -> None:
        """What the layers of this step share.

        qkv: [(heads + 2 * kv_heads) * head_dim, columns], projected. angles: cos and sin, [rotated / 2, columns], for
        each of `DecoderSpec.ropes`.
        queries, out: [columns, heads * head_dim], token-major; out is of the cache's dtype. hide_first: only the first
        token of a sequence sees its cell.
        """
        step, group = self._step, self._step.heads // self._step.kv_heads
        tiles = _tiles(batch.query_lens, max(1, min(_TILE_TOKENS, _TILE_ROWS // group)))
        self._layers = list(zip(_addresses(kv.keys), _addresses(kv.values), strict=True))
        step.block_size, step.narrow = kv.block_size, kv.keys.dtype == np.uint16
        step.hide_first = hide_first
        step.qkv, step.columns = qkv.ctypes.data, qkv.shape[1]
        self._angles = [(cos.ctypes.data, sin.ctypes.data) for cos, sin in angles]
        step.queries, step.out = queries.ctypes.data, out.ctypes.data
        step.tables, step.table_width = batch.block_tables.ctypes.data, batch.block_tables.shape[1]
        step.positions, step.slots = batch.positions.ctypes.data, batch.slots.ctypes.data
        step.tokens, step.tiles = len(batch.token_ids), len(tiles[0])
        step.tile_sequence, step.tile_first, step.tile_tokens = (array.ctypes.data for array in tiles)
        # Each row's sums, and its scores of a panel. Of many rows, a panel of keys and values too: see prompts.h.
        rows, panel = int(tiles[2].max()) * group, self._panel
        shared = 2 * panel * step.dim if rows > _FEW_ROWS else 0
        step.scratch_stride = shared + (rows + _SPARE_ROWS) * (panel + step.dim + 2)
        if self._scratch.size < step.scratch_stride * self._native.threads:
            self._scratch = np.empty(step.scratch_stride * self._native.threads, np.float32)
        step.scratch = self._scratch.ctypes.data
        self._kept = batch, kv, qkv, angles, queries, out, tiles  # the kernels have only their addresses

    def step(
        self, layer: int, bias: NamedSlot | None, q_norm: NamedSlot | None, k_norm: NamedSlot | None
    ) -> Callable[[], None]:
        """One layer's work on what `begin` was given, to be run in every step."""
        step, address, run = self._step, ctypes.addressof(self._step), self._native.run
        place, attend = self._native.address("place"), self._native.address("attend")
        attention = self._spec.attention_of(layer)
        rotated = 0 if attention.rope is None else attention.rope.dim
        which = None if attention.rope is None else self._spec.ropes.index(attention.rope)

        def work() -> None:
            step.keys, step.values = self._layers[layer]
            step.rotated, step.window = rotated, attention.window
            step.cos, step.sin = (0, 0) if which is None else self._angles[which]
            # Where the weights lie changes when others are bound.
            step.bias, step.q_norm, step.k_norm = (slot and slot.address for slot in (bias, q_norm, k_norm))
            step.next_job = 0
            run(place, address)
            step.next_job = step.next_thread = 0
            run(attend, address)

        return work


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

"""Paged attention in plain Paddle: one step's decode rows together, every prefill chunk alone.

The cache of a layer is [num_blocks * kv_heads, block_size, head_dim], so that gathering a sequence's blocks per
head gives contiguous [kv_heads, context, head_dim] without a transpose.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F  # noqa: N812

from weight_manager.families.rope import RopeSpec
from weight_manager.families.spec import DecoderSpec
from worker.engine.base import ForwardBatch
from worker.models.rope import rope_table
from worker.models.shard import Shard

Tensor = Any
_MASKED = np.float32(-1e30)


@dataclass(frozen=True)
class _Group:
    """Sequences with equal query counts that are attended to in one matmul.

    rows: [S * n] rows of the step. blocks: cache rows gathered. masks: by window, [S * kv_heads, group * n, context],
    added.
    """

    rows: Tensor
    count: int
    queries: int
    blocks: Tensor
    masks: dict[int, Tensor]


class PagedAttention:
    """Keys and values of one rank, and attention over them. max_len: of the longest context."""

    def __init__(self, spec: DecoderSpec, shard: Shard, max_len: int) -> None:
        self._spec = spec
        self._dim, self._heads, self._kv_heads = spec.head_dim, shard.heads, shard.kv_heads
        self._tables = {rope: [paddle.to_tensor(t) for t in rope_table(rope, max_len)] for rope in spec.ropes}
        self._angles: dict[RopeSpec, list[Tensor]] = {}
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def allocate(self, layers: int, num_blocks: int, block_size: int) -> None:
        """Zeroed cache for all layers; nothing happens when there is one."""
        shape = [num_blocks * self._kv_heads, block_size, self._dim]
        self._block_size = block_size
        for cache in (self._keys, self._values):
            cache.extend(paddle.zeros(shape) for _ in range(layers - len(cache)))

    def release(self) -> int:
        """Bytes freed."""
        freed = sum(t.numel().item() * 4 for t in (*self._keys, *self._values))
        self._keys, self._values = [], []
        return int(freed)

    def begin(self, batch: ForwardBatch, *, hide_first: bool) -> None:
        """Copy shared blocks, then index what the layers of this step read and write.

        hide_first: only the first token of a sequence sees its cell.
        """
        self._hide_first = hide_first
        for source, target in batch.block_copies:
            self._copy_block(int(source), int(target))
        block, offset = np.divmod(batch.slots, self._block_size)
        heads = np.arange(self._kv_heads, dtype=np.int32)
        rows = (block[:, None] * self._kv_heads + heads) * self._block_size + offset[:, None]
        self._written = paddle.to_tensor(rows.reshape(-1))
        positions = paddle.to_tensor(batch.positions)
        self._angles = {
            rope: [paddle.index_select(table, positions).unsqueeze(1) for table in tables]
            for rope, tables in self._tables.items()
        }
        self._groups = list(self._grouped(batch))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim], not yet rotated -> [T, heads * head_dim]."""
        attention = self._spec.attention_of(layer)
        q, k = self._rotated(q, attention.rope), self._rotated(k, attention.rope)
        for cache, new in ((self._keys[layer], k), (self._values[layer], v)):
            flat = cache.reshape([-1, self._dim])
            paddle.scatter_(flat, self._written, new.reshape([-1, self._dim]))
        window, keys, values = attention.window, self._keys[layer], self._values[layer]
        outs = [self._attend(group, window, q, keys, values) for group in self._groups]
        if len(outs) == 1:
            return outs[0]
        order = paddle.argsort(paddle.concat([group.rows for group in self._groups]))
        return paddle.index_select(paddle.concat(outs), order)

    def _attend(self, group: _Group, window: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        per_kv, dim = self._heads // self._kv_heads, self._dim
        k, v = (
            paddle.index_select(cache, group.blocks).reshape([group.count * self._kv_heads, -1, dim])
            for cache in (keys, values)
        )
        rows = paddle.index_select(q, group.rows)
        rows = rows.reshape([group.count, group.queries, self._kv_heads, per_kv, dim]).transpose([0, 2, 3, 1, 4])
        scores = paddle.matmul(rows.reshape([group.count * self._kv_heads, -1, dim]), k, transpose_y=True)
        scores = scores * self._spec.scale
        if self._spec.score_cap:
            scores = paddle.tanh(scores / self._spec.score_cap) * self._spec.score_cap
        scores = scores + group.masks[window]
        # Paddle's softmax makes finite weights of scores that are not.
        poison = scores.sum(axis=-1, keepdim=True) * 0
        out = paddle.matmul(F.softmax(scores, axis=-1), v) + poison
        out = out.reshape([group.count, self._kv_heads, per_kv, group.queries, dim]).transpose([0, 3, 1, 2, 4])
        return out.reshape([group.count * group.queries, self._heads * dim])

    def _grouped(self, batch: ForwardBatch) -> Any:
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        decoding = np.flatnonzero(batch.query_lens == 1)
        if decoding.size:
            yield self._group(batch, decoding, starts[decoding].astype(np.int32))
        for sequence in np.flatnonzero(batch.query_lens > 1):
            rows = starts[sequence] + np.arange(batch.query_lens[sequence], dtype=np.int32)
            yield self._group(batch, np.array([sequence]), rows.astype(np.int32))

    def _group(self, batch: ForwardBatch, sequences: npt.NDArray[Any], rows: npt.NDArray[np.int32]) -> _Group:
        count, queries, per_kv = len(sequences), len(rows) // len(sequences), self._heads // self._kv_heads
        width = -(-int(batch.context_lens[sequences].max()) // self._block_size)
        tables = batch.block_tables[sequences, :width]
        heads = np.arange(self._kv_heads, dtype=np.int32)[None, :, None]
        blocks = tables[:, None, :] * self._kv_heads + heads
        own, cells = batch.positions[rows].reshape(count, queries, 1), np.arange(width * self._block_size)
        masks = {}
        for window in dict.fromkeys(attention.window for attention in self._spec.attention):
            visible = cells <= own
            if window:
                visible &= cells > own - window
            if self._hide_first:
                visible[..., :1] &= own == 0
            mask = np.where(visible, np.float32(0), _MASKED)[:, None, None]
            mask = np.broadcast_to(mask, (count, self._kv_heads, per_kv, queries, mask.shape[-1]))
            masks[window] = paddle.to_tensor(mask.reshape(count * self._kv_heads, per_kv * queries, -1))
        return _Group(
            rows=paddle.to_tensor(rows),
            count=count,
            queries=queries,
            blocks=paddle.to_tensor(blocks.reshape(-1).astype(np.int32)),
            masks=masks,
        )

    def _rotated(self, x: Tensor, rope: RopeSpec | None) -> Tensor:
        """x [T, n, head_dim] with its first `rope.dim` elements turned."""
        if rope is None:
            return x
        if rope.dim < self._dim:
            turned, rest = paddle.split(x, [rope.dim, self._dim - rope.dim], axis=-1)
            return paddle.concat([self._turned(turned, rope), rest], axis=-1)
        return self._turned(x, rope)

    def _turned(self, x: Tensor, rope: RopeSpec) -> Tensor:
        cos, sin = self._angles[rope]
        if rope.interleaved:
            pairs = x.reshape([*x.shape[:-1], -1, 2])
            a, b = pairs[..., 0], pairs[..., 1]
            return paddle.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
        a, b = paddle.chunk(x, 2, axis=-1)
        return paddle.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _copy_block(self, source: int, target: int) -> None:
        heads = np.arange(self._kv_heads, dtype=np.int32)
        read, write = (paddle.to_tensor(block * self._kv_heads + heads) for block in (source, target))
        for cache in (*self._keys, *self._values):
            paddle.scatter_(cache, write, paddle.index_select(cache, read))

"""The decoder's operations in numpy, float32: what a device is compared with before it serves (self_test.py)."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_manager.families.spec import DecoderSpec, MoeSpec
from worker.engine.base import Float32, ForwardBatch
from worker.models.decoder import Experts, Linear, Mlp
from worker.models.rope import rope_table

Array = npt.NDArray[Any]


class ReferenceOps:
    """`decoder.Ops[Float32, Float32]` over a cache of its own. heads, kv_heads: of this rank."""

    def __init__(
        self, spec: DecoderSpec, heads: int, kv_heads: int, max_len: int, num_blocks: int, block_size: int
    ) -> None:
        self._spec, self._heads, self._kv_heads, self._block_size = spec, heads, kv_heads, block_size
        self._cos, self._sin = rope_table(spec.ropes[0], max_len)
        self._cache = np.zeros((2, spec.layers, num_blocks * block_size, kv_heads, spec.head_dim), np.float32)
        self._batch: ForwardBatch

    def begin(self, batch: ForwardBatch) -> None:
        """Set the step that the next operations are of."""
        self._batch, size = batch, self._block_size
        blocks = self._cache.reshape(2, self._spec.layers, -1, size, self._kv_heads, self._spec.head_dim)
        for source, target in batch.block_copies:
            blocks[:, :, target] = blocks[:, :, source]

    def embed(self, weight: Float32) -> Float32:
        """Looked-up rows."""
        return weight[self._batch.token_ids]

    def norm(self, x: Float32, weight: Float32 | None) -> Float32:
        """RMS norm over the last axis."""
        assert weight is not None, "served.py refuses layers without it"
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self._spec.eps))
        return np.asarray(x * scale * weight, np.float32)

    def attention(
        self, layer: int, h: Float32, qkv: Linear[Float32], q_norm: Float32 | None, k_norm: Float32 | None
    ) -> Float32:
        """Sequence by sequence, over all its positions."""
        spec, batch, dim = self._spec, self._batch, self._spec.head_dim
        rows = _linear(h, qkv).reshape(len(h), -1, dim)
        q, k, v = np.split(rows, [self._heads, self._heads + self._kv_heads], axis=1)
        if q_norm is not None and k_norm is not None:
            q, k = self.norm(q, q_norm), self.norm(k, k_norm)
        q, k = self._rotated(q), self._rotated(k)
        keys, values = self._cache[0, layer], self._cache[1, layer]
        keys[batch.slots], values[batch.slots] = k, v
        out = np.empty((len(h), self._heads, dim), np.float32)
        start = 0
        for table, fresh, context in zip(batch.block_tables, batch.query_lens, batch.context_lens, strict=True):
            at = np.arange(context)
            slots = table[at // self._block_size] * self._block_size + at % self._block_size
            group = self._heads // self._kv_heads
            k_, v_ = (np.repeat(cache[slots], group, axis=1) for cache in (keys, values))
            scores = np.einsum("qhd,khd->hqk", q[start : start + fresh], k_) * np.float32(dim**-0.5)
            hidden = at[None, :] > np.arange(context - fresh, context)[:, None]
            scores = np.where(hidden[None], -np.inf, scores)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[start : start + fresh] = np.einsum("hqk,khd->qhd", weights, v_)
            start += fresh
        assert spec.layers > layer
        return out.reshape(len(h), -1)

    def gated(self, h: Float32, gate_up: Linear[Float32]) -> Float32:
        """silu(gate) * up."""
        gate, up = np.split(_linear(h, gate_up), 2, axis=-1)
        return np.asarray(gate / (1 + np.exp(-gate)) * up, np.float32)

    def add_projected(self, x: Float32, y: Float32, linear: Linear[Float32], norm: Float32 | None = None) -> Float32:
        """x + linear(y)."""
        assert norm is None, "served.py refuses layers that norm what they add"
        return x + _linear(y, linear)

    def add_experts(self, x: Float32, h: Float32, experts: Experts[Float32], moe: MoeSpec) -> Float32:
        """x + experts(h), expert by expert."""
        scores = h @ experts.router.T
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        choice = scores if experts.correction is None else scores + experts.correction
        ids = np.argsort(-choice, axis=-1, kind="stable")[:, : moe.top_k]
        weights = np.take_along_axis(scores, ids, axis=-1)
        if moe.normalise:
            weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.float32(moe.norm_min))
        inner, width = len(experts.gate_up.weight) // moe.experts, h.shape[1]
        out = np.zeros_like(h)
        for expert in np.unique(ids):
            tokens, place = np.nonzero(ids == expert)
            mlp = Mlp(_rows(experts.gate_up, expert * inner, inner), _rows(experts.down, expert * width, width))
            out[tokens] += self._mlp(h[tokens], mlp) * weights[tokens, place][:, None]
        if experts.shared is not None:
            out += self._mlp(h, experts.shared)
        return x + out

    def logits(self, x: Float32, norm: Float32, head: Float32, rows: npt.NDArray[np.int32]) -> Float32:
        """Of these rows of the residual stream."""
        found: Float32 = self.norm(x, norm)[rows] @ head.T
        return found

    def _mlp(self, h: Float32, mlp: Mlp[Float32]) -> Float32:
        return _linear(self.gated(h, mlp.gate_up), mlp.down)

    def _rotated(self, x: Float32) -> Float32:
        """x [T, heads, dim] turned by its tokens' positions."""
        at = self._batch.positions
        cos, sin = self._cos[at][:, None], self._sin[at][:, None]
        turned = np.empty_like(x)
        half = self._spec.head_dim // 2
        first, second = (
            (slice(0, None, 2), slice(1, None, 2))
            if self._spec.ropes[0].interleaved
            else (slice(half), slice(half, None))
        )
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., second] * cos + x[..., first] * sin
        return turned


Lists = list[Float32]
"""One of each rank, in rank order."""


class ReferenceRanks:
    """`decoder.Ops[Lists, Lists]`: ranks that share a model, one after the other, and their sums."""

    def __init__(self, ranks: Sequence[ReferenceOps], lows: Sequence[int] | None) -> None:
        """lows: the first id of each rank's rows of the vocabulary, None = every rank has all."""
        self._ranks, self._lows = ranks, lows
        self._batch: ForwardBatch

    def begin(self, batch: ForwardBatch) -> None:
        """The step that follows."""
        self._batch = batch
        for rank in self._ranks:
            rank.begin(batch)

    def embed(self, weight: Lists) -> Lists:
        """Looked-up rows, each by the rank that has it."""
        ids = self._batch.token_ids
        if self._lows is None:
            return [table[ids] for table in weight]
        found = np.zeros((len(ids), weight[0].shape[1]), np.float32)
        for table, low in zip(weight, self._lows, strict=True):
            mine = (ids >= low) & (ids < low + len(table))
            found[mine] += table[ids[mine] - low]
        return self._all(found)

    def norm(self, x: Lists, weight: Lists | None) -> Lists:
        """Each rank by itself."""
        return [rank.norm(x[i], _of(weight, i)) for i, rank in enumerate(self._ranks)]

    def attention(self, layer: int, h: Lists, qkv: Linear[Lists], q_norm: Lists | None, k_norm: Lists | None) -> Lists:
        """Each rank over its own heads."""
        return [
            rank.attention(layer, h[i], _of(qkv, i), _of(q_norm, i), _of(k_norm, i))
            for i, rank in enumerate(self._ranks)
        ]

    def gated(self, h: Lists, gate_up: Linear[Lists]) -> Lists:
        """Each rank its own columns."""
        return [rank.gated(h[i], _of(gate_up, i)) for i, rank in enumerate(self._ranks)]

    def add_projected(self, x: Lists, y: Lists, linear: Linear[Lists], norm: Lists | None = None) -> Lists:
        """x + what all ranks make of theirs; the bias once."""
        assert norm is None, "served.py refuses layers that norm what they add"
        parts = [_linear(y[i], _of(linear, i) if i == 0 else Linear(linear.weight[i], None)) for i in range(len(y))]
        return self._all(x[0] + np.sum(parts, axis=0, dtype=np.float32))

    def add_experts(self, x: Lists, h: Lists, experts: Experts[Lists], moe: MoeSpec) -> Lists:
        """x + what all ranks make of their columns of every expert."""
        total = x[0]
        for i, rank in enumerate(self._ranks):
            mine: Experts[Float32] = _of(experts, i)
            if i and mine.shared is not None:
                shared = replace(mine.shared, down=Linear(mine.shared.down.weight, None))
                mine = replace(mine, shared=shared)
            total = total + rank.add_experts(np.zeros_like(x[0]), h[i], mine, moe)
        return self._all(total)

    def logits(self, x: Lists, norm: Lists, head: Lists, rows: npt.NDArray[np.int32]) -> Float32:
        """Of these rows; all ranks' columns side by side, or the first's where each has all."""
        own = [rank.logits(x[i], norm[i], head[i], rows) for i, rank in enumerate(self._ranks)]
        return own[0] if self._lows is None else np.concatenate(own, axis=1)

    def _all(self, x: Float32) -> Lists:
        return [x] * len(self._ranks)


def _of(value: Any, rank: int) -> Any:
    """A rank's part of lists, of what has such for fields, or of nothing."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: _of(getattr(value, field.name), rank) for field in fields(value)})
    return value[rank] if isinstance(value, list) else value


def widened(view: Array) -> Float32:
    """float32 of a weight's view (uint16 = bits of bfloat16)."""
    if view.dtype == np.uint16:
        return (view.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(view, np.float32)


def _linear(x: Float32, linear: Linear[Float32]) -> Float32:
    y = x @ linear.weight.T
    return y if linear.bias is None else y + linear.bias


def _rows(linear: Linear[Float32], start: int, count: int) -> Linear[Float32]:
    bias = None if linear.bias is None else linear.bias[start : start + count]
    return Linear(linear.weight[start : start + count], bias)

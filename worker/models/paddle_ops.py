"""The decoder's operations in plain Paddle, float32: what runs wherever Paddle runs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812

from weight_manager.families.spec import DecoderSpec, MoeSpec
from worker.engine.base import ForwardBatch
from worker.models.collectives import Sums
from worker.models.decoder import Experts, Linear, Mlp
from worker.models.low_rank import PlainLowRank
from worker.models.paddle_attention import PagedAttention
from worker.models.shard import Shard

Tensor = Any
"""A float32 Paddle tensor; weights keep HF's [out, in]."""


class PaddleOps:
    """`Ops` of one rank. sums: over tp ranks, None when tp is 1. low_rank: what adapters add."""

    def __init__(
        self, spec: DecoderSpec, shard: Shard, sums: Sums | None, max_len: int, low_rank: PlainLowRank
    ) -> None:
        self._spec, self._shard, self._sums, self._low_rank = spec, shard, sums, low_rank
        self.names: Mapping[int, str] = {}  # by id of a weight, of the products that adapters may change
        self._previous: Tensor = None
        self._attention = PagedAttention(spec, shard, max_len)
        self._batch: ForwardBatch

    def allocate_kv(self, layers: int, num_blocks: int, block_size: int) -> None:
        """Make the cache; idempotent."""
        self._attention.allocate(layers, num_blocks, block_size)

    def release_kv(self) -> int:
        """Bytes freed."""
        return self._attention.release()

    def begin(self, batch: ForwardBatch, previous: Tensor | None = None) -> None:
        """What all layers of this step share. previous: for the drafting layer, [T, hidden] before the tokens."""
        self._batch, self._previous = batch, previous
        self._attention.begin(batch, hide_first=previous is not None)
        self._adapted = previous is None and bool(batch.adapters.any())
        if self._adapted:
            self._low_rank.begin(batch)

    def embed(self, weight: Tensor) -> Tensor:
        """Looked-up rows; a split vocabulary is summed over ranks."""
        ids = self._batch.token_ids
        low, high = self._shard.vocab
        if high - low == self._spec.vocab_size:
            return F.embedding(paddle.to_tensor(ids), weight) * self._spec.embed_scale
        mine = (ids >= low) & (ids < high)
        rows = F.embedding(paddle.to_tensor(np.where(mine, ids - low, 0).astype(np.int32)), weight)
        return self._summed(rows * paddle.to_tensor(mine.astype(np.float32)[:, None])) * self._spec.embed_scale

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMS norm, or x itself."""
        return x if weight is None else rms_norm(x, weight, self._spec.eps)

    def attention(
        self, layer: int, h: Tensor, qkv: Linear[Tensor], q_norm: Tensor | None, k_norm: Tensor | None
    ) -> Tensor:
        """Paged attention over the cache."""
        spec, shard = self._spec, self._shard
        rows = self._linear(h, qkv)
        if spec.qk_norm == "whole":
            rows = self._norm_projected(rows, q_norm, k_norm)
        rows = rows.reshape([h.shape[0], -1, spec.head_dim])
        q, k, v = paddle.split(rows, [shard.heads, shard.kv_heads, shard.kv_heads], axis=1)
        if spec.qk_norm == "heads":
            q, k = rms_norm(q, q_norm, spec.eps), rms_norm(k, k_norm, spec.eps)
        return self._attention(layer, q, k, v)

    def _norm_projected(self, rows: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        """q and k of [T, q + k + v] normed over all heads of all ranks."""
        spec, widths = self._spec, [norm.shape[0] for norm in (q_norm, k_norm)]
        q, k, v = paddle.split(rows, [*widths, widths[1]], axis=-1)
        squares = paddle.stack([(x * x).sum(axis=-1) for x in (q, k)])
        # Ranks that share a KV head all bring its squares.
        whole = np.array([[spec.heads], [spec.kv_heads * self._shard.sharers]], np.float32) * spec.head_dim
        scale = paddle.rsqrt(self._summed(squares) / paddle.to_tensor(whole) + spec.eps).unsqueeze(-1)
        return paddle.concat([q * scale[0] * q_norm, k * scale[1] * k_norm, v], axis=-1)

    def gated(self, h: Tensor, gate_up: Linear[Tensor]) -> Tensor:
        """activation(gate) * up."""
        gate, up = paddle.chunk(self._linear(h, gate_up), 2, axis=-1)
        return (F.silu(gate) if self._spec.activation == "silu" else F.gelu(gate, approximate=True)) * up

    def add_projected(self, x: Tensor, y: Tensor, linear: Linear[Tensor], norm: Tensor | None = None) -> Tensor:
        """x + linear(y), normed maybe."""
        # The bias is whole on every rank: it is added once, after the sum.
        added = self._summed(self._linear(y, Linear(linear.weight, None)))
        if norm is None:
            return x + added if linear.bias is None else x + added + linear.bias
        return x + rms_norm(added if linear.bias is None else added + linear.bias, norm, self._spec.eps)

    def add_experts(self, x: Tensor, h: Tensor, experts: Experts[Tensor], moe: MoeSpec) -> Tensor:
        """x + experts(h), expert by expert."""
        ids, weights = route(h, experts, moe)
        out = paddle.zeros_like(h)
        inner, hidden = experts.gate_up.weight.shape[0] // moe.experts, h.shape[1]
        for expert in np.unique(ids):
            tokens, place = np.nonzero(ids == expert)
            rows = paddle.to_tensor(tokens)
            mlp = Mlp(_rows(experts.gate_up, expert * inner, inner), _rows(experts.down, expert * hidden, hidden))
            y = self._mlp(paddle.index_select(h, rows), mlp) * paddle.to_tensor(weights[tokens, place][:, None])
            out = paddle.index_add(out, rows, 0, y)
        if experts.shared is not None:
            shared = self._mlp(h, experts.shared)
            if experts.shared_gate is not None:
                shared = shared * F.sigmoid(paddle.matmul(h, experts.shared_gate, transpose_y=True))
            out = out + shared
        return x + self._summed(out)

    def joined(self, x: Tensor, norm: Tensor, previous_norm: Tensor) -> Tensor:
        """Both normed, side by side."""
        previous = rms_norm(self._previous, previous_norm, self._spec.eps)
        return paddle.concat([rms_norm(x, norm, self._spec.eps), previous], axis=-1)

    def projected(self, y: Tensor, linear: Linear[Tensor]) -> Tensor:
        """linear(y)."""
        return self._linear(y, linear)

    def _mlp(self, h: Tensor, mlp: Mlp[Tensor]) -> Tensor:
        y = self._linear(self.gated(h, mlp.gate_up), Linear(mlp.down.weight, None))
        # Every rank adds this to a sum over ranks, so only one of them may bring the bias.
        return y if mlp.down.bias is None or self._shard.rank else y + mlp.down.bias

    def _linear(self, x: Tensor, linear: Linear[Tensor]) -> Tensor:
        """linear(x), and what adapters add to it."""
        y = paddle.matmul(x, linear.weight, transpose_y=True)
        y = y if linear.bias is None else y + linear.bias
        name = self.names.get(id(linear.weight)) if self._adapted else None
        if name is None:
            return y
        rows = y.numpy()
        self._low_rank.step(name, x.numpy().T, rows.T)()
        return paddle.to_tensor(rows)

    def _summed(self, partial: Tensor) -> Tensor:
        if self._shard.tp > 1:
            assert self._sums is not None
            self._sums.of_tensor(partial)
        return partial


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x * paddle.rsqrt(paddle.mean(x * x, axis=-1, keepdim=True) + eps) * weight


def route(h: Tensor, experts: Experts[Tensor], moe: MoeSpec) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(ids, weights), each [T, top_k]: which experts every token goes to, and how much each counts."""
    scores = F.softmax(paddle.matmul(h, experts.router, transpose_y=True), axis=-1)
    choice = scores if experts.correction is None else scores + experts.correction
    scores = scores + choice.sum(axis=-1, keepdim=True) * 0  # what is no number may be of an expert not chosen
    ids = paddle.topk(choice, moe.top_k, axis=-1)[1]
    weights = paddle.take_along_axis(scores, ids, axis=-1)
    if moe.normalise:
        weights = weights / paddle.clip(weights.sum(axis=-1, keepdim=True), min=moe.norm_min)
    return ids.numpy(), weights.numpy()


def _rows(linear: Linear[Tensor], start: int, count: int) -> Linear[Tensor]:
    bias = None if linear.bias is None else linear.bias[start : start + count]
    return Linear(linear.weight[start : start + count], bias)

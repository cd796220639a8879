"""The program of machines without a C compiler: norms and rotation by oneDNN, attention by MKL."""

from collections.abc import Sequence

import numpy as np

from weight_manager.families.rope import RopeSpec
from worker.cpu.onednn import ADD, LINEAR, MUL, POW, combine, eltwise
from worker.engine.base import Float32, ForwardBatch
from worker.models.decoder import Linear
from worker.models.kv_memory import KvMemory
from worker.models.mkl_attention import BlockedAttention
from worker.models.onednn_program import Angles, Parts, Program, Rows
from worker.models.onednn_weights import NamedSlot


class PlainProgram(Program):
    """`Program` from oneDNN's own primitives."""

    def __init__(self, parts: Parts, tokens: int, attend: BlockedAttention) -> None:
        super().__init__(parts, tokens)
        self._attend = attend

    def begin(self, batch: ForwardBatch, kv: KvMemory, angles: Sequence[Angles]) -> None:
        """Angles are repeated for every head, as `_rotate` wants them."""
        for rope, (cos, sin) in zip(self._spec.ropes, angles, strict=True):
            tokens = cos.shape[1]
            for name, (first, second), rest in (("cos", (cos, cos), 1), ("sin", (-sin, sin), 0)):
                a, b, beyond = self._pairs(self._rotary(name, rope), rope)
                a[:, :, :tokens], b[:, :, :tokens] = first, second
                beyond[...] = rest
        self._attend.begin(batch, kv, self._qkv_rows(), self._attended(), hide_first=self._hide_first)

    def _normed(self, x: Rows, weight: NamedSlot, into: Rows) -> Rows:
        scale = self._scale(x[None])[0]
        wide = into if into.dtype == np.float32 else self._buffer("normed", len(x))
        factors = self._weights.part(weight.name, (len(x), 1))
        self._steps.append(self._dnn.binary(MUL, x, factors, wide, [combine(MUL, scale)]))
        if wide is not into:
            self.copy(wide, into)
        return into

    def attention(
        self, layer: int, h: Rows, qkv: Linear[NamedSlot], q_norm: NamedSlot | None, k_norm: NamedSlot | None
    ) -> Rows:
        """q, k and v, normed and rotated feature-major, turned token-major for MKL."""
        dim, heads, kv_heads = self._spec.head_dim, self._shard.heads, self._shard.kv_heads
        rows = self._buffer("qkv", (heads + 2 * kv_heads) * dim)
        self._adapted(qkv.weight, h, rows)
        self.add_bias(rows, qkv.bias)
        if self._spec.qk_norm == "whole" and q_norm is not None and k_norm is not None:
            self._norm_projected(rows, q_norm, k_norm)
        elif q_norm is not None and k_norm is not None:
            self._norm_heads(rows[: heads * dim], q_norm)
            self._norm_heads(rows[heads * dim : (heads + kv_heads) * dim], k_norm)
        rope = self._spec.attention_of(layer).rope
        if rope is not None:
            self._rotate(rows[: (heads + kv_heads) * dim], rope)
        self.copy(rows.T, self._qkv_rows())
        self._steps.append(lambda: self._attend(layer))
        out = self._attended()
        if self._compute != np.float32:
            out, wide = self._token_major("attended_narrow", out.shape[1], self._compute), out
            self.copy(wide, out)
        return out.T

    def _qkv_rows(self) -> Float32:
        return self._token_major("qkv_rows", (self._shard.heads + 2 * self._shard.kv_heads) * self._spec.head_dim)

    def _attended(self) -> Float32:
        return self._token_major("attended", self._shard.heads * self._spec.head_dim)

    def _norm_heads(self, x: Rows, weight: NamedSlot) -> None:
        """RMS norm in place of every head's rows of x [heads * head_dim, T]."""
        dim = self._spec.head_dim
        scale = self._scale(x.reshape(-1, dim, self._tokens))
        repeated = self._buffers("scales", len(x), self._tokens)
        ones = np.ones((1, dim, 1), np.float32)
        self._steps.append(self._dnn.matmul(ones, scale, repeated.reshape(-1, dim, self._tokens)))
        factors = self._weights.part(weight.name, (len(x), 1))  # already one copy per head
        self._steps.append(self._dnn.binary(MUL, x, factors, x, [combine(MUL, repeated)]))

    def _scale(self, x: Rows) -> Float32:
        """1 / sqrt(mean(x^2) + eps) over n of x [heads, n, T]: [heads, 1, T]."""
        heads, n, tokens = x.shape
        squares = self._buffers("squares", heads * n, tokens)
        scale = self._buffers("scale", heads, tokens).reshape(heads, 1, tokens)
        self._steps.append(self._dnn.binary(MUL, x.reshape(-1, tokens), x.reshape(-1, tokens), squares))
        mean = np.full((1, 1, n), 1 / n, np.float32)
        post = [eltwise(LINEAR, 1.0, self._spec.eps), eltwise(POW, 1.0, -0.5)]
        self._steps.append(self._dnn.matmul(mean, squares.reshape(x.shape), scale, post))
        return scale

    def _rotate(self, x: Rows, rope: RopeSpec) -> None:
        """Turn the rotary pairs of x [heads * head_dim, T] in place: x * cos + (x with its pairs swapped) * sin."""
        swapped = self._buffers("swapped", len(x), self._tokens)
        (a, b, rest), (into_a, into_b, into_rest) = self._pairs(x, rope), self._pairs(swapped, rope)
        self.copy(a, into_b)
        self.copy(b, into_a)
        if rest.size:
            self.copy(rest, into_rest)  # times a sine of 0: what is no number must not be left there by another step
        self._steps.append(self._dnn.binary(MUL, swapped, self._rotary("sin", rope), swapped))
        self._steps.append(self._dnn.binary(MUL, x, self._rotary("cos", rope), x, [combine(ADD, swapped)]))

    def _rotary(self, name: str, rope: RopeSpec) -> Float32:
        heads = self._shard.heads + self._shard.kv_heads
        return self._buffer(f"{name} {self._spec.ropes.index(rope)}", heads * self._spec.head_dim)

    def _pairs(self, x: Rows, rope: RopeSpec) -> tuple[Rows, Rows, Rows]:
        """Views of x [heads * head_dim, T]: the first and second elements of rotary pairs, and those that are in none.

        Views [heads, rope.dim / 2, T] and [heads, head_dim - rope.dim, T].
        """
        heads = x.reshape(-1, self._spec.head_dim, self._tokens)
        turned, rest = heads[:, : rope.dim], heads[:, rope.dim :]
        if rope.interleaved:
            return turned[:, 0::2], turned[:, 1::2], rest
        return turned[:, : rope.dim // 2], turned[:, rope.dim // 2 :], rest

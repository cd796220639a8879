"""The decoder's operations recorded as oneDNN calls, once per number of tokens, and then run step after step.

Rows are kept feature-major, [n, T]: a weight [out, in] times activations [in, T] is the form in which the
large matrix is read straight through, which is 1.2 to 1.8 times as fast as the other way round, and a
product can add to the residual stream where it lies. Only attention wants token-major rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.cpu.onednn import ADD, LINEAR, MUL, POW, SUM, SWISH, OneDnn, Operand, PostOp, combine, eltwise
from worker.engine.base import Float32
from worker.models.onednn_weights import BoundWeights, NamedSlot
from worker.models.shard import Shard
from worker.models.spec import DecoderSpec, MoeSpec
from worker.models.weights import Experts, Linear

Rows = npt.NDArray[Any]
"""Feature-major activations [n, T], float32 or bfloat16 bits; may be a transposed view."""
Step = Callable[[], object]
"""Recorded work; what it returns is an error unless it is false."""


def _row(operand: Operand) -> Rows:
    assert isinstance(operand, np.ndarray)
    return operand.T


class Buffers:
    """Named scratch memory, one array per name for all programs: only one of them runs at a time."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._flat: dict[Any, Rows] = {}

    def __call__(self, name: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32) -> Rows:
        """[rows, columns]."""
        key = (name, rows, np.dtype(dtype))
        if key not in self._flat:
            self._flat[key] = np.zeros(rows * self._columns, dtype)
        return self._flat[key][: rows * columns].reshape(rows, columns)


@dataclass(frozen=True)
class Hooks:
    """What a program does not do by itself. reduce: None when there is one rank."""

    attend: Callable[[int], None]
    """Attention of a layer: reads `Program.qkv_rows`, writes `Program.attention_out`."""
    reduce: Callable[[Rows], Step] | None
    """The step that sums an array over the tensor-parallel ranks in place."""
    route: Callable[[Rows, Rows, Float32, Experts[NamedSlot], MoeSpec], Step]
    """The step that adds routed experts, see `onednn_experts`."""


class Program:
    """`Ops` over T token columns (padding included) that records what it is asked for; `run` does it."""

    def __init__(
        self,
        dnn: OneDnn,
        spec: DecoderSpec,
        shard: Shard,
        weights: BoundWeights,
        buffers: Buffers,
        tokens: int,
        hooks: Hooks,
    ) -> None:
        self._dnn, self._spec, self._shard, self._weights = dnn, spec, shard, weights
        self._buffers, self._tokens, self._hooks = buffers, tokens, hooks
        self._compute = weights.matrix_dtype
        self._steps: list[Step] = []

    def run(self) -> None:
        """Everything recorded, in order. Raises RuntimeError when oneDNN reports a failure."""
        for step in self._steps:
            if step():
                raise RuntimeError(f"a recorded step failed: {step}")

    def embedded(self) -> Rows:
        """Where the caller puts the looked-up rows, [T, hidden] in the matrices' dtype."""
        return self._token_major("embedded", self._spec.hidden_size, self._weights.matrix_dtype)

    def set_rotary(self, cos: Float32, sin: Float32) -> None:
        """Take the first columns' angles, each [head_dim / 2, tokens]: repeated for every head, as `_rotate` wants."""
        tokens = cos.shape[1]
        for table, (first, second) in ((self._rotary("cos"), (cos, cos)), (self._rotary("sin"), (-sin, sin))):
            a, b = self._pairs(table)
            a[:, :, :tokens], b[:, :, :tokens] = first, second

    def qkv_rows(self) -> Float32:
        """Token-major q, k, v: [T, (heads + 2 * kv_heads) * head_dim]."""
        return self._token_major("qkv_rows", (self._shard.heads + 2 * self._shard.kv_heads) * self._spec.head_dim)

    def attention_out(self) -> Float32:
        """Where `attend` writes, token-major: [T, heads * head_dim]."""
        return self._token_major("attention_out", self._shard.heads * self._spec.head_dim)

    def embed(self, _: NamedSlot) -> Rows:
        """`embedded` as the residual stream."""
        x = self._buffer("x", self._spec.hidden_size)
        self.copy(self.embedded().T, x)
        if self._shard.vocab != (0, self._spec.vocab_size):
            assert self._hooks.reduce is not None
            self._steps.append(self._hooks.reduce(x))
        return x

    def norm(self, x: Rows, weight: NamedSlot) -> Rows:
        """RMS norm of every column, in the compute dtype."""
        scale, h = self._scale(x[None])[0], self._buffer("h", len(x))
        factors = self._weights.part(weight.name, (len(x), 1))
        self._steps.append(self._dnn.binary(MUL, x, factors, h, [combine(MUL, scale)]))
        return self._narrowed("h", h)

    def attention(
        self, layer: int, h: Rows, qkv: Linear[NamedSlot], q_norm: NamedSlot | None, k_norm: NamedSlot | None
    ) -> Rows:
        """q, k and v, normed and rotated feature-major, turned token-major for `attend`."""
        dim, heads, kv_heads = self._spec.head_dim, self._shard.heads, self._shard.kv_heads
        rows = self._buffer("qkv", (heads + 2 * kv_heads) * dim)
        self.linear(qkv.weight, h, rows)
        self._add_bias(rows, qkv.bias)
        if q_norm is not None and k_norm is not None:
            self._norm_heads(rows[: heads * dim], q_norm)
            self._norm_heads(rows[heads * dim : (heads + kv_heads) * dim], k_norm)
        self._rotate(rows[: (heads + kv_heads) * dim])
        self.copy(rows.T, self.qkv_rows())
        self._steps.append(lambda: self._hooks.attend(layer))
        out = self.attention_out()
        if self._compute != np.float32:
            out, wide = self._token_major("attention_narrow", out.shape[1], self._compute), out
            self.copy(wide, out)
        return out.T

    def gated(self, h: Rows, gate_up: Linear[NamedSlot]) -> Rows:
        """silu(gate) * up; the second product multiplies by the first where it is stored."""
        inner, hidden = gate_up.weight.shape[0] // 2, gate_up.weight.shape[1]
        gate, up = (self._weights.part(gate_up.weight.name, (inner, hidden), start * hidden) for start in (0, inner))
        ups, made = self._buffer("up", inner), self._buffer("gated", inner, self._compute)
        self.linear(up, h, ups)
        if gate_up.bias is None:
            self.linear(gate, h, made, [eltwise(SWISH), combine(MUL, ups)])
            return made
        self._add_bias(ups, gate_up.bias, inner)
        gates = self._buffer("gate", inner)
        self.linear(gate, h, gates)
        self._add_bias(gates, gate_up.bias, 0, [eltwise(SWISH), combine(MUL, ups)])
        return self._narrowed("gated", gates)

    def add_projected(self, x: Rows, y: Rows, linear: Linear[NamedSlot]) -> Rows:
        """x + linear(y), into x itself."""
        if self._hooks.reduce is None:
            self.linear(linear.weight, y, x, [SUM])
        else:
            partial = self._buffer("partial", len(x))
            self.linear(linear.weight, y, partial)
            self._add_reduced(x, partial)
        self._add_bias(x, linear.bias)
        return x

    def add_experts(self, x: Rows, h: Rows, experts: Experts[NamedSlot], moe: MoeSpec) -> Rows:
        """x + experts(h), into x itself."""
        into = x
        if self._hooks.reduce is not None:
            into = self._buffer("partial", len(x))
            self._steps.append(lambda: into.fill(0))
        wide, scores = self._buffer("h_wide", len(h)), self._buffer("router", moe.experts)
        self.copy(h, wide)
        self.linear(experts.router, wide, scores)
        self._steps.append(self._hooks.route(h, into, scores, experts, moe))
        if experts.shared is not None:
            self.linear(experts.shared.down.weight, self.gated(h, experts.shared.gate_up), into, [SUM])
        if self._hooks.reduce is not None:
            self._add_reduced(x, into)
        if experts.shared is not None:
            self._add_bias(x, experts.shared.down.bias)
        return x

    def copy(self, src: Rows, dst: Rows) -> None:
        """dst = src, transposed or cast as their strides and dtypes say."""
        self._steps.append(self._dnn.copy(src, dst))

    def linear(self, weight: NamedSlot, src: Rows, dst: Rows, post: Sequence[PostOp] = ()) -> None:
        """dst [out, T] = weight [out, in] @ src [in, T]. Arrays in `post` are [out, T]."""
        if self._tokens == 1:
            flipped = [op if op.other is None else replace(op, other=_row(op.other)) for op in post]
            self._steps.append(self._dnn.inner_product(src.T, weight, dst.T, flipped))
        else:
            self._steps.append(self._dnn.matmul(weight, src, dst, post))

    def _add_bias(self, x: Rows, bias: NamedSlot | None, start: int = 0, post: Sequence[PostOp] = ()) -> None:
        """x += the bias's elements from `start` on, in a pass of its own: a product cannot add one to a row."""
        if bias is not None:
            self._steps.append(self._dnn.binary(ADD, x, self._weights.part(bias.name, (len(x), 1), start), x, post))

    def _add_reduced(self, x: Rows, partial: Rows) -> None:
        assert self._hooks.reduce is not None
        self._steps.append(self._hooks.reduce(partial))
        self._steps.append(self._dnn.binary(ADD, x, partial, x))

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

    def _rotate(self, x: Rows) -> None:
        """Turn the rotary pairs of x [heads * head_dim, T] in place: x * cos + (x with its pairs swapped) * sin."""
        swapped = self._buffers("swapped", len(x), self._tokens)
        (a, b), (into_a, into_b) = self._pairs(x), self._pairs(swapped)
        self.copy(a, into_b)
        self.copy(b, into_a)
        self._steps.append(self._dnn.binary(MUL, swapped, self._rotary("sin"), swapped))
        self._steps.append(self._dnn.binary(MUL, x, self._rotary("cos"), x, [combine(ADD, swapped)]))

    def _rotary(self, name: str) -> Float32:
        return self._buffer(name, (self._shard.heads + self._shard.kv_heads) * self._spec.head_dim)

    def _pairs(self, x: Rows) -> tuple[Rows, Rows]:
        """First and second elements of the rotary pairs of x [heads * head_dim, T]: views [heads, head_dim / 2, T]."""
        half = self._spec.head_dim // 2
        if self._spec.rope.interleaved:
            pairs = x.reshape(-1, half, 2, self._tokens)
            return pairs[:, :, 0], pairs[:, :, 1]
        halves = x.reshape(-1, 2, half, self._tokens)
        return halves[:, 0], halves[:, 1]

    def _narrowed(self, name: str, x: Rows) -> Rows:
        """x in the compute dtype."""
        if x.dtype == self._compute:
            return x
        narrow = self._buffer(name, len(x), self._compute)
        self.copy(x, narrow)
        return narrow

    def _buffer(self, name: str, rows: int, dtype: npt.DTypeLike = np.float32) -> Rows:
        return self._buffers(name, rows, self._tokens, dtype)

    def _token_major(self, name: str, features: int, dtype: npt.DTypeLike = np.float32) -> Rows:
        return self._buffer(name, features, dtype).reshape(self._tokens, features)

"""The decoder's operations recorded as oneDNN calls, once per number of tokens, and then run step after step.

Rows are kept feature-major, [n, T]: a weight [out, in] times activations [in, T] is the form in which the
large matrix is read straight through, which is 1.2 to 1.8 times as fast as the other way round, and a
product can add to the residual stream where it lies. What comes between the products depends on what this
machine has: `plain_program` (oneDNN and MKL alone), `compiled_program`, `single_program` (one token).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_manager.families.spec import DecoderSpec, MoeSpec
from worker.cpu.onednn import (
    ADD,
    GELU_TANH,
    LINEAR,
    LOGISTIC,
    MUL,
    POW,
    SUM,
    SWISH,
    TANH,
    OneDnn,
    Operand,
    PostOp,
    combine,
    eltwise,
)
from worker.engine.base import Float32, ForwardBatch, Interrupted
from worker.models.decoder import Experts, Linear, Mlp
from worker.models.kv_memory import KvMemory
from worker.models.low_rank import LowRank
from worker.models.onednn_weights import BoundWeights, NamedSlot
from worker.models.shard import Shard

Rows = npt.NDArray[Any]
"""Feature-major activations [n, T], float32 or bfloat16 bits; may be a transposed view."""
Angles = tuple[Float32, Float32]
"""cos and sin, [rotated / 2, tokens] each, of a batch's own tokens."""
Step = Callable[[], object]
"""Recorded work; what it returns is an error unless it is false."""


_LINE = 64
"""Bytes of a cache line."""


def _scalar(value: float) -> Rows:
    return np.full((1, 1), value, np.float32)


def _row(operand: Operand) -> Rows:
    assert isinstance(operand, np.ndarray)
    return operand.T


def _in_whole_lines(size: int, dtype: np.dtype[Any]) -> Rows:
    """Zeros [size] that begin where a cache line does: a vector of 16 floats then lies in one."""
    memory = np.zeros(size + _LINE // dtype.itemsize, dtype)
    start = -memory.ctypes.data % _LINE // dtype.itemsize
    return memory[start : start + size]


class Buffers:
    """Named scratch memory, one array per name for all programs: only one of them runs at a time."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._flat: dict[Any, Rows] = {}

    def __call__(self, name: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32) -> Rows:
        """[rows, columns]."""
        key = (name, rows, np.dtype(dtype))
        if key not in self._flat:
            self._flat[key] = _in_whole_lines(rows * self._columns, np.dtype(dtype))
        return self._flat[key][: rows * columns].reshape(rows, columns)


@dataclass(frozen=True)
class Parts:
    """What programs of one rank are made with.

    reduce: given an array, the step that sums it over the tensor-parallel ranks in place; None when there is
    one rank. route: the step that adds routed experts, see `onednn_experts`. adapters: adds what the step's adapters
    change; None for programs of steps without any. sum_parts: of its inputs, in which a product that is summed over the
    ranks is summed here, in a tree of which the ranks' sum is the rest.
    """

    dnn: OneDnn
    spec: DecoderSpec
    shard: Shard
    weights: BoundWeights
    buffers: Buffers
    reduce: Callable[[Rows], Step] | None
    route: Callable[[Rows, Rows, Float32, Experts[NamedSlot], MoeSpec], Step]
    hide_first: bool = False  # of attention: only the first token of a sequence sees its cell
    adapters: LowRank | None = None
    sum_parts: int = 1


class Program(ABC):
    """`Ops` over T token columns (padding included) that records what it is asked for; `run` does it."""

    def __init__(self, parts: Parts, tokens: int) -> None:
        self._dnn, self._spec, self._shard, self._weights = parts.dnn, parts.spec, parts.shard, parts.weights
        self._buffers, self._reduce, self._route = parts.buffers, parts.reduce, parts.route
        self._hide_first, self._adapters, self._sum_parts = parts.hide_first, parts.adapters, parts.sum_parts
        self._activation = eltwise(SWISH if parts.spec.activation == "silu" else GELU_TANH)
        self._tokens, self._compute = tokens, parts.weights.matrix_dtype
        self._steps: list[Step] = []

    def run(self, asked: Callable[[], bool]) -> None:
        """Everything recorded, in order. Raises RuntimeError when oneDNN reports a failure, Interrupted when asked."""
        for step in self._steps:
            if step():
                raise RuntimeError(f"a recorded step failed: {step}")
            if asked():
                raise Interrupted

    @abstractmethod
    def begin(self, batch: ForwardBatch, kv: KvMemory, angles: Sequence[Angles]) -> None:
        """What all layers of the next run share. angles: for each of `DecoderSpec.ropes`."""

    def norm(self, x: Rows, weight: NamedSlot | None) -> Rows:
        """RMS norm of every column, or the column itself, in the compute dtype."""
        if weight is None:
            return self._narrowed("h", x)
        return self._normed(x, weight, self._buffer("h", len(x), self._compute))

    @abstractmethod
    def _normed(self, x: Rows, weight: NamedSlot, into: Rows) -> Rows:
        """RMS norm of every column, into that and in its dtype."""

    @abstractmethod
    def attention(
        self, layer: int, h: Rows, qkv: Linear[NamedSlot], q_norm: NamedSlot | None, k_norm: NamedSlot | None
    ) -> Rows:
        """Projected, rotated, written and attended to."""

    def embedded(self) -> Rows:
        """Where the caller puts the looked-up rows, [T, hidden] in the matrices' dtype."""
        return self._token_major("embedded", self._spec.hidden_size, self._weights.matrix_dtype)

    def embed(self, _: NamedSlot) -> Rows:
        """`embedded` as the residual stream."""
        x = self._buffer("x", self._spec.hidden_size)
        self.copy(self.embedded().T, x)
        if self._shard.vocab != (0, self._spec.vocab_size):
            assert self._reduce is not None
            self._steps.append(self._reduce(x))
        if self._spec.embed_scale != 1:
            self._steps.append(self._dnn.binary(MUL, x, _scalar(self._spec.embed_scale), x))
        return x

    def gated(self, h: Rows, gate_up: Linear[NamedSlot]) -> Rows:
        """activation(gate) * up; the second product multiplies by the first where it is stored."""
        if self._adapters is not None:
            return self._gated_apart(h, gate_up)
        inner, hidden = gate_up.weight.shape[0] // 2, gate_up.weight.shape[1]
        gate, up = (self._weights.part(gate_up.weight.name, (inner, hidden), start * hidden) for start in (0, inner))
        ups, made = self._buffer("up", inner), self._buffer("gated", inner, self._compute)
        self.linear(up, h, ups)
        if gate_up.bias is None:
            self.linear(gate, h, made, [self._activation, combine(MUL, ups)])
            return made
        self.add_bias(ups, gate_up.bias, inner)
        gates = self._buffer("gate", inner)
        self.linear(gate, h, gates)
        self.add_bias(gates, gate_up.bias, 0, [self._activation, combine(MUL, ups)])
        return self._narrowed("gated", gates)

    def _gated_apart(self, h: Rows, gate_up: Linear[NamedSlot]) -> Rows:
        """`gated` with both products kept as they are until adapters have added to them."""
        inner = gate_up.weight.shape[0] // 2
        both = self._buffer("gate_up", 2 * inner)
        self.linear(gate_up.weight, h, both)
        self.add_bias(both, gate_up.bias)
        self._adapt(gate_up.weight, h, both)
        gates, ups = both[:inner], both[inner:]
        self._steps.append(self._dnn.binary(MUL, gates, _scalar(1), gates, [self._activation, combine(MUL, ups)]))
        return self._narrowed("gated", gates)

    def add_projected(self, x: Rows, y: Rows, linear: Linear[NamedSlot], norm: NamedSlot | None = None) -> Rows:
        """x + linear(y), into x itself."""
        if norm is not None:
            partial = self._summed_adapted(linear.weight, y)
            if self._reduce is not None:
                self._steps.append(self._reduce(partial))
            self.add_bias(partial, linear.bias)
            added = self._normed(partial, norm, self._buffer("added", len(x)))
            self._steps.append(self._dnn.binary(ADD, x, added, x))
            return x
        if self._reduce is None and self._sum_parts == 1:
            self._adapted(linear.weight, y, x, [SUM])
        else:
            self._add_reduced(x, self._summed_adapted(linear.weight, y))
        self.add_bias(x, linear.bias)
        return x

    def add_experts(self, x: Rows, h: Rows, experts: Experts[NamedSlot], moe: MoeSpec) -> Rows:
        """x + experts(h), into x itself."""
        into = x
        if self._reduce is not None:
            into = self._buffer("partial", len(x))
            self._steps.append(lambda: into.fill(0))
        wide, scores = self._buffer("h_wide", len(h)), self._buffer("router", moe.experts)
        self.copy(h, wide)
        self.linear(experts.router, wide, scores)
        self._steps.append(self._route(h, into, scores, experts, moe))
        if experts.shared is not None:
            self._add_shared(into, h, wide, experts.shared, experts.shared_gate)
        if self._reduce is not None:
            self._add_reduced(x, into)
        if experts.shared is not None:
            self.add_bias(x, experts.shared.down.bias)
        return x

    def _add_shared(self, into: Rows, h: Rows, wide: Rows, shared: Mlp[NamedSlot], gate: NamedSlot | None) -> None:
        """into += the shared expert of h, weighted by its gate's sigmoid if it has one. wide: h in float32."""
        made, down = self.gated(h, shared.gate_up), shared.down.weight
        if gate is None:
            self._adapted(down, made, into, [SUM])
            return
        share, added = self._buffer("share", 1), self._buffer("shared", len(into))
        self.linear(gate, wide, share)
        self._steps.append(self._dnn.binary(MUL, share, _scalar(1), share, [eltwise(LOGISTIC)]))
        self._adapted(down, made, added)
        self._steps.append(self._dnn.binary(MUL, added, share, added))
        self._steps.append(self._dnn.binary(ADD, into, added, into))

    def previous(self) -> Rows:
        """Where the caller puts the hidden states before the step's tokens, [hidden, T]."""
        return self._buffer("previous", self._spec.hidden_size)

    def joined(self, x: Rows, norm: NamedSlot, previous_norm: NamedSlot) -> Rows:
        """x normed, and below it `previous` normed."""
        size = len(x)
        both = self._buffer("joined", 2 * size, self._compute)
        self.copy(self.norm(x, norm), both[:size])
        self.copy(self.norm(self.previous(), previous_norm), both[size:])
        return both

    def projected(self, y: Rows, linear: Linear[NamedSlot]) -> Rows:
        """linear(y) where the residual stream lies."""
        x = self._buffer("x", linear.weight.shape[0])
        self.linear(linear.weight, y, x)
        self.add_bias(x, linear.bias)
        return x

    def cap(self, x: Rows, most: float) -> None:
        """x = most * tanh(x / most), in place."""
        post = [eltwise(TANH), eltwise(LINEAR, most, 0.0)]
        self._steps.append(self._dnn.binary(MUL, x, _scalar(1 / most), x, post))

    def _norm_projected(self, rows: Rows, q_norm: NamedSlot, k_norm: NamedSlot) -> None:
        """q and k of rows [q + k + v, T] normed in place, over all heads of all ranks."""
        spec, (q, k) = self._spec, (q_norm.shape[0], k_norm.shape[0])
        parts = (rows[:q], q_norm, spec.heads), (rows[q : q + k], k_norm, spec.kv_heads * self._shard.sharers)
        scales = self._buffer("projected_scales", 2)
        for index, (x, _, heads) in enumerate(parts):
            squares = self._buffer("projected_squares", len(x))
            self._steps.append(self._dnn.binary(MUL, x, x, squares))
            mean = np.full((1, len(x)), 1 / (heads * spec.head_dim), np.float32)  # over ranks: see `Shard.sharers`
            self._steps.append(self._dnn.matmul(mean, squares, scales[index : index + 1]))
        if self._reduce is not None:
            self._steps.append(self._reduce(scales))
        post = [eltwise(LINEAR, 1.0, spec.eps), eltwise(POW, 1.0, -0.5)]
        self._steps.append(self._dnn.binary(MUL, scales, _scalar(1), scales, post))
        for index, (x, norm, _) in enumerate(parts):
            factors = self._weights.part(norm.name, (len(x), 1))
            self._steps.append(self._dnn.binary(MUL, x, factors, x, [combine(MUL, scales[index : index + 1])]))

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

    def logits(self, h: Rows, head: NamedSlot, bias: NamedSlot | None, cap: float) -> Rows:
        """head @ h + bias, each capped where cap is not 0, as [T, vocabulary]."""
        turned = self._token_major("logits_rows", head.shape[0])
        made = self._buffer("logits", head.shape[0])
        self.linear(head, h, made)
        self.add_bias(made, bias)
        if cap:
            self.cap(made, cap)
        self.copy(made.T, turned)
        return turned

    def _adapted(self, weight: NamedSlot, src: Rows, dst: Rows, post: Sequence[PostOp] = ()) -> None:
        """`linear`, and what adapters add to it."""
        self.linear(weight, src, dst, post)
        self._adapt(weight, src, dst)

    def _adapt(self, weight: NamedSlot, src: Rows, dst: Rows) -> None:
        """dst += what the adapters of the step's tokens make of src, beside `weight`'s product with it."""
        if self._adapters is not None:
            self._steps.append(self._adapters.step(weight.name, src, dst))

    def add_bias(self, x: Rows, bias: NamedSlot | None, start: int = 0, post: Sequence[PostOp] = ()) -> None:
        """x += the bias's elements from `start` on, in a pass of its own: a product cannot add one to a row."""
        if bias is not None:
            self._steps.append(self._dnn.binary(ADD, x, self._weights.part(bias.name, (len(x), 1), start), x, post))

    def _summed_adapted(self, weight: NamedSlot, y: Rows) -> Rows:
        """`_summed`, and what adapters add to it."""
        if self._sum_parts == 1:
            made = self._buffer("partial0", weight.shape[0])
            self._adapted(weight, y, made)
        else:
            made = self._summed(weight, y)
            self._adapt(weight, y, made)
        return made

    def _summed(self, weight: NamedSlot, y: Rows) -> Rows:
        """weight @ y, each half of `sum_parts` equal parts of the inputs by itself, then both added up."""
        (rows, inputs), step = weight.shape, weight.strides[0]
        width = inputs // self._sum_parts

        def of(first: int, end: int) -> Rows:
            if end - first == 1:
                made, at = self._buffer(f"partial{first}", rows), first * width
                part = self._weights.part(weight.name, (rows, width), weight.offset + at, (step, 1))
                self.linear(part, y[at : at + width], made)
                return made
            half = (first + end) // 2
            low, high = of(first, half), of(half, end)
            self._steps.append(self._dnn.binary(ADD, low, high, low))
            return low

        return of(0, self._sum_parts)

    def _add_reduced(self, x: Rows, partial: Rows) -> None:
        if self._reduce is not None:
            self._steps.append(self._reduce(partial))
        self._steps.append(self._dnn.binary(ADD, x, partial, x))

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

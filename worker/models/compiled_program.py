"""The program where a C compiler was found: two calls of ours between products instead of fifteen of oneDNN."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from worker.cpu.native import Native
from worker.cpu.onednn import SUM, PostOp
from worker.engine.base import Float32, ForwardBatch
from worker.models.decoder import Linear
from worker.models.kv_memory import KvMemory
from worker.models.low_rank import Adapted, NativeLowRank
from worker.models.many_product import ADD, GATED, GATED_GELU, MOST, SET, TURNED, ManyProduct, is_divided
from worker.models.native_attention import NativeAttention
from worker.models.onednn_program import Angles, Parts, Program, Rows
from worker.models.onednn_weights import NamedSlot

_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


class _Norm(ctypes.Structure):
    """`Norm` of columns.c."""

    _fields_ = [
        *((name, _Pointer) for name in ("x", "weight", "out")),
        *((name, _Int) for name in ("features", "columns", "narrow")),
        ("eps", ctypes.c_float),
        ("pad", ctypes.c_float),
        ("next_job", _Int),
    ]


class _Gate(ctypes.Structure):
    """`Gate` of columns.c."""

    _fields_ = [
        *((name, _Pointer) for name in ("gate_up", "bias", "out")),
        *((name, _Int) for name in ("features", "columns", "narrow", "gelu", "next_job")),
    ]


def gating(
    native: Native, gate_up: Float32, into: Rows, bias: Callable[[], int], *, gelu: bool = False
) -> Callable[[], None]:
    """The step that makes activation(gate) * up [inner, T] of gate_up [2 * inner, T]. bias: says where it lies, 0 =
    there is none.
    """
    call = _Gate(
        gate_up=gate_up.ctypes.data,
        out=into.ctypes.data,
        features=len(into),
        columns=into.shape[1],
        narrow=into.dtype == np.uint16,
        gelu=gelu,
    )
    run, kernel, address = native.run, native.address("gate_columns"), ctypes.addressof(call)

    def step() -> None:
        call.bias, call.next_job = bias(), 0
        run(kernel, address)

    return step


class CompiledProgram(Program):
    """`Program` of 1 token or a multiple of 16; head_dim is a multiple of 16."""

    def __init__(
        self,
        parts: Parts,
        tokens: int,
        native: Native,
        attend: NativeAttention,
        part_of: Callable[[NamedSlot], int | None],
    ) -> None:
        super().__init__(parts, tokens)
        assert native.number("norm_bytes") == ctypes.sizeof(_Norm)
        assert native.number("gate_bytes") == ctypes.sizeof(_Gate)
        self._native, self._attend, self._part_of_many = native, attend, part_of
        self._last: Adapted | None = None  # of what adapters add, recorded so far

    def linear(self, weight: NamedSlot, src: Rows, dst: Rows, post: Sequence[PostOp] = ()) -> None:
        """dst = weight @ src, or added to it, by many.c where it can."""
        mode = ADD if list(post) == [SUM] else SET
        if (post and mode == SET) or not self._many(mode, weight, None, src, dst):
            super().linear(weight, src, dst, post)

    def logits(self, h: Rows, head: NamedSlot, bias: NamedSlot | None, cap: float) -> Rows:
        """Turned over as they are made."""
        turned = self._token_major("logits_rows", head.shape[0])
        if not self._many(TURNED, head, bias, h, turned):
            return super().logits(h, head, bias, cap)
        if cap:
            self.cap(turned, cap)
        return turned

    def _adapted(self, weight: NamedSlot, src: Rows, dst: Rows, post: Sequence[PostOp] = ()) -> None:
        """By many.c, both in one, where it can."""
        mode = ADD if list(post) == [SUM] else SET
        if (post and mode == SET) or not self._many(mode, weight, None, src, dst, adapted=True):
            super()._adapted(weight, src, dst, post)

    def _many(
        self, mode: int, weight: NamedSlot, bias: NamedSlot | None, src: Rows, dst: Rows, *, adapted: bool = False
    ) -> bool:
        """Record a product of many.c's; whether it has one: not of a part of each token's inputs (`_summed`).

        adapted: with what adapters add, where the program has any.
        """
        part = self._part_of_many(weight) if 16 <= self._tokens <= MOST else None
        if part is None or not (src.flags.c_contiguous or src.T.flags.c_contiguous):
            return False
        adds: Adapted | None = None
        if adapted and self._adapters is not None:
            assert isinstance(self._adapters, NativeLowRank)
            if not is_divided(self._native, self._adapters.rows(weight.name)):
                return False
            adds = self._adapters.adapted(weight.name, src, dst)
            if self._last is not None:
                self._last.before(adds)
            self._last = adds
        words = (self._native, mode, weight, bias, part, src, dst)
        self._steps.append(ManyProduct(*words, lambda rows: self._buffer("product", rows), adds))
        return True

    def begin(self, batch: ForwardBatch, kv: KvMemory, angles: Sequence[Angles]) -> None:
        """Set what differs from step to step: angles of the positions, indices into the cache."""
        padded = [(self._table(f"cos {i}", cos), self._table(f"sin {i}", sin)) for i, (cos, sin) in enumerate(angles)]
        queries = self._token_major("queries", self._shard.heads * self._spec.head_dim)
        out = self._attended()
        self._attend.begin(batch, kv, self._qkv(), padded, queries, out, hide_first=self._hide_first)

    def _table(self, name: str, values: Float32) -> Float32:
        table = self._buffer(name, len(values))
        table[:, : values.shape[1]] = values
        return table

    def _normed(self, x: Rows, weight: NamedSlot, into: Rows) -> Rows:
        call = _Norm(
            x=x.ctypes.data,
            out=into.ctypes.data,
            features=len(x),
            columns=self._tokens,
            narrow=into.dtype == np.uint16,
            eps=self._spec.eps,
        )
        run, kernel, address = self._native.run, self._native.address("norm_columns"), ctypes.addressof(call)

        def step() -> None:
            call.weight, call.next_job = weight.address, 0  # the weight's place changes when others are bound
            run(kernel, address)

        self._steps.append(step)
        return into

    def gated(self, h: Rows, gate_up: Linear[NamedSlot]) -> Rows:
        """activation(gate) * up, from one product; by many.c where it can."""
        both, gelu = gate_up.weight.shape[0], self._spec.activation == "gelu_tanh"
        made = self._buffer("gated", both // 2, self._compute)
        mode = GATED_GELU if gelu else GATED
        if self._many(mode, gate_up.weight, gate_up.bias, h, made, adapted=True):
            return made
        products = self._buffer("gate_up", both)
        self._adapted(gate_up.weight, h, products)
        bias = gate_up.bias
        self._steps.append(gating(self._native, products, made, lambda: bias.address if bias else 0, gelu=gelu))
        return made

    def attention(
        self, layer: int, h: Rows, qkv: Linear[NamedSlot], q_norm: NamedSlot | None, k_norm: NamedSlot | None
    ) -> Rows:
        """Everything after the projection is the kernel's, bias and norms of heads included."""
        rows, bias = self._qkv(), qkv.bias
        self._adapted(qkv.weight, h, rows)
        if self._spec.qk_norm == "whole" and q_norm is not None and k_norm is not None:
            self.add_bias(rows, bias)
            self._norm_projected(rows, q_norm, k_norm)
            bias = q_norm = k_norm = None
        self._steps.append(self._attend.step(layer, bias, q_norm, k_norm))
        return self._attended().T

    def _qkv(self) -> Float32:
        return self._buffer("qkv", (self._shard.heads + 2 * self._shard.kv_heads) * self._spec.head_dim)

    def _attended(self) -> Rows:
        return self._token_major("attended", self._shard.heads * self._spec.head_dim, self._weights.matrix_dtype)

"""The program where a C compiler was found: two calls of ours between products instead of fifteen of oneDNN."""

import ctypes

import numpy as np

from worker.cpu.native import Native
from worker.engine.base import Float32, ForwardBatch
from worker.models.kv_memory import KvMemory
from worker.models.native_attention import NativeAttention
from worker.models.onednn_program import Parts, Program, Rows
from worker.models.onednn_weights import NamedSlot
from worker.models.weights import Linear

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
        *((name, _Int) for name in ("features", "columns", "narrow", "next_job")),
    ]


class CompiledProgram(Program):
    """`Program` of 1 token or a multiple of 16; head_dim is a multiple of 16."""

    def __init__(self, parts: Parts, tokens: int, native: Native, attend: NativeAttention) -> None:
        super().__init__(parts, tokens)
        assert native.number("norm_bytes") == ctypes.sizeof(_Norm)
        assert native.number("gate_bytes") == ctypes.sizeof(_Gate)
        self._native, self._attend = native, attend

    def begin(self, batch: ForwardBatch, kv: KvMemory, cos: Float32, sin: Float32) -> None:
        """Angles and indices."""
        tables = [self._buffer(name, len(cos)) for name in ("cos", "sin")]
        for table, values in zip(tables, (cos, sin), strict=True):
            table[:, : cos.shape[1]] = values
        queries = self._token_major("queries", self._shard.heads * self._spec.head_dim)
        angles, out = (tables[0], tables[1]), self._attended()
        self._attend.begin(batch, kv, self._qkv(), angles, queries, out, hide_first=self._hide_first)

    def norm(self, x: Rows, weight: NamedSlot) -> Rows:
        """RMS norm of every column, in the compute dtype."""
        return self._normed(x, weight, self._buffer("h", len(x), self._compute))

    def _normed(self, x: Rows, weight: NamedSlot, h: Rows) -> Rows:
        call = _Norm(
            x=x.ctypes.data,
            out=h.ctypes.data,
            features=len(x),
            columns=self._tokens,
            narrow=h.dtype == np.uint16,
            eps=self._spec.eps,
        )
        run, kernel, address = self._native.run, self._native.address("norm_columns"), ctypes.addressof(call)

        def step() -> None:
            call.weight, call.next_job = weight.address, 0  # the weight's place changes when others are bound
            run(kernel, address)

        self._steps.append(step)
        return h

    def gated(self, h: Rows, gate_up: Linear[NamedSlot]) -> Rows:
        """silu(gate) * up, from one product."""
        both = gate_up.weight.shape[0]
        products, made = self._buffer("gate_up", both), self._buffer("gated", both // 2, self._compute)
        self.linear(gate_up.weight, h, products)
        self._adapt(gate_up.weight, h, products)
        call = _Gate(
            gate_up=products.ctypes.data,
            out=made.ctypes.data,
            features=both // 2,
            columns=self._tokens,
            narrow=self._compute == np.uint16,
        )
        run, kernel, address = self._native.run, self._native.address("gate_columns"), ctypes.addressof(call)

        def step() -> None:
            call.bias, call.next_job = gate_up.bias and gate_up.bias.address, 0
            run(kernel, address)

        self._steps.append(step)
        return made

    def attention(
        self, layer: int, h: Rows, qkv: Linear[NamedSlot], q_norm: NamedSlot | None, k_norm: NamedSlot | None
    ) -> Rows:
        """Everything after the projection is the kernel's, bias and head norms included."""
        self.linear(qkv.weight, h, self._qkv())
        self._adapt(qkv.weight, h, self._qkv())
        self._steps.append(self._attend.step(layer, qkv.bias, q_norm, k_norm))
        return self._attended().T

    def _qkv(self) -> Float32:
        return self._buffer("qkv", (self._shard.heads + 2 * self._shard.kv_heads) * self._spec.head_dim)

    def _attended(self) -> Rows:
        return self._token_major("attended", self._shard.heads * self._spec.head_dim, self._weights.matrix_dtype)

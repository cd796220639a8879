"""The program of a step of few tokens: compiled products that read each weight once at the memory's speed."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from weight_manager.families.spec import DecoderSpec
from worker.cpu.native import Native
from worker.cpu.onednn import SUM, PostOp
from worker.models.compiled_program import CompiledProgram
from worker.models.native_attention import NativeAttention
from worker.models.onednn_program import Parts, Rows
from worker.models.onednn_weights import NamedSlot
from worker.models.shard import Shard
from worker.models.weights import Linear

MOST = 8
"""Tokens; more are as fast through oneDNN's products."""
_SET, _ADD, _GATED = 0, 1, 2
_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


class _Single(ctypes.Structure):
    """`Single` of single.c."""

    _fields_ = [
        *((name, _Pointer) for name in ("weights", "bias", "norm", "x", "y")),
        *((name, _Int) for name in ("rows", "columns", "narrow", "x_narrow", "mode", "tokens")),
        *((name, _Int) for name in ("x_step", "x_token", "y_step", "y_token")),
        ("eps", ctypes.c_float),
        ("pad", ctypes.c_float),
        ("scratch", _Pointer),
        *((name, _Int) for name in ("next_run", "next_thread")),
    ]


def fits(spec: DecoderSpec, shard: Shard) -> bool:
    """Whether every product of this decoder is one that the kernel computes."""
    inner = {shape[1] for name, shape in shard.shapes.items() if name.endswith("down_proj.weight")}
    widths = {spec.hidden_size, shard.heads * spec.head_dim, *inner}
    return not any(spec.moe) and not any(width % 16 for width in widths)


class SingleProgram(CompiledProgram):
    """`Program` for `count` tokens: the one of 1 column, or up to MOST of 16, where the others are not computed.

    Activations stay float32; RMS norms are done by their readers.
    """

    def __init__(self, parts: Parts, columns: int, native: Native, attend: NativeAttention) -> None:
        super().__init__(parts, columns, native, attend)
        self.count = 1
        assert native.number("single_bytes") == ctypes.sizeof(_Single)
        self._compute = np.dtype(np.float32)
        self._to_norm: dict[int, tuple[Rows, NamedSlot]] = {}
        self._written: dict[int, Rows] = {}  # what stands for x normed, where somebody else than a product reads it

    def norm(self, x: Rows, weight: NamedSlot) -> Rows:
        """A name for x normed: what is given here to a product is normed there."""
        h = np.empty_like(x)
        self._to_norm[id(h)] = x, weight
        self._steps.append(lambda: h is None)  # keeps the name alive, and so its id
        if self._adapters is not None:
            self._written[id(h)] = self._normed(x, weight, self._buffer("h", len(x), self._weights.matrix_dtype))
        return h

    def linear(self, weight: NamedSlot, src: Rows, dst: Rows, post: Sequence[PostOp] = ()) -> None:
        """dst = weight @ src, or added to it."""
        assert not post or list(post) == [SUM]
        self._product(_ADD if post else _SET, weight, None, src, dst)

    def gated(self, h: Rows, gate_up: Linear[NamedSlot]) -> Rows:
        """silu(gate) * up."""
        if self._adapters is not None:
            return self._gated_apart(h, gate_up)
        made = self._buffer("gated", gate_up.weight.shape[0] // 2)
        self._product(_GATED, gate_up.weight, gate_up.bias, h, made)
        return made

    def _adapt(self, weight: NamedSlot, src: Rows, dst: Rows) -> None:
        super()._adapt(weight, self._written.get(id(src), src), dst)

    def _product(self, mode: int, weight: NamedSlot, bias: NamedSlot | None, src: Rows, dst: Rows) -> None:
        x, norm = self._to_norm.get(id(src), (src, None))
        columns = weight.shape[1]
        scratch = np.empty(columns * MOST * self._native.threads, np.float32)
        (x_step, x_token), (y_step, y_token) = _steps(x), _steps(dst)
        if self._tokens == 1:
            x_step, y_step = 1, 1
        call = _Single(
            x=x.ctypes.data,
            y=dst.ctypes.data,
            rows=len(dst),
            columns=columns,
            narrow=weight.dtype == np.uint16,
            x_narrow=x.dtype == np.uint16,
            mode=mode,
            x_step=x_step,
            x_token=x_token,
            y_step=y_step,
            y_token=y_token,
            eps=self._spec.eps,
            scratch=scratch.ctypes.data,
        )
        self._steps.append(self._run(call, weight, bias, norm, (x, dst, scratch)))

    def _run(
        self, call: _Single, weight: NamedSlot, bias: NamedSlot | None, norm: NamedSlot | None, kept: object
    ) -> Callable[[], None]:
        run, kernel, address = self._native.run, self._native.address("single"), ctypes.addressof(call)

        def step(_: object = kept) -> None:
            # Where the weights lie changes when others are bound.
            call.weights = weight.address
            if bias is not None:
                call.bias = bias.address
            if norm is not None:
                call.norm = norm.address
            call.next_run = call.next_thread = 0
            call.tokens = self.count
            run(kernel, address)

        return step


def _steps(array: Rows) -> list[int]:
    """Elements from one to the next along each axis."""
    return [stride // array.itemsize for stride in array.strides]

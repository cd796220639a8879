"""The oneDNN in Paddle's wheel, called through its C API on numpy buffers. This module owns the binding.

Why not Paddle's own kernels: they have no bfloat16 matmul on a CPU, they cannot read a weight as it lies in
a slot in every shape at full speed, and a call costs 5 to 10 times as much. Here a computation is made once
for its shapes and buffers (`matmul`, `binary`, ... return a `Call`) and then run many times at about 1 us.

Operands are numpy arrays, float32 or uint16 (bfloat16 bits), with any strides; a `Slot` is an operand whose
memory is given later and may be moved between runs. Enum values below are fixed by oneDNN's ABI (v3).
"""

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Call = partial[int]
"""Runs one prepared primitive. Returns 0, or oneDNN's status when it failed."""

ADD, MUL, SUB = 0x1FFF0, 0x1FFF1, 0x1FFF5
TANH, LINEAR, LOGISTIC, GELU_TANH, SWISH, POW = 0x21, 0x26, 0x29, 0x2B, 0x2C, 0x30
_TYPES = {np.dtype(np.float32): 3, np.dtype(np.uint16): 2}
_SRC, _SRC_1, _DST, _WEIGHTS, _POST_OP = 1, 2, 17, 33, 32768
_INFERENCE, _SOFTMAX, _IMPLEMENTATION = 96, 0x30000, 8
_CACHED = 1024
"""Primitives kept for shapes seen before; one is some tens of KiB of generated code."""
_STATUS = {1: "out of memory", 2: "invalid arguments", 3: "unimplemented", 4: "no implementation", 5: "runtime error"}


class OneDnnError(RuntimeError):
    """A call was refused; the message has the function and the reason."""


class Slot:
    """An operand that is pointed at its memory later. strides: in elements, C order when not given."""

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike, strides: Sequence[int] | None = None) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.strides = _c_strides(self.shape) if strides is None else tuple(strides)
        self.memory: _Handle | None = None


Operand = Array | Slot


@dataclass(frozen=True)
class PostOp:
    """Done to a result before it is stored: add to what is there, an element-wise function, or an array.

    kind: "sum", an element-wise algorithm with (alpha, beta), or a binary one with `other`, which may be
    broadcast along axes of length 1.
    """

    kind: str
    algorithm: int = 0
    alpha: float = 0.0
    beta: float = 0.0
    other: Operand | None = None


SUM = PostOp("sum")


def eltwise(algorithm: int, alpha: float = 1.0, beta: float = 0.0) -> PostOp:
    """LINEAR: alpha * x + beta. SWISH: x * sigmoid(alpha * x). POW: alpha * x ** beta. LOGISTIC: sigmoid(x)."""
    return PostOp("eltwise", algorithm, alpha, beta)


def combine(algorithm: int, other: Operand) -> PostOp:
    """ADD, MUL or SUB with another operand."""
    return PostOp("binary", algorithm, other=other)


def library_path() -> Path | None:
    """Where Paddle's wheel keeps oneDNN; None when this build has none (not x86, for one)."""
    import paddle  # noqa: PLC0415  its OpenMP must be loaded before oneDNN: two pools would fight for the cores

    path = Path(paddle.__file__).parent / "libs" / "libdnnl.so.3"
    return path if path.is_file() else None


@lru_cache(maxsize=1)
def load() -> "OneDnn":
    """The one binding of this process. Raises OSError when the library is not there."""
    path = library_path()
    if path is None:
        raise OSError("this build of Paddle comes without oneDNN")
    return OneDnn(path)


class OneDnn:
    """Engine, stream and caches. Not thread-safe: one thread computes."""

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._engine, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("engine_create", ctypes.byref(self._engine), 1, ctypes.c_size_t(0))
        self._check("stream_create", ctypes.byref(self._stream), self._engine, 1)
        self._execute = self._lib.dnnl_primitive_execute
        self._execute.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        self._set_handle = self._lib.dnnl_memory_set_data_handle
        self._set_handle.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._descriptors: dict[Any, ctypes.c_void_p] = {}
        self._primitives: OrderedDict[Any, _Handle] = OrderedDict()

    def point(self, slot: Slot, address: int) -> None:
        """Give a slot its memory."""
        self._set_handle(self._memory(slot).value, address)

    def matmul(self, src: Operand, weights: Operand, dst: Operand, post: Sequence[PostOp] = ()) -> Call:
        """dst = src @ weights; 2-D, or more with equal leading axes (1 is broadcast)."""
        operands = {_SRC: src, _WEIGHTS: weights, _DST: dst}
        return self._call("matmul", operands, post, lambda md: (md[_SRC], md[_WEIGHTS], None, md[_DST]))

    def inner_product(self, src: Operand, weights: Operand, dst: Operand, post: Sequence[PostOp] = ()) -> Call:
        """dst [m, n] = src [m, k] @ weights [n, k] transposed: the fastest form for a single row."""
        operands = {_SRC: src, _WEIGHTS: weights, _DST: dst}
        return self._call(
            "inner_product_forward", operands, post, lambda md: (_INFERENCE, md[_SRC], md[_WEIGHTS], None, md[_DST])
        )

    def binary(self, algorithm: int, a: Operand, b: Operand, dst: Operand, post: Sequence[PostOp] = ()) -> Call:
        """dst = a (op) b; b may be broadcast along axes of length 1."""
        operands = {_SRC: a, _SRC_1: b, _DST: dst}
        return self._call(
            "binary", operands, post, lambda md: (algorithm, md[_SRC], md[_SRC_1], md[_DST]), (algorithm,)
        )

    def softmax(self, src: Operand, dst: Operand) -> Call:
        """Softmax of src into dst, over the last axis."""
        axis = len(src.shape) - 1
        operands = {_SRC: src, _DST: dst}
        return self._call("softmax_forward", operands, (), lambda md: (_INFERENCE, _SOFTMAX, md[_SRC], md[_DST], axis))

    def copy(self, src: Operand, dst: Operand) -> Call:
        """dst = src: transposes by strides, casts by dtype."""
        operands = {_SRC: src, _DST: dst}
        return self._call("reorder", operands, (), lambda md: (md[_SRC], self._engine, md[_DST], self._engine))

    def _call(
        self,
        name: str,
        operands: dict[int, Operand],
        post: Sequence[PostOp],
        arguments: Callable[[dict[int, ctypes.c_void_p]], tuple[Any, ...]],
        extra: tuple[int, ...] = (),
    ) -> Call:
        """arguments: descriptors by argument number -> what the descriptor's constructor takes after the engine."""
        others = {_POST_OP * (i + 1) | _SRC_1: op.other for i, op in enumerate(post) if op.other is not None}
        operands = operands | others
        layouts = {number: _layout(operand) for number, operand in operands.items()}
        ops = tuple((op.kind, op.algorithm, op.alpha, op.beta) for op in post)
        key = (name, extra, tuple(layouts.items()), ops)
        if key in self._primitives:
            self._primitives.move_to_end(key)
        else:
            descriptors = {number: self._descriptor(layout) for number, layout in layouts.items()}
            self._primitives[key] = self._create(name, arguments(descriptors), self._attributes(post))
            if len(self._primitives) > _CACHED:
                self._primitives.popitem(last=False)  # a call that still uses it keeps it alive
        primitive = self._primitives[key]
        memories = {number: self._memory(operand) for number, operand in operands.items()}
        array = (_Argument * len(operands))(*(_Argument(number, m.value) for number, m in memories.items()))
        call = partial(self._execute, primitive.value, self._stream.value, len(array), ctypes.addressof(array))
        call.kept = (primitive, array, memories, operands)  # type: ignore[attr-defined]  # what the call points at
        return call

    def implementation(self, call: Call) -> str:
        """oneDNN's name for the kernel behind a call; "ref" in it means a slow fallback."""
        return str(call.kept[0].name)  # type: ignore[attr-defined]

    def _create(self, name: str, arguments: tuple[Any, ...], attributes: ctypes.c_void_p) -> "_Handle":
        descriptor, primitive, implementation = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_char_p()
        engine = () if name == "reorder" else (self._engine,)
        try:
            self._check(f"{name}_primitive_desc_create", ctypes.byref(descriptor), *engine, *arguments, attributes)
            self._check("primitive_create", ctypes.byref(primitive), descriptor)
            self._check("primitive_desc_query", descriptor, _IMPLEMENTATION, 0, ctypes.byref(implementation))
            return _Handle(primitive, self._lib.dnnl_primitive_destroy, (implementation.value or b"").decode())
        finally:
            self._lib.dnnl_primitive_desc_destroy(descriptor)
            self._lib.dnnl_primitive_attr_destroy(attributes)

    def _attributes(self, post: Sequence[PostOp]) -> ctypes.c_void_p:
        attributes, ops = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("primitive_attr_create", ctypes.byref(attributes))
        if post:
            self._check("post_ops_create", ctypes.byref(ops))
            for op in post:
                if op.kind == "sum":
                    self._check("post_ops_append_sum", ops, ctypes.c_float(1.0), ctypes.c_int32(0), ctypes.c_int(0))
                elif op.kind == "eltwise":
                    scale = ctypes.c_float(op.alpha), ctypes.c_float(op.beta)
                    self._check("post_ops_append_eltwise", ops, op.algorithm, *scale)
                else:
                    assert op.other is not None
                    other = self._descriptor(_layout(op.other))
                    self._check("post_ops_append_binary", ops, op.algorithm, other)
            self._check("primitive_attr_set_post_ops", attributes, ops)
            self._lib.dnnl_post_ops_destroy(ops)
        return attributes

    def _descriptor(self, layout: tuple[tuple[int, ...], tuple[int, ...], int]) -> ctypes.c_void_p:
        if layout not in self._descriptors:
            shape, strides, dtype = layout
            dims = ctypes.c_int64 * len(shape)
            made = ctypes.c_void_p()
            self._check(
                "memory_desc_create_with_strides", ctypes.byref(made), len(shape), dims(*shape), dtype, dims(*strides)
            )
            self._descriptors[layout] = made
        return self._descriptors[layout]

    def _memory(self, operand: Operand) -> "_Handle":
        if isinstance(operand, Slot):
            if operand.memory is None:
                operand.memory = self._new_memory(operand, None)
            return operand.memory
        return self._new_memory(operand, operand.ctypes.data)

    def _new_memory(self, operand: Operand, address: int | None) -> "_Handle":
        made = ctypes.c_void_p()
        descriptor = self._descriptor(_layout(operand))
        self._check("memory_create", ctypes.byref(made), descriptor, self._engine, ctypes.c_void_p(address))
        return _Handle(made, self._lib.dnnl_memory_destroy)

    def _check(self, function: str, *arguments: Any) -> None:
        status = getattr(self._lib, f"dnnl_{function}")(*arguments)
        if status:
            raise OneDnnError(f"dnnl_{function}: {_STATUS.get(status, status)}")


class _Argument(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int), ("memory", ctypes.c_void_p)]


class _Handle:
    """A oneDNN object, destroyed when nothing refers to it any more."""

    def __init__(self, made: ctypes.c_void_p, destroy: Callable[[ctypes.c_void_p], int], name: str = "") -> None:
        self.value, self.name = made.value, name
        self._made, self._destroy = made, destroy

    def __del__(self) -> None:
        self._destroy(self._made)


def _layout(operand: Operand) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    if isinstance(operand, Slot):
        return operand.shape, operand.strides, _TYPES[operand.dtype]
    size = operand.itemsize
    return operand.shape, tuple(s // size for s in operand.strides), _TYPES[operand.dtype]


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))

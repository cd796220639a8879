"""A weight times the activations of 16 to 64 tokens, by many.c: in less time than oneDNN takes, with its bits where its
order of sums is known.
"""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from worker.cpu.native import Native
from worker.models.low_rank import Adapted
from worker.models.onednn_weights import NamedSlot

MOST = 64
"""Tokens; more are as fast through oneDNN's products."""
SET, ADD, GATED, GATED_GELU, TURNED = 0, 1, 2, 3, 4
_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p
Rows = npt.NDArray[np.generic]


class _Many(ctypes.Structure):
    """`Many` of many.c."""

    _fields_ = [
        *((name, _Pointer) for name in ("weights", "bias", "x", "y")),
        *((name, _Int) for name in ("rows", "columns", "narrow", "token_major", "mode", "row_step")),
        *((name, _Int) for name in ("part", "tokens", "threads")),
        ("scratch", _Pointer),
        ("adapted", _Pointer),
        *((name, _Int) for name in ("next_claim", "next_thread")),
    ]


def is_fast(native: Native, weight: NamedSlot) -> bool:
    """Whether this processor has the instructions for such a weight, and its shape is one that many.c takes."""
    there = native.number("many_narrow" if weight.dtype == np.uint16 else "many_wide")
    rows, columns = weight.shape
    return bool(there) and rows >= native.number("many_least") and columns % 16 == 0


def is_divided(native: Native, parts: Sequence[int]) -> bool:
    """Whether the kernel adds what adapters change of parts of so many rows, which lie one below the other."""
    return min(parts) >= native.number("many_least")


class ManyProduct:
    """The step of a program that makes dst of weight @ src: dst = or +=, gated or turned over, by `mode`.

    src: [columns, T], or the transposed view of [T, columns], in the weight's dtype. dst: [rows, T] float32; GATED: in
    the weight's dtype; TURNED: [T, rows]. T: a multiple of 16, MOST at the most. part: columns that are added up before
    their sum is added to the others'. scratch: given a number of rows, [rows, T] that
    nobody else uses while this runs. adapted: what adapters add, before a bias; not TURNED, and see `is_divided`.
    """

    def __init__(
        self,
        native: Native,
        mode: int,
        weight: NamedSlot,
        bias: NamedSlot | None,
        part: int,
        src: Rows,
        dst: Rows,
        scratch: Callable[[int], npt.NDArray[np.float32]],
        adapted: Adapted | None = None,
    ) -> None:
        assert native.number("many_bytes") == ctypes.sizeof(_Many)
        columns, tokens = src.shape
        assert tokens in range(16, MOST + 1, 16)
        assert src.dtype == weight.dtype
        assert dst.flags.c_contiguous
        token_major = not src.flags.c_contiguous
        assert not token_major or src.T.flags.c_contiguous
        memory = scratch((columns + native.number("many_scratch")) * native.threads)
        self._call = _Many(
            x=src.ctypes.data,
            y=dst.ctypes.data,
            rows=dst.shape[1] if mode == TURNED else len(dst),
            columns=columns,
            narrow=weight.dtype == np.uint16,
            token_major=token_major,
            mode=mode,
            row_step=weight.strides[0],
            part=part,
            tokens=tokens,
            threads=native.threads,
            scratch=memory.ctypes.data,
        )
        self._kept = src, dst, memory  # the kernel has only their addresses
        self._weight, self._bias, self._adapted = weight, bias, adapted
        self._start, self._kernel, self._address = native.run, native.address("many"), ctypes.addressof(self._call)

    def __call__(self) -> None:
        """Run it."""
        call = self._call
        call.weights, call.bias = self._weight.address, self._bias.address if self._bias else 0
        call.next_claim = call.next_thread = 0
        if self._adapted is not None:
            call.adapted = self._adapted.begun()
        self._start(self._kernel, self._address)

"""A weight times the activations of a few tokens, by single.c; and the order in which it adds up: oneDNN's.

A token's bits must not show how many others were in its step. oneDNN's product of many tokens adds up along the
weight's columns, in parts, whatever the number of tokens. How long a part is it does not say, so it is asked by
example: our product is given the parts that make its result oneDNN's to the bit.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from worker.cpu.native import Native
from worker.cpu.onednn import OneDnn
from worker.models.onednn_weights import NamedSlot

MOST = 8
"""Most tokens that the kernel takes; more are as fast through oneDNN's products."""
SET, ADD, GATED, GATED_GELU = 0, 1, 2, 3
_PARTS = (1024, 512, 2048, 256, 384, 768, 64, 128, 192, 320, 448)
"""Columns, the likeliest first; a whole row is tried before all."""
_TRIED_ROWS, _TRIED_TOKENS = 512, (16, 64, 320)
_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p
Rows = npt.NDArray[np.generic]


class _Single(ctypes.Structure):
    """`Single` of single.c."""

    _fields_ = [
        *((name, _Pointer) for name in ("weights", "bias", "norm", "x", "y")),
        *((name, _Int) for name in ("rows", "columns", "narrow", "x_narrow", "mode", "row_step", "part", "tokens")),
        *((name, _Int) for name in ("x_step", "x_token", "y_step", "y_token")),
        ("eps", ctypes.c_float),
        ("pad", ctypes.c_float),
        ("scratch", _Pointer),
        *((name, _Int) for name in ("next_run", "next_thread")),
    ]


class FewProduct:
    """dst [rows, T] = (or +=, or gated, by `mode`) weight [rows, columns] @ src [columns, T], for up to MOST tokens.

    row_step: elements between two of the weight's rows. narrow: the weight is bfloat16; src is float32, or bfloat16
    beside such a weight. part: columns that are added up before their sum is added to the others'. src is RMS-normed
    first when `run` is given a norm.
    """

    def __init__(
        self,
        native: Native,
        mode: int,
        columns: int,
        part: int,
        src: Rows,
        dst: Rows,
        *,
        narrow: bool,
        row_step: int | None = None,
        eps: float = 0,
    ) -> None:
        assert native.number("single_bytes") == ctypes.sizeof(_Single)
        scratch = np.empty(columns * MOST * native.threads, np.float32)
        (x_step, x_token), (y_step, y_token) = _steps(src), _steps(dst)
        if dst.shape[1] == 1:
            x_step, y_step = 1, 1
        self._call = _Single(
            x=src.ctypes.data,
            y=dst.ctypes.data,
            rows=len(dst),
            columns=columns,
            narrow=narrow,
            x_narrow=src.dtype == np.uint16,
            mode=mode,
            row_step=columns if row_step is None else row_step,
            part=part,
            x_step=x_step,
            x_token=x_token,
            y_step=y_step,
            y_token=y_token,
            eps=eps,
            scratch=scratch.ctypes.data,
        )
        self._kept = src, dst, scratch  # the kernel has only their addresses
        self._start, self._kernel = native.run, native.address("single")
        self._address = ctypes.addressof(self._call)

    def run(self, tokens: int, weight: int, bias: int = 0, norm: int = 0) -> None:
        """The last three: addresses; 0 = none."""
        call = self._call
        call.tokens, call.weights, call.bias, call.norm = tokens, weight, bias, norm
        call.next_run = call.next_thread = 0
        self._start(self._kernel, self._address)


def recorded(
    product: FewProduct, count: Callable[[], int], weight: NamedSlot, bias: NamedSlot | None, norm: NamedSlot | None
) -> Callable[[], None]:
    """The step of a program that runs it. count: says of how many tokens."""

    def step() -> None:
        # Where the weights lie changes when others are bound.
        product.run(count(), weight.address, bias.address if bias else 0, norm.address if norm else 0)

    return step


@lru_cache(maxsize=256)
def part_of_onednn(native: Native, dnn: OneDnn, rows: int, columns: int, *, narrow: bool) -> int | None:
    """Columns in a part of oneDNN's product with a weight [rows, columns]; None when ours has not its bits in any."""
    rng = np.random.default_rng(columns)
    weight, x = (
        _numbers(rng, shape, narrow=narrow)
        for shape in ((min(rows, _TRIED_ROWS), columns), (columns, max(_TRIED_TOKENS)))
    )
    expected = [_by_onednn(dnn, weight, np.ascontiguousarray(x[:, :tokens])) for tokens in _TRIED_TOKENS]
    if any((other != expected[0]).any() for other in expected):
        return None
    tokens = np.ascontiguousarray(x[:, :MOST].T).T
    found = np.zeros((len(weight), MOST), np.float32)
    for part in (columns, *(size for size in _PARTS if size < columns)):
        FewProduct(native, SET, columns, part, tokens, found, narrow=narrow).run(MOST, weight.ctypes.data)
        if (found.view(np.uint32) == expected[0]).all():
            return part
    return None


def _by_onednn(dnn: OneDnn, weight: Rows, x: Rows) -> npt.NDArray[np.uint32]:
    """Bits of the results of the first MOST tokens, as oneDNN computes them among many."""
    made = np.zeros((len(weight), x.shape[1]), np.float32)
    if dnn.matmul(weight, x, made)():
        raise RuntimeError("a oneDNN primitive failed")
    return np.ascontiguousarray(made[:, :MOST]).view(np.uint32)


def _numbers(rng: np.random.Generator, shape: tuple[int, int], *, narrow: bool) -> Rows:
    numbers = rng.standard_normal(shape, np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16) if narrow else numbers


def _steps(array: Rows) -> list[int]:
    """Elements from one to the next along each axis."""
    return [stride // array.itemsize for stride in array.strides]

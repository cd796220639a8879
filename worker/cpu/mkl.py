"""Batched float32 products of scattered matrices through the MKL in Paddle's wheel: paged attention's work.

oneDNN's batched matmul wants one stride between the matrices of a batch; KV blocks lie anywhere. MKL's
``cblas_sgemm_batch`` takes an address for each matrix, so blocks are read where they are.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.int64]
_ROW_MAJOR, _AS_IS, _TRANSPOSED = 101, 111, 112


@dataclass(frozen=True)
class Product:
    """`count` products c [m, n] = alpha * a [m, k] @ b, (+ c), of one size.

    b: [k, n], or [n, k] when transposed. lda, ldb, ldc: elements between rows.
    """

    count: int
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldc: int


@lru_cache(maxsize=1)
def load() -> "Mkl":
    """The one binding of this process. Raises OSError when this build of Paddle comes without MKL."""
    import paddle  # noqa: PLC0415  loads MKL and its OpenMP

    return Mkl(Path(paddle.__file__).parent / "libs" / "libmklml_intel.so")


class Mkl:
    """MKL's C interface."""

    def __init__(self, path: Path) -> None:
        self._batch: Any = ctypes.CDLL(str(path)).cblas_sgemm_batch

    def products(
        self,
        groups: Sequence[Product],
        a: Addresses,
        b: Addresses,
        c: Addresses,
        *,
        transposed: bool = False,
        alpha: float = 1.0,
        accumulate: bool = False,
    ) -> Callable[[], None]:
        """All groups in one call, to be run any number of times. a, b, c: one address per product, group by group.

        The address arrays are read at every run, so they may be changed in place in between.
        """
        size = len(groups)
        ints, floats = ctypes.c_int * size, ctypes.c_float * size
        fields = zip(*((g.m, g.n, g.k, g.lda, g.ldb, g.ldc, g.count) for g in groups), strict=True)
        m, n, k, lda, ldb, ldc, count = (ints(*values) for values in fields)
        plain, other = ints(*[_AS_IS] * size), ints(*[_TRANSPOSED if transposed else _AS_IS] * size)
        alphas, betas = floats(*[alpha] * size), floats(*[float(accumulate)] * size)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, c)]
        call = partial(
            self._batch,
            ctypes.c_int(_ROW_MAJOR),
            *(plain, other, m, n, k, alphas, pointers[0], lda, pointers[1], ldb, betas, pointers[2], ldc),
            ctypes.c_int(size),
            count,
        )
        call.kept = (a, b, c)  # type: ignore[attr-defined]
        return call

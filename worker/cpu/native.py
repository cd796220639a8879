"""C kernels of the engine, compiled for this machine on first use (rollout_client/native/compiler.py).

Where there is no C compiler everything works without them.
"""

import ctypes
import sys
from functools import lru_cache
from pathlib import Path

from rollout_client import copying
from rollout_client.native import compiler
from weight_manager import finite, reading
from worker import shared_sums, softmax

_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))


@lru_cache(maxsize=1)
def load() -> "Native":
    """The kernels of this process. Raises OSError saying why there are none."""
    import paddle  # noqa: PLC0415  loads the OpenMP whose threads the kernels run on

    return Native(ctypes.CDLL(str(compiled())), Path(paddle.__file__).parent / "libs" / "libiomp5.so")


class Native:
    """Entry points by name, and running them on the threads that oneDNN and MKL use too: a second pool would fight."""

    def __init__(self, kernels: ctypes.CDLL, openmp: Path) -> None:
        self._kernels = kernels
        runtime = ctypes.CDLL(str(openmp))
        self.threads: int = runtime.omp_get_max_threads()
        self._parallel = runtime.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def number(self, name: str) -> int:
        """What ``int64_t name(void)`` says."""
        function = getattr(self._kernels, name)
        function.restype = ctypes.c_int64
        return int(function())

    def address(self, name: str) -> int:
        """The address of a kernel ``void name(void *data)``."""
        address = ctypes.cast(getattr(self._kernels, name), ctypes.c_void_p).value
        assert address is not None
        return address

    def run(self, kernel: int, data: int) -> None:
        """kernel(data) on every thread, at once."""
        self._parallel(kernel, data, 0, 0)

    def run_here(self, name: str, data: int) -> None:
        """``void name(void *data)`` on the thread that calls, which need not be the one that computes."""
        function = getattr(self._kernels, name)
        function.restype, function.argtypes = None, [ctypes.c_void_p]
        function(data)


def compiled() -> Path:
    """The shared library for this machine. Raises OSError when it cannot be made."""
    return compiler.compiled("kernels", _SOURCES)


if __name__ == "__main__":
    try:
        print(compiled())
        print(compiler.compiled("weights", copying.SOURCES))
        print(compiler.compiled("reading", reading.SOURCES))
        print(compiler.compiled("finite", finite.SOURCES))
        print(compiler.compiled("shared_sums", shared_sums.SOURCES))
        print(softmax.library())
    except OSError as problem:
        print(f"no compiled kernels, everything works at half speed: {problem}", file=sys.stderr)

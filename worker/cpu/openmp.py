"""How long threads of OpenMP spin when they run out of work. Paddle brings Intel's runtime: 200 ms by default."""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

USUAL_MS = 200
"""Of the runtime, unless KMP_BLOCKTIME says something else, which wins."""


def spin(milliseconds: int) -> None:
    """From now on, threads that spin just now included. Without Paddle, or with another runtime, nothing happens."""
    if "paddle" in sys.modules and "KMP_BLOCKTIME" not in os.environ:
        runtime = _runtime()
        if runtime is not None:
            runtime.kmp_set_blocktime(milliseconds)
            runtime.GOMP_parallel(runtime.omp_get_level, None, 0, 0)  # threads look at it as they leave a region


@cache
def _runtime() -> ctypes.CDLL | None:
    library = Path(str(sys.modules["paddle"].__file__)).parent / "libs" / "libiomp5.so"
    try:
        runtime = ctypes.CDLL(str(library), mode=ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)
        runtime.kmp_set_blocktime.argtypes = [ctypes.c_int]
        runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    except (OSError, AttributeError):
        return None
    return runtime

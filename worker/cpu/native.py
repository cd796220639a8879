"""C kernels compiled for this machine on first use, where a C compiler can be found; everything works without.

The compiler is ``$CC``, clang, gcc or cc on the path, or the one in the ``ziglang`` wheel. The result is kept
under ``$XDG_CACHE_HOME/paddle-rollout``, named by everything it depends on, so one machine compiles once.
"""

import ctypes
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import xxhash

log = logging.getLogger(__name__)

_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-Wno-psabi"]
_LIBRARIES = ["-lm"]
_COMPILE_S = 120.0
"""The first run of the compiler in the ziglang wheel takes some seconds."""


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
        """Of a kernel ``void name(void *data)``."""
        address = ctypes.cast(getattr(self._kernels, name), ctypes.c_void_p).value
        assert address is not None
        return address

    def run(self, kernel: int, data: int) -> None:
        """kernel(data) on every thread, at once."""
        self._parallel(kernel, data, 0, 0)


def compiled() -> Path:
    """The shared library for this machine. Raises OSError when it cannot be made."""
    compiler = _compiler()
    identity = " ".join([*compiler, *_FLAGS, _cpu_flags()]).encode() + b"".join(
        source.read_bytes() for source in _SOURCES
    )
    target = _cache() / f"kernels-{xxhash.xxh3_64_hexdigest(identity)}.so"
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [
            *compiler,
            *_FLAGS,
            "-o",
            str(made),
            *(str(source) for source in _SOURCES if source.suffix == ".c"),
            *_LIBRARIES,
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        except subprocess.SubprocessError as error:
            raise OSError(f"{shlex.join(command)} failed: {getattr(error, 'stderr', None) or error}") from error
        os.replace(made, target)  # two ranks may compile at once; each sees a whole file
    log.info("compiled %s with %s", target.name, compiler[0])
    return target


def _compiler() -> list[str]:
    chosen = os.environ.get("CC")
    if chosen:
        return shlex.split(chosen)
    for name in ("clang", "gcc", "cc"):
        found = shutil.which(name)
        if found:
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise OSError("no C compiler: install one, or `pip install ziglang`")


def _cache() -> Path:
    """Only this user can write there: what lies in it is run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paddle-rollout"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid() or base.stat().st_mode & 0o022:
        raise OSError(f"{base} can be written by others")
    return base


def _cpu_flags() -> str:
    """A cache on a shared home must not serve another kind of processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return next((line for line in text.splitlines() if line.startswith("flags")), "")


if __name__ == "__main__":
    try:
        print(compiled())
    except OSError as problem:
        print(f"no compiled kernels, everything works at half speed: {problem}", file=sys.stderr)

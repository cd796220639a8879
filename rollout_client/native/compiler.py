"""C compiled for this machine on first use, where a C compiler can be found.

The compiler is ``$CC``, clang, gcc or cc on the path, or the one in the ``ziglang`` wheel. The result is kept
under ``$XDG_CACHE_HOME/paddle-rollout``, named by everything it depends on, so one machine compiles once.
"""

import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import xxhash

log = logging.getLogger(__name__)

_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-shared", "-fPIC", "-Wno-psabi"]
_LIBRARIES = ["-lm"]
_COMPILE_S = 120.0
"""The first run of the compiler in the ziglang wheel takes some seconds."""


def compiled(name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """The shared library of these sources and headers for this machine. Raises OSError when it cannot be made.

    flags: more than all have.
    """
    compiler = [*_compiler(), *_FLAGS, *flags]
    identity = " ".join([*compiler, _cpu_flags()]).encode() + b"".join(path.read_bytes() for path in sources)
    target = _cache() / f"{name}-{xxhash.xxh3_64_hexdigest(identity)}.so"
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        files = [str(path) for path in sources if path.suffix == ".c"]
        command = [*compiler, "-o", str(made), *files, *_LIBRARIES]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=_COMPILE_S)
        except subprocess.SubprocessError as error:
            raise OSError(f"{shlex.join(command)} failed: {getattr(error, 'stderr', None) or error}") from error
        os.replace(made, target)  # two processes may compile at once; each sees a whole file
    log.info("compiled %s with %s", target.name, compiler[0])
    return target


def _compiler() -> list[str]:
    chosen = os.environ.get("CC")
    if chosen:
        try:
            return shlex.split(chosen)
        except ValueError as error:
            raise OSError(f"CC={chosen} is no command: {error}") from error
    for name in ("clang", "gcc", "cc"):
        found = shutil.which(name)
        if found:
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise OSError("no C compiler: install one, or `pip install ziglang`")


def _cache() -> Path:
    """Only this user can write there: what lies in it is run."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paddle-rollout"
    except RuntimeError as error:  # a user without a name, and no HOME
        raise OSError(f"no place for compiled kernels: {error}; set XDG_CACHE_HOME") from error
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid() or base.stat().st_mode & 0o022:
        raise OSError(f"{base} can be written by others")
    return base


def _cpu_flags() -> str:
    """A cache on a shared home must not serve another kind of processor. ARM has another name for its flags."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")

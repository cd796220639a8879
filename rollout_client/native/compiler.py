"""C compiled for this machine on first use, where a C compiler can be found.

The compiler is ``$CC``, clang, gcc or cc on the path, or the one in the ``ziglang`` wheel. The result is kept
under ``$XDG_CACHE_HOME/paddle-rollout``, named by everything it depends on, so one machine compiles once. What no start
has used for three months, as of versions before this one, is removed when something new is put there. Where nothing can
be kept, as on a disk that is full, each process compiles for itself, in memory.
"""

import contextlib
import fcntl
import importlib.util
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import xxhash

log = logging.getLogger(__name__)

_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-shared", "-fPIC", "-Wno-psabi"]
_LIBRARIES = ["-lm"]
_SCRATCH = ".scratch"
_COMPILE_S, _SAID_S, _LOOK_S = 900.0, 30.0, 0.05
"""The longest of ours takes a minute or two of a processor's time, and a machine with much else to do gives it a tenth
of one: without it everything would be half as fast for as long as the process lives. The first is how long a process
does without it, while another compiles it or it does so itself; a third more where the other has come to nothing late.
"""
_UNUSED_S = 90 * 86400.0
_MEMORY = Path("/dev/shm")  # noqa: S108  a disk that is full has no room for it
_IN_MEMORY: dict[str, Path] = {}
"""What could not be kept, and was made for this process alone."""


class _TooLong(OSError):
    """It would take as long elsewhere."""


def compiled(name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """The shared library of these sources and headers for this machine. Raises OSError when it cannot be made.

    flags: more than all have.
    """
    compiler = [*_compiler(), *_FLAGS, *flags]
    identity = " ".join([*compiler, _cpu_flags()]).encode() + b"".join(path.read_bytes() for path in sources)
    file = f"{name}-{xxhash.xxh3_64_hexdigest(identity)}.so"
    began = time.monotonic()
    try:
        if (target := cache() / file).is_file():
            use(target)
            return target
    except OSError as error:
        if error.errno is None:  # whose place it is, or where it would be, is to be mended
            raise
    with _alone(name, sources[0]):
        if file not in _IN_MEMORY:
            left = max(began + _COMPILE_S - time.monotonic(), _COMPILE_S / 3)
            try:
                return _kept(name, file, compiler, sources, left)
            except _TooLong:
                raise
            except OSError as error:
                _IN_MEMORY[file] = _in_memory(name, compiler, sources, left)
                log.warning("%s is compiled for this process alone, as it cannot be kept: %s", name, error)
        return _IN_MEMORY[file]


def cache() -> Path:
    """Where what takes long to find out is kept between starts. Raises OSError unless only this user can write there:
    what lies in it is run.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paddle-rollout"
    except RuntimeError as error:  # a user without a name, and no HOME
        raise OSError(f"no place for compiled kernels: {error}; set XDG_CACHE_HOME") from error
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid() or base.stat().st_mode & 0o022:
        raise OSError(f"{base} can be written by others")
    return base


def use(path: Path) -> None:
    """Have a file there count as used."""
    with contextlib.suppress(OSError):  # the system may be mounted read-only
        os.utime(path)


def remove_unused() -> None:
    """Remove what no start has used for long. Raises OSError as `cache`."""
    for path in cache().iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _UNUSED_S:
                remove = shutil.rmtree if path.is_dir() else Path.unlink
                remove(path)


def _kept(name: str, file: str, compiler: Sequence[str], sources: Sequence[Path], seconds: float) -> Path:
    """Its place in the cache, where another process may have put it meanwhile."""
    target = cache() / file
    if not target.is_file():
        remove_unused()
        with _made(name, target.parent, compiler, sources, seconds) as made:
            with made.open("rb") as whole:
                os.fsync(whole)  # or a machine that loses power now may have an empty one for good
            os.replace(made, target)  # who looks meanwhile sees a whole file or none
        log.info("compiled %s with %s", file, compiler[0])
    use(target)
    return target


def _in_memory(name: str, compiler: Sequence[str], sources: Sequence[Path], seconds: float) -> Path:
    """Where this process finds it for as long as it lives, and nobody after that."""
    if not hasattr(os, "memfd_create"):  # in a Python that was built for an old C library
        raise OSError(f"{name} cannot be kept, and this Python makes no files in memory")
    with _made(name, _MEMORY, compiler, sources, seconds) as made:
        memory = os.memfd_create(name)
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(made.read_bytes())
        except OSError:
            os.close(memory)
            raise
    return Path(f"/proc/self/fd/{memory}")


@contextlib.contextmanager
def _made(name: str, folder: Path, compiler: Sequence[str], sources: Sequence[Path], seconds: float) -> Iterator[Path]:
    """Compiled into a folder of its own in this one, which goes afterwards."""
    for left in folder.glob(f"{name}-*{_SCRATCH}"):  # by who was killed while it compiled
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - 2 * _COMPILE_S:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", suffix=_SCRATCH, dir=folder) as scratch:
        made = Path(scratch) / f"{name}.so"
        files = [str(path) for path in sources if path.suffix == ".c"]
        log.info("compiling %s for this processor with %s", name, compiler[0])
        _run(name, [*compiler, "-o", str(made), *files, *_LIBRARIES], seconds, {**os.environ, "TMPDIR": scratch})
        yield made


@contextlib.contextmanager
def _alone(name: str, source: Path) -> Iterator[None]:
    """While no other process compiles this: all ranks of a service want it at once. One that does so for too long, and
    a file system without locks, is not waited for.
    """
    began = said = time.monotonic()
    with source.open("rb") as file:
        while not _locked(file) and (now := time.monotonic()) < began + _COMPILE_S:
            if now >= said + _SAID_S:
                said = now
                log.info("another process compiles %s, for %.0f s now", name, now - began)
            time.sleep(_LOOK_S)
        yield


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _run(name: str, command: Sequence[str], seconds: float, env: Mapping[str, str]) -> None:
    """Raises OSError when it fails, or takes longer: its children, which do the work, end with it then. They are in
    this process's group, and end with it, too, where a supervisor ends what a process has left behind.
    """
    began = time.monotonic()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
    ) as process:
        try:
            while True:
                left = began + seconds - time.monotonic()
                try:
                    _, said = process.communicate(timeout=max(0.0, min(left, _SAID_S)))
                    break
                except subprocess.TimeoutExpired:
                    waited = time.monotonic() - began
                    if waited >= seconds:
                        raise _TooLong(f"{name}: not compiled within {seconds:.3g} s: {shlex.join(command)}") from None
                    log.info("%s is still being compiled, after %.0f s", name, waited)
        except BaseException:
            if process.returncode is None:
                _end(process.pid)
            raise
    if process.returncode:
        raise OSError(f"{shlex.join(command)} failed: {said or f'status {process.returncode}'}")


def _end(pid: int) -> None:
    """A process that nobody has waited for, with all that it has started: stopped first, so that nothing is added and
    no number of theirs becomes another's meanwhile.
    """
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of each thread
            for child in children.read_text().split():
                _end(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


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


def _cpu_flags() -> str:
    """A cache on a shared home must not serve another kind of processor. ARM has another name for its flags."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")

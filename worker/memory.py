"""How much memory there is, and giving back what this process freed: a trainer beside it needs that."""

import contextlib
import ctypes
import gc
from pathlib import Path


def give_back_to_system() -> None:
    """Collect cycles, then return the C allocator's free pages (glibc; elsewhere only the former)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def memory_of_machine() -> float:
    """Bytes in all: of the system, and of a container that has a limit."""
    return _least("MemTotal")


def memory_available() -> float:
    """Bytes that could be had, at most."""
    return _least("MemAvailable", "SwapFree")


def _least(*fields: str) -> float:
    """The sum of these of the system, or a container's limit; infinity where nothing is known."""
    limits = [float("inf")]
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(sum(1024.0 * int(known[name].split()[0]) for name in fields))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(float(Path(path).read_text()))
    return min(limits)

"""How much memory there is, and giving back what this process freed: a trainer beside it needs that."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def give_back_to_system() -> None:
    """Collect cycles, then return the C allocator's free pages (glibc; elsewhere only the former)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def memory_of_machine() -> float:
    """Bytes in all: of the system, and of a container that has a limit. Infinity where nothing is known."""
    return min([_of_system("MemTotal"), *(limit for limit, _ in _containers())])


def memory_available() -> float:
    """Bytes that could be had, at most: what the system has left, and what a container has left of its limit."""
    return min([_of_system("MemAvailable", "SwapFree"), *(max(0.0, limit - used) for limit, used in _containers())])


def _of_system(*fields: str) -> float:
    try:
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return sum(1024.0 * int(known[name].split()[0]) for name in fields)
    except (OSError, ValueError, KeyError):
        return float("inf")


def _containers() -> Iterator[tuple[float, float]]:
    """(limit, used) by cgroups of version 2 and 1. Files that are in memory do not count, those that were read more
    than once neither: the system gives up both before it ends a process. What lies in /dev/shm is not among them.
    """
    for directory, limit, used, prefix in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):
            most, now = float(Path(directory, limit).read_text()), 0.0  # "max" is no number
            with contextlib.suppress(OSError, ValueError, KeyError):
                known = dict(line.split() for line in Path(directory, "memory.stat").read_text().splitlines())
                files = sum(float(known.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
                now = float(Path(directory, used).read_text()) - files
            yield most, now

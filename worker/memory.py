"""How much memory there is, and giving back what this process freed: a trainer beside it needs that."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
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
    """(limit, used) by cgroups of version 2 and 1. Files that are in memory and of which nobody needs more do not
    count."""
    for directory, limit, used, files in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):
            most, now = float(Path(directory, limit).read_text()), 0.0  # "max" is no number
            with contextlib.suppress(OSError, ValueError, KeyError):
                known = dict(line.split() for line in Path(directory, "memory.stat").read_text().splitlines())
                now = float(Path(directory, used).read_text()) - float(known[files])
            yield most, now

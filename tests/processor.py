"""What processes use of the processor.

An idle process is judged by how often it wakes: that is what the code decides. What a wake costs is the machine's: on
one and the same virtual machine 0.5 ms on one day and 5 ms on another, when caches did not survive a second of sleep.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

ALWAYS_AWAKE = 0.5
"""Share of a core above which a thread spins, whatever a wake costs."""


class Use(NamedTuple):
    """What all threads of some processes have used."""

    seconds: float
    wakes: int
    """Times that a thread gave up its core to wait. Being put off it by a neighbour is no wake: it says who else is on
    the machine."""


class Rates(NamedTuple):
    """Of a window of time."""

    share: float
    """of one core"""
    wakes: float
    """a second"""


def used(pids: Iterable[int]) -> Use:
    """Since they were started. Threads that end meanwhile take theirs along."""
    seconds, wakes = 0.0, 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                status = (thread / "status").read_text()
                wakes += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary"))
                seconds += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return Use(seconds, wakes)


def calm(pids: Callable[[], Iterable[int]], wakes: float, window_s: float, windows: int = 4) -> list[Rates]:
    """Watch until a window has at most `wakes` wakes a second and no thread that spins; the windows so far.

    The first windows may still hold a start's last work, or a neighbour's noise.

    Raises:
        AssertionError: not one of `windows` windows was calm.
    """
    seen: list[Rates] = []
    for _ in range(windows):
        before, began = used(pids()), monotonic()
        sleep(window_s)
        after, took = used(pids()), monotonic() - began
        seen.append(Rates((after.seconds - before.seconds) / took, (after.wakes - before.wakes) / took))
        if seen[-1].wakes <= wakes and seen[-1].share < ALWAYS_AWAKE:
            return seen
    raise AssertionError(f"never calm, with {wakes} wakes a second at most: {seen}")

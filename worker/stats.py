"""What a replica says about itself: counters, samples, memory per rank, and who wants to hear it."""

import os
from collections.abc import Callable
from typing import Any

from worker.channel import Send
from worker.engine.base import EngineSpec
from worker.messages import StateChanged, Stats
from worker.scheduler import Scheduler

_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_of(pids: list[int]) -> list[dict[str, Any]]:
    """pid, resident bytes and bytes of them that are nobody else's (no shared slots), per rank."""
    ranks = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                _, resident, shared, *_ = (int(field) * _PAGE for field in file.read().split())
        except (OSError, ValueError):
            resident = shared = 0
        ranks.append({"pid": pid, "rss_bytes": resident, "private_bytes": resident - shared})
    return ranks


def of_scheduler(
    scheduler: Scheduler, spec: EngineSpec, counters: dict[str, float], samples: dict[str, list[float]] | None
) -> dict[str, Any]:
    """The fields of `Stats` that are about generation; counters, samples: what else there is of them.

    samples None: none at all, those of the scheduler stay where they are.
    """
    return {
        "running": scheduler.running,
        "waiting": scheduler.waiting,
        "kv_blocks_used": scheduler.blocks_used,
        "kv_blocks_total": spec.num_blocks,
        "block_size": spec.block_size,
        "kernels": spec.kernels.name,
        "kernels_why": spec.kernels.why,
        "deterministic": str(spec.deterministic),
        "counters": {**scheduler.counters, **counters},
        "histograms": {} if samples is None else {**scheduler.drain_samples(), **samples},
    }


class Subscribers:
    """Connections that asked for `Stats` once get them from then on, and every change of state."""

    def __init__(self, send: Send, busy_s: float, idle_s: float, clock: Callable[[], float]) -> None:
        self.due = clock()
        self._send = send
        self._busy_s = busy_s
        self._idle_s = idle_s
        self._clock = clock
        self._origins: list[bytes] = []

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._origins)

    def add(self, origin: bytes) -> None:
        """Tell this connection from now on."""
        if origin not in self._origins:
            self._origins.append(origin)

    def remove(self, origin: bytes) -> None:
        """This connection is gone."""
        if origin in self._origins:
            self._origins.remove(origin)

    def wait_at_most(self, busy: bool) -> None:
        """Work has come: the long interval of an idle replica no longer holds."""
        if busy:
            self.due = min(self.due, self._clock() + self._busy_s)

    def publish(self, stats: Stats, busy: bool) -> None:
        """Send statistics to all that asked, and say when the next are due."""
        self.due = self._clock() + (self._busy_s if busy else self._idle_s)
        for origin in list(self._origins):
            self._send(origin, stats)

    def announce(self, change: StateChanged) -> None:
        """Send a change of state to all that asked."""
        for origin in list(self._origins):
            self._send(origin, change)

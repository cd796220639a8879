"""One clock, one queue of what happens next, one source of chance: a run follows from its seed alone.

The hub's modules read the time, make random names and watch processes through the modules `time`, `secrets` and `os`;
`World.inside` has them read this world's instead.
"""

import heapq
import itertools
import random
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

TRACE = 1000
"""Last lines of what happened that a violation comes with."""


class Violation(BaseException):
    """A promise was broken; the message says which, when, and what happened before.

    No Exception: a store answers one in a handler of its own with a refusal, and goes on.
    """


class Killed(BaseException):
    """The process that runs ends here, in the middle of whatever it does."""


class World:
    """Times are seconds of the simulated monotonic clock."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.trace: deque[str] = deque(maxlen=TRACE)
        self.steps = 0
        self.pids: set[int] = set()
        self.running: Any = None  # the host whose store's code runs
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._numbers = itertools.count(1000)

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(when, self.now), next(self._count), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now + seconds, act)

    def run(self, until: float) -> None:
        """Everything that is due by then."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, act = heapq.heappop(self._queue)
            self.steps += 1
            act()
        self.now = until

    def number(self) -> int:
        """One that nobody has: a descriptor, a process, an identity."""
        return next(self._numbers)

    def say(self, who: str, what: str) -> None:
        self.trace.append(f"{self.now - 1000:9.4f} {who:<10} {what}")

    def violated(self, what: str) -> Violation:
        lines = "\n".join(self.trace)
        return Violation(f"seed {self.seed}, at {self.now - 1000:.4f}: {what}\nWhat happened before:\n{lines}")

    @contextmanager
    def inside(self, **swaps: dict[str, Any]) -> Iterator[None]:
        """The modules of the hub live in this world. swaps: further names, by module."""
        clock = SimpleNamespace(
            monotonic=lambda: self.now,
            monotonic_ns=lambda: int(self.now * 1e9),
            clock_gettime=lambda clock: self.now,
            clock_gettime_ns=lambda clock: int(self.now * 1e9),
            CLOCK_BOOTTIME=time.CLOCK_BOOTTIME,
            time=lambda: 1.7e9 + self.now,
            thread_time=lambda: 0.0,  # no work takes any
        )
        chance = SimpleNamespace(
            token_hex=lambda count=16: self.rng.randbytes(count).hex(),
            token_bytes=lambda count=16: self.rng.randbytes(count),
        )
        undo: list[tuple[Any, str, Any]] = []
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] not in ("weight_manager", "worker"):
                continue
            wanted = dict(swaps.get(name, {}))
            wanted |= {
                k: v for k, v in (("time", clock), ("secrets", chance)) if vars(module).get(k) in (time, secrets)
            }
            for key, value in wanted.items():
                undo.append((module, key, vars(module)[key]))
                setattr(module, key, value)
        try:
            yield
        finally:
            for module, key, value in reversed(undo):
                setattr(module, key, value)

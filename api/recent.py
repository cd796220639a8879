"""The last minutes second by second, and the last things that went wrong: what the status page plots and lists."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from weight_manager.messages import Status
from worker.messages import Stats

SPAN_S = 300
"""How far back the plots go."""
SETTLED_S = 2
"""Replicas report every second while busy: younger seconds are not complete."""
KEPT = 30


@dataclass
class Second:
    """What happened within one second. stall_ms: the longest standstill reported in it."""

    tokens: float = 0.0
    wasted: float = 0.0
    stall_ms: float = 0.0


@dataclass
class Trouble:
    """Something that went wrong, and how often in a row."""

    time: float
    source: str
    message: str
    times: int = 1


class Warnings(logging.Handler):
    """Keeps what the API logs as a warning or worse."""

    def __init__(self, note: Callable[[float, str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        """logging.Handler."""
        self._note(record.created, "api", record.getMessage())


class Recent:
    """The last minutes, second by second. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._seconds: dict[int, Second] = {}
        self._before: dict[int, tuple[float, float, float]] = {}  # replica -> when, its tokens and wasted ones
        self._error_time: float | None = None
        self.troubles: deque[Trouble] = deque(maxlen=KEPT)  # newest first
        self.warnings = Warnings(self.note)

    def heard(self, replica: int, stats: Stats) -> None:
        """Spread what a replica did since its last word over the seconds between."""
        now = self._clock()
        tokens, wasted = (stats.counters.get(f"{name}_tokens", 0.0) for name in ("generation", "wasted"))
        since, tokens_before, wasted_before = self._before.get(replica, (now, tokens, wasted))
        if tokens < tokens_before or wasted < wasted_before:
            tokens_before = wasted_before = 0.0  # it has restarted
        self._before[replica] = now, tokens, wasted
        since = max(since, now - SPAN_S)
        for second in range(int(since), int(now) + 1):
            share = (min(now, second + 1) - max(since, second)) / (now - since) if now > since else 1.0
            at = self._at(second)
            at.tokens += share * (tokens - tokens_before)
            at.wasted += share * (wasted - wasted_before)
        stalls = stats.histograms.get("stall_s")
        if stalls:
            at = self._at(int(now))
            at.stall_ms = max(at.stall_ms, 1e3 * max(stalls))

    def store_said(self, status: Status) -> None:
        """Note the store's last error once, those from before this process too: they carry their own time."""
        error = status.last_error
        if error is not None and error.get("time") != self._error_time:
            self._error_time = error.get("time")
            code = error.get("code", "unknown")
            self.note(error.get("time", self._clock()), "store", f"{code}: {error.get('message', '')}")

    def note(self, when: float, source: str, message: str) -> None:
        """Remember what went wrong; the same again only counts."""
        newest = self.troubles[0] if self.troubles else None
        if newest is not None and (newest.source, newest.message) == (source, message):
            newest.time, newest.times = when, newest.times + 1
        else:
            self.troubles.appendleft(Trouble(when, source, message))

    def seconds(self) -> tuple[int, list[Second]]:
        """The first second, and from it on every complete one, SPAN_S in all."""
        end = int(self._clock()) - SETTLED_S
        first = end - SPAN_S + 1
        return first, [self._seconds.get(second, Second()) for second in range(first, end + 1)]

    def _at(self, second: int) -> Second:
        if second not in self._seconds:
            self._seconds[second] = Second()
            horizon = second - SPAN_S - SETTLED_S
            for old in [known for known in self._seconds if known < horizon]:
                del self._seconds[old]
        return self._seconds[second]

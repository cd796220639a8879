"""What a rank's start spends its time on: a debug line a stage as it goes, and all of them in one line at the end."""

import logging
import os
import time
from pathlib import Path

log = logging.getLogger(__name__)

_SHOWN_S = 0.01
"""A shorter stage is not worth a word at the end."""


def born() -> float:
    """When this process began, by `time.monotonic`, to a hundredth of a second; now, where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, ValueError, IndexError):
        return time.monotonic()


class Starting:
    """One start, stage after stage. Nothing is said of one that failed but the stages that were over by then."""

    def __init__(self, began: float) -> None:
        """began: a time of `time.monotonic`."""
        self._began = self._last = began
        self._stages: list[tuple[str, float]] = []

    def lap(self, stage: str) -> None:
        """A stage is over; the next one begins."""
        now = time.monotonic()
        self._stages.append((stage, now - self._last))
        log.debug("start: %s took %.3f s", *self._stages[-1])
        self._last = now

    def done(self) -> None:
        """The loop is about to turn."""
        seconds = {stage: round(took, 3) for stage, took in self._stages}
        shown = ", ".join(f"{stage} {took:.2f}" for stage, took in seconds.items() if took >= _SHOWN_S)
        log.info("started in %.2f s: %s", self._last - self._began, shown, extra={"stages": seconds})

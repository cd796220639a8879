"""What a service still does after its start, of which it tells in its log."""

import time
from pathlib import Path

from worker.models.filled_memory import FILLED, FILLING


def cache_filled(log: Path) -> bool:
    """No replica is filling in its KV cache any more."""
    said = log.read_text()
    return said.count(FILLING) == said.count(FILLED)


def wait_until_filled(log: Path, timeout_s: float = 300.0) -> None:
    """Raises TimeoutError."""
    until = time.monotonic() + timeout_s
    while not cache_filled(log):
        if time.monotonic() > until:
            raise TimeoutError(f"the KV cache is not filled in after {timeout_s:.0f} s, says {log}")
        time.sleep(0.2)

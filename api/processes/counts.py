"""Counters that outlive the process which counts: a file in memory for each, and any process adds them all up.

A counter that went back to zero when one of several processes died would make their sum smaller, which Prometheus
takes for a restart of everything and counts all of it again.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from api.processes.mapped import mapped

NAMES = 2048
_NAME_BYTES = 120
_SIZE = NAMES * (8 + _NAME_BYTES)


class Counts:
    """Named counters of process `index`; the names written so far are taken over from its predecessor."""

    def __init__(self, directory: Path, index: int) -> None:
        self._directory = directory
        self._bytes = mapped(directory / f"counts-{index}", _SIZE)
        self._cells = memoryview(self._bytes)[: NAMES * 8].cast("q")
        self._at = {name: at for at, (name, _) in enumerate(_read(memoryview(self._bytes)))}

    def add(self, name: str) -> None:
        """Count one. A name is cut to 120 bytes; those past the 2048th are counted under the last one."""
        at = self._at.get(name)
        if at is None:
            at = min(len(self._at), NAMES - 1)
            encoded = name.encode()[:_NAME_BYTES]
            start = NAMES * 8 + at * _NAME_BYTES
            self._bytes[start : start + _NAME_BYTES] = encoded.ljust(_NAME_BYTES, b"\0")
            self._at[name] = at
        self._cells[at] += 1

    def total(self) -> Counter[str]:
        """Counts of all processes together, of those that have died too."""
        counted: Counter[str] = Counter()
        for path in self._directory.glob("counts-*"):
            for name, count in _read(memoryview(path.read_bytes())):
                counted[name] += count
        return counted


def _read(content: memoryview) -> Iterator[tuple[str, int]]:
    if len(content) < _SIZE:  # its process has just made it
        return
    cells = content[: NAMES * 8].cast("q")
    for at in range(NAMES):
        start = NAMES * 8 + at * _NAME_BYTES
        name = bytes(content[start : start + _NAME_BYTES]).rstrip(b"\0").decode(errors="replace")
        if not name:
            return
        yield name, cells[at]

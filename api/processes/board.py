"""What every API process can see of the others without asking: a table of numbers in shared memory.

One row per process, written by that process only; 64-bit cells, so that none is ever half written. Readers may be a
few milliseconds behind, which lets a limit be overshot by what arrives in that time, and by no more.
"""

import mmap
import os
import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

_BEAT, _NEWS, _OPEN, _HELD, _FIRST_LOAD = range(5)
LOADS = 4096
"""Cells for loads of replicas; a replica's is its number modulo this."""
_ROW = _FIRST_LOAD + LOADS


class Board:
    """The table of `count` processes, in the directory that they share; `index`: the row that is ours."""

    def __init__(self, directory: Path, index: int, count: int) -> None:
        self.index = index
        self.count = count
        directory.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(directory / "board", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, count * _ROW * 8)  # the same size from all of them; new bytes are zeros
            self._cells = memoryview(mmap.mmap(fd, count * _ROW * 8)).cast("q")
        finally:
            os.close(fd)
        self._own = index * _ROW
        self._others = [row * _ROW for row in range(count) if row != index]
        for cell in range(_OPEN, _ROW):  # of a predecessor that has died
            self._cells[self._own + cell] = 0
        self.beat()

    def beat(self) -> None:
        """Say that this process lives."""
        self._cells[self._own + _BEAT] = time.monotonic_ns()

    def silent_s(self, index: int) -> float:
        """How long a process has not said so; very long if it never has."""
        return (time.monotonic_ns() - self._cells[index * _ROW + _BEAT]) / 1e9

    @property
    def news(self) -> int:
        """Changes whenever the lead has said something new."""
        return self._cells[_NEWS]

    def tell(self) -> None:
        """[LEAD] There is something new in what it says."""
        self._cells[_NEWS] += 1

    def count_requests(self, open_: int, held: int) -> None:
        """How many prompts this process has, and how many of them wait for a replica."""
        self._cells[self._own + _OPEN], self._cells[self._own + _HELD] = open_, held

    def count_loads(self, loads: Iterable[tuple[int, int]]) -> None:
        """(replica, sequences that it works on for this process)."""
        for replica, load in loads:
            self._cells[self._own + _FIRST_LOAD + replica % LOADS] = load

    @property
    def open_elsewhere(self) -> int:
        """Prompts held or running in all other processes."""
        return sum(self._cells[row + _OPEN] for row in self._others)

    @property
    def held_elsewhere(self) -> int:
        """Those of them that no replica has got."""
        return sum(self._cells[row + _HELD] for row in self._others)

    def load_elsewhere(self, replica: int) -> int:
        """Sequences that a replica works on for all other processes."""
        cell = _FIRST_LOAD + replica % LOADS
        return sum(self._cells[row + cell] for row in self._others)


def home(session: str, replicas: Iterable[int]) -> int:
    """Which of these replicas a session belongs to, in every process and after every restart.

    Rendezvous hashing (Thaler and Ravishankar 1998): the replica with the highest hash of (session, replica). When one
    goes, its sessions alone move, and come back with it. Raises ValueError without any replica.
    """
    name = session.encode()
    return max(replicas, key=lambda r: blake2b(name, digest_size=8, salt=r.to_bytes(8, "little")).digest())

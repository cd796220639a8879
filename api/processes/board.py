"""What every API process can see of the others without asking: a table of numbers in shared memory.

One row per process, written by that process only; 64-bit cells, so that none is ever half written. Readers may be a
few milliseconds behind, which lets a limit be overshot by what arrives in that time, and by no more.

Behind the rows stands what the lead says, twice: what it says next goes where nobody reads, and counts once the number
of the news says so.
"""

import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from api.processes.mapped import mapped

_BEAT, _NEWS, _OPEN, _HELD, _FIRST_LOAD = range(5)
LOADS = 4096
"""Cells for loads of replicas; a replica's is its number modulo this."""
_ROW = _FIRST_LOAD + LOADS
SAID = 128
"""Cells for what the lead says: its length in bytes, then the bytes."""


class Board:
    """The table of `count` processes, in the directory that they share; `index`: the row that is ours."""

    def __init__(self, directory: Path, index: int, count: int) -> None:
        self.index = index
        self.count = count
        cells = count * _ROW + 2 * SAID  # the same from all of them
        self._cells = memoryview(mapped(directory / "board", cells * 8)).cast("q")
        self._places = [self._cells[count * _ROW + i * SAID :][:SAID] for i in range(2)]
        self._saying = b""
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

    def tell(self, saying: bytes | None = None) -> None:
        """[LEAD] There is something new: it says this from now on; None: something else has changed."""
        self._saying = self._saying if saying is None else saying
        place = self._places[(self.news + 1) % 2]
        place[0] = len(self._saying)
        place[1:].cast("B")[: len(self._saying)] = self._saying
        self._cells[_NEWS] += 1

    def said(self) -> tuple[int, bytes]:
        """(news, what the lead says since then); of a lead that has said nothing yet, nothing."""
        while True:
            news = self.news
            place = self._places[news % 2]
            saying = bytes(place[1:].cast("B")[: place[0]])
            if self.news == news:  # else it may have been written over meanwhile
                return news, saying

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

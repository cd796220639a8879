"""Work that several threads take from, and whose end is told once: a word to the store's loop costs more than hashing
a megabyte does.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable


class Gang:
    """Have as many threads call `work` as should share it."""

    def __init__(self, units: Iterable[Callable[[], None]], finished: Callable[[BaseException | None], None]) -> None:
        """finished: called by the thread that ends the last unit, with what one of them raised."""
        self._units = deque(units)
        self._left = len(self._units)
        self._error: BaseException | None = None
        self._finished = finished
        self._lock = threading.Lock()

    def work(self) -> None:
        """Take units until there are none."""
        while True:
            try:
                unit = self._units.popleft()
            except IndexError:
                return
            try:
                unit()
            except BaseException as error:
                self._error = error
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._finished(self._error)

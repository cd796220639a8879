"""Moves the arena into huge pages while no push runs: copies and checks run up to three times as fast there, and
a process that maps a slot fills one page-table entry where it filled 512.
"""

import logging
import threading
from collections.abc import Callable

from rollout_client.aligned_map import HUGE
from weight_manager.arena import Arena

log = logging.getLogger(__name__)

IDLE_S = 0.2
"""Seconds between two looks whether a push is over."""
PAUSES_S = (0.0, 1.0, 5.0, 30.0, 120.0)
"""Before each round: a page that somebody just holds does not move, and a push may begin at any moment."""


class HugePages:
    """A thread that goes over the slots, and again if some did not move. Without huge pages there is less speed."""

    def __init__(self, arena: Arena, busy: Callable[[], bool], expected: int = 0) -> None:
        """busy: weights are being loaded or pushed; they have the machine's memory to themselves. expected: slots that
        have memory soon, if not yet.
        """
        self._arena = arena
        self._expected = expected
        self._busy = busy
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="huge-pages")

    def start(self) -> None:
        """Begin; readers and writers of the slots need not wait."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the piece that is being moved."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _may_go(self) -> bool:
        while self._busy() and not self._stop.wait(IDLE_S):
            pass
        return not self._stop.is_set()

    def _run(self) -> None:
        arena, moved = self._arena, 0
        for pause in PAUSES_S:
            if self._stop.wait(pause):
                return
            slots = [slot for slot in range(arena.slots) if arena.backed(slot)]
            whole = max(len(slots), self._expected) * (int(arena.slot_bytes) // HUGE * HUGE)
            before, moved = moved, sum(arena.use_huge_pages(slot, self._may_go) for slot in slots)
            if moved > before or not pause:
                log.info("arena in huge pages", extra={"bytes": moved, "of": whole})
            if moved >= whole:
                return

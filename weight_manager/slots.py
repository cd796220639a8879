"""Which slot the next session may fill: never the live one, never one that somebody may still be writing.

Making memory for a slot, and giving it back, takes a second for a few gigabytes. Both are done in a thread, and the
slot counts as being written meanwhile: the loop has leases to give.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from weight_manager.arena import Arena
from weight_manager.background import Background
from weight_manager.errors import PushRefused

log = logging.getLogger(__name__)

KEPT = 2
"""How many slots keep their memory, if nothing else is said."""


@dataclass(frozen=True)
class Reserved:
    """A slot that was given away before its session has begun. session: the id that it will have."""

    slot: int
    write_epoch: int
    session: str = field(default_factory=lambda: secrets.token_hex(8))


class Slots:
    """Gives slots away. Writers of our own (scatter and disk threads) are counted; trainers hold file locks."""

    def __init__(
        self,
        arena: Arena,
        background: Background,
        *,
        kept: int = KEPT,
        in_use: Callable[[], Collection[int]] = tuple,
        spared: Callable[[], int | None] = lambda: None,
    ) -> None:
        """kept: slots that keep their memory. in_use: those that are still read, beside the live one. spared: one that
        is taken only if there is no other."""
        self.arena = arena
        self._kept = kept
        self._in_use = in_use
        self._spared = spared
        self._background = background
        self._writers: Counter[int] = Counter()
        self._making = False  # memory for the spare
        self._failure: PushRefused | None = None  # there was none

    def enter(self, slot: int) -> None:
        """A thread of ours is about to write into the slot."""
        self._writers[slot] += 1

    def leave(self, slot: int) -> None:
        """The thread has stopped."""
        self._writers[slot] -= 1

    @property
    def quiet(self) -> bool:
        """No thread of ours makes, writes or reads any slot."""
        return not any(self._writers.values())

    def back(self, slot: int) -> None:
        """Give the slot memory before it is needed."""
        if not self.arena.backed(slot):
            self._do(slot, lambda: self.arena.back(slot), lambda _: None, _could_not)

    def prepare(self, live: int | None) -> bool:
        """Whether `take` has a slot, or none for a reason that time does not change. If the spare has to get memory
        first, that begins; the loop turns once it is done.
        """
        if self._making:
            return False
        free = self._free(live)
        if self._failure is not None or not free or any(self.arena.backed(slot) for slot in free):
            return True
        spare = free[0]
        self._making = True

        def done(_: None) -> None:
            self._making = False

        def failed(error: BaseException) -> None:
            self._making = False
            self._failure = PushRefused("io", str(error), retryable=True)

        self._do(spare, lambda: self.arena.back(spare), done, failed)
        return False

    def take(self, live: int | None, forget: Callable[[int], None]) -> tuple[int, int]:
        """(slot, write epoch): a slot to stage into, with memory behind it and its write epoch moved on.

        forget: called for each slot whose bytes are given up, before they are. The spare stands in while a stopped
        trainer holds its old slot, and gives its memory back once one is idle again. Raises PushRefused busy when every
        slot is held or memory is being made, io when there is none for the spare.
        """
        if not self.prepare(live):
            raise PushRefused("busy", "another slot of weights is getting its memory; try again", retryable=True)
        failure, self._failure = self._failure, None
        free = self._free(live)
        ready = [slot for slot in free if self.arena.backed(slot)]
        if not ready and failure is not None:
            raise failure
        if not ready:
            raise PushRefused(
                "busy",
                "every slot but the live one may still be written by a trainer that lost its lease; "
                "try again when it has gone on or exited",
                retryable=True,
            )
        chosen, *idle = ready
        if idle and sum(self.arena.backed(slot) for slot in range(self.arena.slots)) > self._kept:
            self._release(idle[0], forget)
        forget(chosen)
        return chosen, self.arena.bump(chosen)

    def reserve(self, live: int | None, forget: Callable[[int], None]) -> Reserved | None:
        """A slot for the session after this, with its write epoch moved on: whoever is told of it may write there
        before that session begins. None if there is none but what is spared. forget: as in `take`.
        """
        others = (slot for slot in self._unread(live) if slot != self._spared() and self.arena.backed(slot))
        slot = next(filter(self.arena.writers_gone, others), None)
        if slot is None:
            return None
        forget(slot)
        return Reserved(slot, self.arena.bump(slot))

    def holds(self, reserved: Reserved, live: int | None) -> bool:
        """Whether the slot is still whose it was. It may be being written, by nobody else."""
        is_free = reserved.slot in self._unread(live) and self.arena.backed(reserved.slot)
        return is_free and self.arena.write_epoch(reserved.slot) == reserved.write_epoch

    def _free(self, live: int | None) -> list[int]:
        return sorted(filter(self.arena.writers_gone, self._unread(live)), key=lambda slot: slot == self._spared())

    def _unread(self, live: int | None) -> list[int]:
        """Slots that nobody reads, and no thread of ours writes into."""
        used = {live, *self._in_use()}
        return [slot for slot in range(self.arena.slots) if slot not in used and not self._writers[slot]]

    def _release(self, slot: int, forget: Callable[[int], None]) -> None:
        forget(slot)
        self.arena.bump(slot)  # a replica that slept through two commits may still read it

        def failed(error: BaseException) -> None:
            log.error("slot %d keeps its memory: %s", slot, error)

        self._do(slot, lambda: self.arena.release(slot), lambda _: None, failed)

    def _do(
        self,
        slot: int,
        work: Callable[[], None],
        done: Callable[[None], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        def over(then: Callable[[], None]) -> None:
            self.leave(slot)
            then()

        self.enter(slot)
        self._background.submit(work, lambda _: over(lambda: done(None)), lambda error: over(lambda: failed(error)))


def _could_not(error: BaseException) -> None:
    log.warning("a slot got no memory ahead of its need: %s", error)

"""Which slot the next session may fill: never the live one, never one that somebody may still be writing."""

from collections import Counter

from rollout_client.errors import ArenaError
from weight_manager.arena import Arena
from weight_manager.errors import PushRefused


class Slots:
    """Gives slots away. Writers of our own (scatter and disk threads) are counted; trainers hold file locks."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._writers: Counter[int] = Counter()

    def enter(self, slot: int) -> None:
        """A thread of ours is about to write into the slot."""
        self._writers[slot] += 1

    def leave(self, slot: int) -> None:
        """It has stopped."""
        self._writers[slot] -= 1

    def take(self, live: int | None) -> tuple[int, int]:
        """(slot, write epoch): a slot to stage into, with memory behind it and its write epoch moved on.

        Slots that have memory come first; the spare stands in while a stopped trainer holds its old one, and
        gives its memory back once it is idle again. Raises PushRefused busy when every slot is held, io when
        there is no memory for the spare.
        """
        others = [slot for slot in range(self.arena.slots) if slot != live]
        free = [slot for slot in others if not self._writers[slot] and self.arena.writers_gone(slot)]
        if not free:
            raise PushRefused(
                "busy",
                "every slot but the live one may still be written by a trainer that lost its lease; "
                "try again when it has gone on or exited",
                retryable=True,
            )
        chosen = min(free, key=lambda slot: (not self.arena.backed(slot), slot))
        try:
            self.arena.back(chosen)
        except ArenaError as error:
            raise PushRefused("io", str(error), retryable=True) from error
        backed = [slot for slot in range(self.arena.slots) if self.arena.backed(slot)]
        for slot in backed:
            if len(backed) > 2 and slot in free and slot != chosen:
                self.arena.bump(slot)  # a replica that slept through two commits may still read it
                self.arena.release(slot)
                backed.remove(slot)
                break
        return chosen, self.arena.bump(chosen)

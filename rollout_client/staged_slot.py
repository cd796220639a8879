"""The arena as a trainer maps it: nothing can be written but the slot that is being staged, and only while it is.

A trainer keeps its mappings from push to push, as page tables of gigabytes take long to fill. What it staged last time
is served now, so a stray write through an old mapping (a bug in a kernel of its own, a tensor that was freed) would be
served as well. It is a crash of the trainer instead, by SIGSEGV, and what is served stays as it was proven.

Changing what a mapping allows walks its page tables: 0.1 ms for 540 MB in huge pages, which the store moves the arena
into after its start, and some 25 ms without them (Linux before 6.1, or huge_pages off), twice in a push.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rollout_client.aligned_map import protect
from rollout_client.arena_file import ArenaFile


class TrainerArena(ArenaFile):
    """`slot` is readable; `staging` makes one slot writable for a while. One thread at a time."""

    def __init__(self, path: str | Path) -> None:
        """Maps every slot that has memory. Raises ArenaError if `path` is no arena, OSError if it cannot be mapped."""
        super().__init__(path, write=True)
        try:
            for slot in range(self.slots):
                if self.backed(slot):
                    self.slot(slot)  # page tables now, not in the middle of the first push
        except BaseException:
            self.close()
            raise

    def slot(self, slot: int) -> memoryview:
        """See ArenaFile; read-only."""
        known = slot in self._maps
        view = super().slot(slot)
        if not known:
            protect(view, write=False)
        return view.toreadonly()

    @contextlib.contextmanager
    def staging(self, slot: int) -> Iterator[memoryview]:
        """The slot's bytes, writable until the end of the block, however that comes. Nothing may write after it."""
        self.slot(slot)
        view = self._maps[slot]
        protect(view, write=True)
        try:
            yield view
        finally:
            protect(view, write=False)

"""Reference-counted KV block numbers: who holds which, and which may be reused first."""

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Numbers 0..num_blocks-1. A block is held (count > 0), retained (count 0, content still wanted) or free."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was touched last is warm
        self._wanted: set[int] = set()
        self._retained: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self._reused: Callable[[int], None] = lambda _: None

    def on_reuse(self, callback: Callable[[int], None]) -> None:
        """Call this with a retained block just before it is given to someone else."""
        self._reused = callback

    @property
    def available(self) -> int:
        """Blocks `allocate` can give: free and retained."""
        return len(self._free) + len(self._retained)

    @property
    def used(self) -> int:
        """Blocks somebody holds."""
        return self.num_blocks - self.available

    def count(self, block: int) -> int:
        """How many hold this block."""
        return self._counts[block]

    def allocate(self) -> int:
        """A block nobody holds, now held once. Raises IndexError when there is none: check `available` first."""
        if self._free:
            block = self._free.pop()
        elif self._retained:
            block, _ = self._retained.popitem(last=False)
            self._wanted.discard(block)
            self._reused(block)
        else:
            raise IndexError("no KV block is available")
        self._counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more holder of a held or retained block."""
        if self._counts[block] == 0:
            del self._retained[block]
        self._counts[block] += 1

    def release(self, block: int) -> None:
        """One holder less."""
        assert self._counts[block] > 0, f"block {block} released twice"
        self._counts[block] -= 1
        if self._counts[block] == 0:
            if block in self._wanted:
                self._retained[block] = None
            else:
                self._free.append(block)

    def retain(self, block: int) -> None:
        """Keep the content of a held block once nobody holds it."""
        assert self._counts[block] > 0, f"block {block} is not held"
        self._wanted.add(block)

    def unretain(self, block: int) -> None:
        """The content is not wanted any more."""
        self._wanted.discard(block)
        if block in self._retained:
            del self._retained[block]
            self._free.append(block)

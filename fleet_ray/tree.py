"""Which store is above which: a tree that grows breadth first, and mends itself when a store goes."""

ROOT = ""
"""The store of the head."""


class Tree:
    """width: stores below each store; 0 = all below the head."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._above: dict[str, str] = {}

    def above(self, node: str) -> str:
        """Where a node's store joins."""
        return self._above[node]

    def add(self, node: str) -> str:
        """A node comes; returns the one above it."""
        if node not in self._above:
            self._above[node] = self._free(set())
        return self._above[node]

    def remove(self, node: str) -> list[str]:
        """A node goes; returns the ones whose store must join elsewhere."""
        if self._above.pop(node, None) is None:
            return []
        orphans = [child for child, above in self._above.items() if above == node]
        subtrees = {orphan: self._below(orphan) for orphan in orphans}
        for orphan in orphans:
            del self._above[orphan]
        for i, orphan in enumerate(orphans):
            hanging = set().union(*(subtrees[waiting] for waiting in orphans[i:]))
            self._above[orphan] = self._free(hanging)
        return orphans

    def depth(self, node: str) -> int:
        """Hops from the head."""
        return 0 if node == ROOT else 1 + self.depth(self._above[node])

    def _free(self, forbidden: set[str]) -> str:
        """The store highest in the tree that has room; of those the one that has been there longest."""
        if not self._width:
            return ROOT
        below = dict.fromkeys([ROOT, *(n for n in self._above if n not in forbidden)], 0)
        for above in self._above.values():
            if above in below:
                below[above] += 1
        return min((n for n, count in below.items() if count < self._width), key=self.depth)

    def _below(self, node: str) -> set[str]:
        """A node and all below it."""
        found = {node}
        while more := {n for n, above in self._above.items() if above in found} - found:
            found |= more
        return found

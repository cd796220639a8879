"""Which bytes have come: ranges that may arrive in any order, and never twice."""

import bisect


class Intervals:
    """Disjoint [start, stop) ranges, merged where they touch."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Add a range. False, and nothing is added, if any of it is there already."""
        if start == stop:
            return True
        i = bisect.bisect_right(self._starts, start)
        if (i > 0 and self._stops[i - 1] > start) or (i < len(self._starts) and self._starts[i] < stop):
            return False
        joins_left = i > 0 and self._stops[i - 1] == start
        joins_right = i < len(self._starts) and self._starts[i] == stop
        if joins_left and joins_right:
            self._stops[i - 1] = self._stops.pop(i)
            self._starts.pop(i)
        elif joins_left:
            self._stops[i - 1] = stop
        elif joins_right:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._stops.insert(i, stop)
        return True

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are not there, in order."""
        found = []
        i = max(bisect.bisect_right(self._starts, start) - 1, 0)
        for begin, end in zip(self._starts[i:], self._stops[i:], strict=True):
            if begin >= stop or start >= stop:
                break
            if begin > start:
                found.append((start, begin))
            start = max(start, end)
        if start < stop:
            found.append((start, stop))
        return found

    def covers(self, size: int) -> bool:
        """Whether all of [0, size) is there."""
        return size == 0 or (self._starts == [0] and self._stops == [size])

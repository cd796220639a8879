"""A histogram that takes samples in batches, as replicas report them."""

from bisect import bisect_left
from collections.abc import Iterable

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)


class Histogram:
    """Counts per bucket (upper bounds inclusive, the last one open) and the sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, samples: Iterable[float]) -> None:
        """Add samples."""
        for sample in samples:
            self._counts[bisect_left(self._bounds, sample)] += 1
            self.sum += sample

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count), as Prometheus writes them."""
        total, made = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            made.append((bound, float(total)))
        return made

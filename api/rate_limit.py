"""Requests per second and client; see ApiConfig.requests_per_s."""

from collections import OrderedDict

from api.errors import TooMany

TRACKED_CLIENTS = 10_000


class RateLimit:
    """A token bucket per client address; holds one second's worth of requests."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, now: float) -> None:
        """Count one request. Raises TooMany saying when to come back."""
        burst = max(1.0, self._per_s)
        left, last = self._buckets.pop(client, (burst, now))
        left = min(burst, left + (now - last) * self._per_s)
        self._buckets[client] = (max(left - 1.0, 0.0) if left >= 1.0 else left, now)
        if len(self._buckets) > TRACKED_CLIENTS:
            self._buckets.popitem(last=False)
        if left < 1.0:
            raise TooMany(f"over {self._per_s:g} requests a second; try again in {(1.0 - left) / self._per_s:.2f} s")

"""Counters of the store, read by the API when it is scraped. The store itself opens no HTTP port."""

from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "commits": "versions that went live",
    "commits_ahead": "versions that went live from device memory, before the arena had them",
    "rescued": "versions of these that came into the arena from device memory, not from their trainer",
    "versions_lost": "versions of these that were gone before the arena had them: an older one is served since",
    "sessions": "push sessions begun",
    "sessions_failed": "push sessions that ended without going live",
    "begins_refused": "Begin messages refused, nothing was staged",
    "bytes_staged": "bytes that trainers reported complete",
    "data_connections": "data connections, of trainers and stores below, that named a session's key",
    "bytes_verified": "bytes whose digest was found to match",
    "checksum_mismatches": "sessions ended by bytes that were not the trainer's",
    "non_finite": "pushed versions in which weights were seen that are NaN or infinite",
    "leases_expired": "sessions ended because a trainer was not heard of",
    "commits_rolled_back": "commits undone on every replica",
    "replicas_died": "replicas lost because a rank's process ended",
    "replicas_silent": "replicas told to register again because they did not answer",
    "bad_messages": "messages that could not be read or were out of place",
    "stray_messages": "messages of pushes that the store does not know: it restarted, or others took their place",
    "oversized_frames": "frames over the cap",
    "unauthorized": "connections with a wrong or missing token",
    "snapshots": "versions written to the state directory",
    "snapshots_failed": "snapshots that could not be written",
}


class Counters:
    """Monotonic counters of one store process."""

    def __init__(self) -> None:
        self._values: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Count; name is one of COUNTERS."""
        self._values[name] += amount

    def values(self) -> dict[str, float]:
        """The current value of every counter."""
        return dict(self._values)

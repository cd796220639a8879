"""Stands for WeightPublisher: records pushes, and is told what is live."""

from types import SimpleNamespace
from typing import Any

from rollout_client.push_report import PushReport


class ScriptedPublisher:
    """What a Pusher needs of a publisher."""

    live_run, live_version = "", 0

    def __init__(self, endpoint: str, **options: Any) -> None:
        self.endpoint, self.options = endpoint, options
        self.pushed: list[tuple[dict[str, Any], int, str]] = []
        self.error: Exception | None = None
        self.closed = False

    def connect(self) -> SimpleNamespace:
        return SimpleNamespace(live_run=self.live_run, live_version=self.live_version)

    def push(self, named: Any, version: int, *, in_flight: str, timeout_s: float) -> PushReport:
        if self.error is not None:
            raise self.error
        self.pushed.append((dict(named), version, in_flight))
        return PushReport(version, "d", 1, 8, "shm", {"total": 0.5}, {"0": float(version)})

    def close(self) -> None:
        self.closed = True

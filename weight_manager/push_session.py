"""The running push as an object: what it is, who owns it, how far it is. Its states are in session.py."""

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollout_client.protocol import Committed, InFlight
from weight_manager.errors import PushRefused
from weight_manager.staging import Staging

MAX_VERSION = (1 << 63) - 1
"""Versions travel as signed 64-bit integers between ranks."""
Source = Literal["push", "disk", "snapshot", "relay", "rollback"]


class Owner(Protocol):
    """Who pushes. Each is called at most once; `ended` instead of whatever did not happen."""

    def sealed(self, session: "PushSession") -> None:
        """Every byte is there and matches."""
        ...

    def committed(self, session: "PushSession", report: Committed) -> None:
        """The version is live on every replica."""
        ...

    def ended(self, session: "PushSession", refusal: PushRefused) -> None:
        """The session is gone; what is served has not changed."""
        ...


@dataclass(frozen=True)
class Intent:
    """What a push wants to become. run_id "" = the service's own loads."""

    run_id: str
    version: int
    source: Source
    client: str = ""
    in_flight: InFlight = "keep"
    transport: str = ""
    force: bool = False

    def __str__(self) -> str:
        by = f" by {self.client}" if self.client else ""
        run = f" of run {self.run_id!r}" if self.run_id else ""
        return f"version {self.version}{run} ({self.source}{by})"


@dataclass(eq=False)
class PushSession:
    """One attempt to make one version live. Times are monotonic seconds."""

    intent: Intent
    owner: Owner
    slot: int
    write_epoch: int
    staging: Staging
    mark: float  # when the current stage began
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    digest: str = ""  # of the whole version, once sealed
    deadline: float | None = None  # for what it is doing now
    sealing: bool = False  # everything was sent
    local_digest: str = ""  # of the version, sealed here but perhaps not on the stores below
    expected: str = ""  # digest that it must have
    gated: bool = False  # the store above says when to flip and whether to record
    decided: bool = False  # it has said: record
    catch_up: bool = False  # live above already
    quorum: bool = False  # stores below may miss it
    seconds: dict[str, float] = field(default_factory=dict)

    def lap(self, stage: str, now: float) -> None:
        """Note how long a stage took."""
        self.seconds[stage] = round(now - self.mark, 6)
        self.mark = now

    def extra(self) -> dict[str, Any]:
        """For log lines and errors."""
        return {"session": self.id, "version": self.intent.version, "run_id": self.intent.run_id}

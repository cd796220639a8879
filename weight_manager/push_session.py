"""The running push as an object: what it is, who owns it, how far it is. Its states are in life.py."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollout_client.protocol import AdapterInFlight, Committed
from weight_manager.errors import PushRefused
from weight_manager.history import History, Record
from weight_manager.life import Life, Role
from weight_manager.messages import Live
from weight_manager.staging import Staging

MAX_VERSION = (1 << 63) - 1
"""Versions travel as signed 64-bit integers between ranks."""
Source = Literal["push", "disk", "snapshot", "relay", "rollback", "merge"]


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
    in_flight: AdapterInFlight = "keep"
    transport: str = ""
    force: bool = False
    adapter: str = ""  # whose version it is; "": the model's

    def __str__(self) -> str:
        by = f" by {self.client}" if self.client else ""
        run = f" of run {self.run_id!r}" if self.run_id else ""
        whose = f" of adapter {self.adapter}" if self.adapter else ""
        return f"version {self.version}{whose}{run} ({self.source}{by})"

    def check_order(self, history: History) -> None:
        """Versions rise within a run, unless force says otherwise; the run's last may come again while another run's
        is live. Raises PushRefused stale_version.
        """
        last, live = history.last(self.run_id), history.live
        if self.force or last is None:
            return
        is_live = live is not None and live.run_id == self.run_id
        if self.version < last.version or (is_live and self.version == last.version):
            advice = "push a higher version, or under another run_id, or force it"
            message = f"{self} is not above {last.version}, the last of that run: {advice}"
            raise PushRefused("stale_version", message)

    def check_same(self, history: History, digest: str) -> None:
        """A version that went live before has the same bytes now. Raises PushRefused stale_version."""
        last = history.last(self.run_id)
        if last is not None and last.version == self.version and last.digest != digest and not self.force:
            advice = "push it as another version, or force it"
            message = f"{self} went live before as {last.digest} and is {digest} now: {advice}"
            raise PushRefused("stale_version", message)


@dataclass(eq=False)
class PushSession:
    """One attempt to make one version live. Times are monotonic seconds."""

    intent: Intent
    owner: Owner
    slot: int
    write_epoch: int
    staging: Staging
    mark: float  # when the current stage began
    role: Role = Role.ROOT
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    digest: str = ""  # of the version, once all of it is here and intact; stores below may still be busy
    deadline: float | None = None  # for what it is doing now
    expected: str = ""  # digest that it must have
    quorum: bool = False  # stores below may miss it
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.life = Life(self.role)

    def live(self, epoch: int) -> Live:
        """What would be live."""
        return Live(self.intent.run_id, self.intent.version, epoch, self.slot, self.digest, self.write_epoch)

    def record(self, live: Live, replicas: int) -> Record:
        """A line of the history."""
        return Record(
            *(live.run_id, live.version, live.epoch, live.digest, time.time(), self.intent.source, self.intent.client),
            bytes=self.staging.total_bytes,
            replicas=replicas,
            seconds=self.seconds,
        )

    def lap(self, stage: str, now: float) -> None:
        """Note how long a stage took."""
        self.seconds[stage] = round(now - self.mark, 6)
        self.mark = now

    def extra(self) -> dict[str, Any]:
        """For log lines and errors."""
        whose = {"adapter": self.intent.adapter} if self.intent.adapter else {}
        return {"session": self.id, "version": self.intent.version, "run_id": self.intent.run_id} | whose

    def described(self, now: float) -> dict[str, Any]:
        """For the status."""
        staging = self.staging
        return self.extra() | {
            "state": self.life.state.value,
            "source": self.intent.source,
            "client": self.intent.client,
            "transport": self.intent.transport,
            "slot": self.slot,
            "bytes": staging.total_bytes,
            "received_bytes": staging.received_bytes if staging.chunked else None,
            "verified_bytes": staging.verified_bytes,
            "deadline_s": round(self.deadline - now, 3) if self.deadline is not None else None,
        }

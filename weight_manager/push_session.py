"""One attempt to make one version live, and what is owed to who pushes it."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout_client.protocol import Committed
from weight_manager.checker import Checker
from weight_manager.errors import PushRefused
from weight_manager.history import Intent, Record
from weight_manager.life import Life, Role
from weight_manager.messages import Live
from weight_manager.staging import Staging


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


@dataclass(eq=False)
class PushSession:
    """One attempt to make one version live. Times are monotonic seconds."""

    intent: Intent
    owner: Owner
    slot: int
    write_epoch: int
    staging: Staging
    checker: Checker
    mark: float  # when the current stage began
    role: Role = Role.ROOT
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    digest: str = ""  # of the version, once all of it is here and intact; stores below may still be busy
    regions: bytes = b""  # with it: digests of its regions, for ranks that share it
    deadline: float | None = None  # for what it is doing now
    expected: str = ""  # digest that it must have
    quorum: bool = False  # stores below may miss it
    taken: bool = False  # replicas copy it from their trainer's memory
    told_until: float = 0.0  # of those, until when it need not be said again that it arrives
    is_live: Callable[[int], None] | None = None
    """Of one that goes live from device memory: told of it, and on how many."""
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
            merged=self.intent.merged,
        )

    def lap(self, stage: str, now: float) -> None:
        """Note how long a stage took."""
        self.seconds[stage] = round(now - self.mark, 6)
        self.mark = now

    def extra(self) -> dict[str, Any]:
        """Fields that name the session in log lines and errors."""
        whose = {"adapter": self.intent.adapter} if self.intent.adapter else {}
        return {"session": self.id, "version": self.intent.version, "run_id": self.intent.run_id} | whose

    def described(self, now: float) -> dict[str, Any]:
        """What the status shows of the session."""
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

"""One store below, as the store above sees it, and what it gets of a session."""

import socket
from dataclasses import dataclass, field
from typing import Any

from weight_manager.config import StoreConfig
from weight_manager.relay.feed import Feed
from weight_manager.relay.messages import Version
from weight_manager.relay.stream import Cursor, Stream


@dataclass(eq=False)
class Part:
    """A store's part in one session. required: the session fails without it."""

    session: str
    stream: Stream
    slot: memoryview
    required: bool
    catch_up: bool = False
    digest: str = ""  # of the version, once the slot is complete
    cursor: Cursor = field(default_factory=Cursor)
    key: bytes = b""  # for its data connection, which may not be there yet
    feed: Feed | None = None  # that connection; without it bytes go as chunks, as far as they are allowed
    allowed: int = 0  # bytes that may have been sent in all
    told: bool = False  # that everything was sent
    staged: bool = False
    out: str = ""  # why it does not take part any more

    @property
    def complete(self) -> bool:
        """Everything was read from the stream, and the store below has not been told so."""
        return bool(self.digest) and not self.told and self.cursor.item == len(self.stream.log)


@dataclass(eq=False)
class Link:
    """A store that has joined. Times are monotonic seconds."""

    store: str
    name: str
    identity: bytes
    holds: Version | None
    seen: float
    serves_until: float = 0.0  # the lease it was given last
    fenced: bool = False  # left behind by the running commit: no lease until that is over
    deaf: bool = False  # a message to it could not be queued
    stores: int = 1  # of its subtree, itself included
    part: Part | None = None

    def status(self, live: Version | None, now: float) -> dict[str, Any]:
        """As the API shows it."""
        part = self.part
        return {
            "version": self.holds.version if self.holds else None,
            "ready": self.holds is not None and self.holds == live and not self.fenced,
            "seen_s": round(now - self.seen, 3),
            "fenced": self.fenced,
            "behind_bytes": part.stream.logged - part.cursor.sent if part and not part.out else 0,
            "sent_bytes": part.cursor.sent if part else None,
            "staged": part.staged if part else None,
            "catching_up": part.catch_up if part else False,
            "out": part.out if part else "",
        }


def own_name(config: StoreConfig, store: str) -> str:
    """What a store is called by the one above; no other store is."""
    return f"{config.name}@{socket.gethostname()}-{store}"

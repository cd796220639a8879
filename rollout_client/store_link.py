"""A publisher's way to its store, and what it keeps from push to push: its greeting, the arenas that are mapped, and of
each name what the store has answered to its parts and where the next push goes. One thread at a time.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from rollout_client.channel import Channel, ConnectionLost
from rollout_client.curve import TrainerKeys
from rollout_client.delta import Kept
from rollout_client.errors import ArenaError, DeadlineExceeded, RolloutError, SessionLost, StoreUnavailable
from rollout_client.protocol import Abort, Aborted, Committed, Copy, Hello, Message, Part, Placement, Welcome
from rollout_client.shm_transport import ShmTransport
from rollout_client.transport import Transport
from rollout_client.zmq_transport import ZmqTransport

BUSY_PAUSE_S = 0.1
ABORT_S = 2.0
REPLY_MARGIN_S = 5.0
R = TypeVar("R", bound=Message)


@dataclass(frozen=True)
class Plan:
    """What the store answered to these parts, and calls by this name."""

    name: str
    parts: list[Part]
    copies: list[Copy]

    @cached_property
    def known(self) -> dict[str, Part]:
        """By name, parts that are whole tensors."""
        return {part.name: part for part in self.parts if not part.local_shape and part.flat is None}


class StoreLink:
    """shm: the way into the model's arena; adapter_shm: into those of adapters. plans, kept, ahead: of the last push of
    the model's weights, "", and of each adapter's: what the store answered, what deltas are made against, and where the
    next one goes.
    """

    def __init__(self, endpoint: str, keys: TrainerKeys | None, hello: Hello, *, transport: str, delta: bool) -> None:
        """transport, delta: as `WeightPublisher` has them. Raises ValueError for an endpoint ZMQ cannot parse."""
        self.channel = Channel(endpoint, keys)
        self.shm: ShmTransport | None = None
        self.adapter_shm: dict[str, ShmTransport] = {}
        self.plans: dict[str, Plan] = {}
        self.kept: dict[str, Kept] = {}
        self.ahead: dict[str, Placement] = {}
        self.welcomed: tuple[tuple[int, int] | None, Welcome] | None = None  # on which connection, and how
        self._hello, self._wanted, self._delta = hello, transport, delta

    def adapters_arena(self, name: str, placement: Placement) -> ShmTransport:
        """The way into an adapter's own arena, kept from push to push. Raises SessionLost where that is gone with the
        session, as with a trainer that was stopped for longer than its lease, and ArenaError.
        """
        shm = self.adapter_shm.get(name)
        if shm is not None and not shm.serves(placement.arena_nonce):
            shm.close()
            shm = None
        shm = shm or ShmTransport.reach(placement.arena_path, placement.arena_nonce)
        if shm is None and not Path(placement.arena_path).exists():
            raise SessionLost("unknown_session", f"the store has removed the arena of {name}", retryable=True)
        if shm is None:
            raise ArenaError(f"{placement.arena_path} of adapter {name} cannot be written from here")
        self.adapter_shm[name] = shm
        return shm

    def connect(self, timeout_s: float, whose: str, *, known: bool = False) -> tuple[Welcome, Transport]:
        """The store's welcome, and the way for the bytes of a push. Raises as `Channel.request`, and ArenaError.

        whose: of what is pushed next: an adapter's name, or "" for the model's weights. known: a store that has
        welcomed this connection need not do it again; what it said of live versions is then of that time.
        """
        if known and self.welcomed is not None and self.welcomed[0] == self.channel.connection is not None:
            welcome = self.welcomed[1]
        else:
            welcome = self._greet(timeout_s)
        if self.shm is not None and not self.shm.serves(welcome.arena_nonce):
            self.shm.close()
            self.shm = None
        if self.shm is None and self._wanted != "zmq":
            self.shm = ShmTransport.reach(welcome.arena_path, welcome.arena_nonce)
        if self.shm is not None:
            return welcome, self.shm
        if self._wanted == "shm":
            raise ArenaError(f"the store's arena {welcome.arena_path} cannot be written from here: use transport='zmq'")
        port = 0 if self.channel.data_port_closed else welcome.data_port
        kept = self.kept.setdefault(whose, Kept()) if self._delta else None
        return welcome, ZmqTransport(self.channel, welcome.max_frame, kept, port)

    def _greet(self, timeout_s: float) -> Welcome:
        """Say hello, to whatever store there is."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                welcome = self.channel.request(self._hello, Welcome, timeout_s=left(end))
            except ConnectionLost:
                continue  # there is a store again: say it to that one
            except StoreUnavailable:
                self.channel.reset()
                raise
            self.welcomed = self.channel.connection, welcome
            for name in {*self.adapter_shm, *self.kept, *self.plans} - {"", *welcome.adapters}:
                self.forget(name)
            return welcome

    def forget(self, name: str) -> None:
        """Let go of what is kept for pushes of an adapter, which is loaded no more."""
        self.kept.pop(name, None)
        self.plans.pop(name, None)
        self.ahead.pop(name, None)
        shm = self.adapter_shm.pop(name, None)
        if shm is not None:
            shm.close()

    def ask(
        self,
        message: Message,
        answer: type[R] | tuple[type[R], ...],
        deadline: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> R:
        """The store keeps the deadline that it is told; it gets a little longer to say so."""
        if left(deadline) <= 0:
            raise DeadlineExceeded("deadline", "the push did not end in time")
        patience = left(deadline) + REPLY_MARGIN_S
        return self.channel.request(message, answer, timeout_s=patience, meanwhile=meanwhile)

    def answer(self, message: Message, answer: type[R] | tuple[type[R], ...], deadline: float, losses: int) -> R:
        """The answer, or the next one, to what was sent; see `Channel.answer`."""
        patience = left(deadline) + REPLY_MARGIN_S
        return self.channel.answer(message, answer, timeout_s=patience, losses=losses)

    def close(self) -> None:
        """Disconnect and unmap. Idempotent."""
        for shm in (self.shm, *self.adapter_shm.values()):
            if shm is not None:
                shm.close()
        self.shm = None
        self.adapter_shm.clear()
        self.channel.close()

    def abort(self, session: str) -> None:
        """Best effort: a store that does not hear it undoes the session when the lease runs out."""
        with contextlib.suppress(RolloutError):
            self.channel.request(Abort(session, "given up by the trainer"), Aborted, timeout_s=ABORT_S)
        self.channel.reset()

    def went_live(self, whose: str, version: int, before: Welcome, until: float) -> Committed | None:
        """The store fell silent; had it committed already? None = no, or it cannot be known.

        until: a store that has not restarted may still be committing, so long.
        """
        if _live(before, whose) == (self._hello.run_id, version):
            return None
        while True:
            try:
                now = self.connect(ABORT_S, whose)[0]
            except RolloutError:
                return None
            if _live(now, whose) == (self._hello.run_id, version):
                return Committed(version, "", 0, {}, {})
            if now.store_id != before.store_id or time.monotonic() >= until:
                return None
            time.sleep(BUSY_PAUSE_S)


def _live(welcome: Welcome, whose: str) -> tuple[str, int | None]:
    """Run and version that is served: of an adapter, or of the model's weights, ""."""
    return welcome.adapters.get(whose, ("", None)) if whose else (welcome.live_run, welcome.live_version)


def left(deadline: float) -> float:
    """Seconds until it, a monotonic time; none after it."""
    return max(deadline - time.monotonic(), 0.0)

"""The store above: joining it, the lease it gives, and its sessions carried out here. Steps: relay/messages.py.

`tick` runs once per turn of the loop and says upward whatever has become true since.
"""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from rollout_client.curve import TrainerKeys
from rollout_client.protocol import MAX_HEADER_BYTES
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.data_plane import DataPlane
from weight_manager.errors import IllegalTransition, PushRefused
from weight_manager.life import Event, State
from weight_manager.relay import messages as wire
from weight_manager.relay.downstreams import Downstreams
from weight_manager.relay.lease import Lease
from weight_manager.relay.messages import Version, version_of
from weight_manager.relay.relayed import DataRoute, Relayed
from weight_manager.watching import Watching
from weight_manager.wire import TURN_MESSAGES, UNREADABLE


def connect(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: TrainerKeys | None) -> "zmq.Socket[bytes]":
    """Bounded by the credit that is given, not by a queue of messages. keys: for a store above that wants some."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.IPV6, 1 if "[" in endpoint else 0)
    if keys is not None:
        keys.hold(socket)
    socket.connect(endpoint)
    return socket


def drain(socket: "zmq.Socket[bytes]") -> None:
    """Throw the rest of a message away."""
    while socket.get(zmq.RCVMORE):
        socket.recv(copy=False)


def receive_payload(socket: "zmq.Socket[bytes]", buffers: Sequence[memoryview] | None) -> bool:
    """The payload frames of a message into these buffers; False if they do not fit, or None: thrown away."""
    fits = buffers is not None
    for buffer in buffers or ():
        if not socket.get(zmq.RCVMORE) or socket.recv_into(buffer) != len(buffer):
            fits = False
            break
    if socket.get(zmq.RCVMORE):
        drain(socket)
        fits = False
    return fits


log = logging.getLogger(__name__)

JOIN_AGAIN_S = 1.0
FAILED_AGAIN_S = 2.0
REFUSED_AGAIN_S = 5.0
DOUBT_S = 2.0
BEATS = 30
"""Per lease. A store hands on what is left of its own lease, so each hop costs up to the time between two beats: with
six a lease, stores seven hops below the root had none at times."""


def own_name(config: StoreConfig, store: str) -> str:
    """What a store is called by the one above; no other store is."""
    return f"{config.name}@{socket.gethostname()}-{store}"


class Upstream:
    """One DEALER, and at most one session of the store above."""

    def __init__(
        self,
        config: StoreConfig,
        coordinator: Coordinator,
        below: Downstreams,
        *,
        lease: Lease,
        data: DataPlane,
        connect: Callable[[], "zmq.Socket[bytes]"],
        watching: Watching,
    ) -> None:
        """connect: a new connection."""
        assert config.upstream is not None
        self._config = config
        self._endpoint = config.upstream
        self._coordinator = coordinator
        self._below = below
        self._data = data
        self._connect = connect
        self._watching = watching
        self._store = coordinator.history.saved.id
        self._name = own_name(config, self._store)
        self._joined = self._deaf = False
        self._next_join = self._next_beat = self._heard = 0.0
        self._doubt_since = 0.0
        self._ask_again = float("inf")
        self.lease = lease
        self._was_closed = True
        self._next: wire.Stage | None = None
        self.relayed: Relayed | None = None
        self.refusal = ""
        self._route = DataRoute(config.upstream)
        self.socket = self._connect()
        watching.add(self.socket)

    @property
    def in_doubt(self) -> bool:
        """All replicas here have flipped, and only the store above knows whether the version was committed."""
        return self._coordinator.in_doubt

    def status(self, now: float) -> dict[str, Any]:
        """What the API shows of the store above."""
        return {
            "endpoint": self._endpoint,
            "joined": self._joined,
            "fenced": self.lease.closed,
            "lease_s": round(self.lease.left_s(now), 3),
            "in_doubt": self.in_doubt,
            "refusal": self.refusal,
        }

    def receive(self) -> None:
        """Take what lies in the socket, and hand it on."""
        socket = self.socket
        for _ in range(TURN_MESSAGES):
            if socket is not self.socket:
                return
            try:
                head = socket.recv(flags=zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            try:
                message = wire.decode_from_above(head.buffer)
            except UNREADABLE as error:
                log.error("the store above sent what cannot be read: %s", error)
                drain(socket)
                continue
            self._heard = time.monotonic()
            try:
                if isinstance(message, wire.Chunk):
                    self._chunk(socket, message, self._heard)
                else:
                    drain(socket)
                    self._handle(message, self._heard)
            except IllegalTransition:
                raise  # nobody knows what is live any more
            except Exception:
                log.exception("a %s of the store above could not be handled", type(message).__name__)
                self._lost("sent what could not be handled", self._heard, JOIN_AGAIN_S)
                return

    def tick(self, now: float) -> bool:
        """Say what has become true, keep the membership up. Returns whether serving has just become allowed."""
        coordinator = self._coordinator
        if self._deaf:
            self._lost("takes no more messages", now, JOIN_AGAIN_S)
        elif self._joined and now >= self._heard + self._config.relay_lease_s * 0.6:
            self._lost("is silent", now)
        if (not self._joined and now >= self._next_join) or now >= self._ask_again:
            self._join(now)
        if self._joined and now >= self._next_beat:
            self._beat(now)
        live = coordinator.history.live
        free = self._next is not None and coordinator.session is None and coordinator.settled
        if self._next is not None and free and coordinator.slots.prepare(live.slot if live else None):
            stage, self._next = self._next, None
            try:
                self._begin(stage, now)
            except IllegalTransition:
                raise
            except Exception:
                log.exception("the session of the store above could not be begun")
                self._lost("began what could not be begun", now, JOIN_AGAIN_S)
        relayed = self.relayed
        if relayed is not None:
            relayed.tick(now)
        if relayed is not None and relayed.session is not None and relayed.session is coordinator.session:
            self._vote(relayed, relayed.session.life.state, now)
        if self.in_doubt and now >= self._doubt_since + DOUBT_S:
            self._doubt_since = now
            self._join(now)
        closed, before = self.lease.closed, self._was_closed
        if closed != before:
            self._was_closed = closed
            coordinator.changes += 1
            log.warning("fenced: no lease from above" if closed else "may serve: the lease from above is good")
        return before and not closed

    def next_deadline(self) -> float:
        """When `tick` has something to do."""
        times = [self._next_beat, self._heard + self._config.relay_lease_s * 0.6] if self._joined else [self._next_join]
        if not self._was_closed:
            times.append(self.lease.until)
        if self.in_doubt:
            times.append(self._doubt_since + DOUBT_S)
        times.append(self._ask_again)
        times.append(self.relayed.lost_at if self.relayed is not None else times[0])
        return min(times)

    def close(self) -> None:
        """Nothing is served here from now on; tell the store above."""
        self.lease.fence()
        if self._joined:
            self.send(wire.Leave())
        self.socket.close(linger=500)

    def send(self, message: wire.FromBelow) -> None:
        """Send to the store above. If it takes no message, one is missing from what it knows of us: we join again."""
        try:
            self.socket.send(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            self._deaf = True

    def failed_to_catch_up(self, now: float) -> None:
        """Ask to be brought there again, a little later."""
        self._ask_again = now + FAILED_AGAIN_S

    def beat_soon(self) -> None:
        """The lease is due now."""
        self._next_beat = 0.0

    def _lost(self, why: str, now: float, pause_s: float = 0.0) -> None:
        """Begin again on a new connection, after so long."""
        log.warning("the store above %s; joining again", why)
        self._joined = self._deaf = False
        self._coordinator.changes += 1
        self._forget(f"the store above {why}", now)
        old, self.socket = self.socket, self._connect()
        self._watching.remove(old)
        old.close(linger=0)
        self._watching.add(self.socket)
        self._next_join = now + pause_s

    def _forget(self, why: str, now: float) -> None:
        """End what the store above began, unless it may be committed there."""
        self._next = None
        session = self.relayed.session if self.relayed is not None else None
        if session is not None and session is self._coordinator.session:
            refusal = PushRefused("aborted", why, retryable=True)
            self._coordinator.abort(session, refusal, now, Event.ABOVE_LOST)

    def _join(self, now: float) -> None:
        self._next_join, self._ask_again = now + JOIN_AGAIN_S, float("inf")
        live = self._coordinator.history.live
        layout = self._coordinator.layout.digest
        self.send(wire.Join(self._store, self._name, layout, version_of(live), self._config.token or ""))

    def _beat(self, now: float) -> None:
        self._next_beat = now + self._config.relay_lease_s / BEATS
        holds = version_of(self._coordinator.history.live)
        self.send(wire.Beat(self.lease.ask(now, holds), holds))

    def _handle(self, message: wire.FromAbove, now: float) -> None:
        relayed = self.relayed
        match message:
            case wire.Joined():
                self._welcomed(message, now)
            case wire.NotJoined():
                self._turned_away(message, now)
            case wire.Lease():
                self.lease.given(message.seq, message.lease_s, version_of(self._coordinator.history.live))
            case wire.Stage():
                self._forget("the store above has begun another session", now)
                self._next = message
            case wire.Rollback():
                self._rollback(message, now)
            case wire.Prepare() | wire.Flip() if relayed is None or relayed.id != message.session:
                self.send(wire.no(message, "the session is not known here"))
            case wire.Claims() | wire.Seal() | wire.Prepare() | wire.Flip() | wire.Finalize() if relayed:
                if relayed.id == message.session:
                    relayed.take(message, now)
            case _:
                pass

    def _welcomed(self, message: wire.Joined, now: float) -> None:
        self._joined, self.refusal, self._heard = True, "", now
        self._coordinator.changes += 1
        session, ballot = self._coordinator.session, self._coordinator.ballot
        if self.in_doubt and session is not None and ballot is not None:
            if message.live == version_of(ballot.live):
                self._coordinator.recorded_above(session, now)
            else:
                # It may have restarted and not yet know what is live; its next lease says that it does.
                self.lease.fence()
                refusal = PushRefused("aborted", "the store above did not commit it")
                self._coordinator.abort(session, refusal, now, Event.WITHDRAWN)
        elif message.session not in (self._next and self._next.session, self.relayed and self.relayed.id):
            self._forget("the store above has taken us in anew", now)
        self._beat(now)

    def _turned_away(self, message: wire.NotJoined, now: float) -> None:
        self._joined = False
        self._coordinator.changes += 1
        self._forget(message.message, now)
        if message.refused:
            self.refusal = message.message
            log.error("the store above refuses us: %s", message.message)
        self._next_join = now + (REFUSED_AGAIN_S if message.refused else 0.0)

    def _rollback(self, message: wire.Rollback, now: float) -> None:
        if message.fence:
            self.lease.fence()
        if self._next is not None and self._next.session == message.session:
            self._next = None
        relayed, session = self.relayed, self._coordinator.session
        if relayed is not None and relayed.id == message.session and session is not None and session is relayed.session:
            self._coordinator.abort(session, PushRefused("aborted", message.reason), now, Event.WITHDRAWN)
        else:
            self.over(message.session)

    def over(self, session: str, stall_ms: dict[str, float] | None = None) -> None:
        """A finalize or rollback is carried out."""
        fenced = self.lease.closed and not self._below.serving(time.monotonic())
        if fenced:
            self.lease.fence()  # one that is on its way would make it untrue
        self.send(wire.Over(session, fenced, stall_ms or {}))

    def _begin(self, stage: wire.Stage, now: float) -> None:
        history = self._coordinator.history
        named = Version(stage.run_id, stage.version, stage.digest)
        if stage.catch_up and version_of(history.live) == named:
            self.send(wire.Holds(named))
            self.beat_soon()
            return
        self.relayed = Relayed(stage, self._coordinator, self._below, self, self._config, self._data, self._route)
        self.relayed.start(now)

    def _vote(self, relayed: Relayed, state: State, now: float) -> None:
        ballot = self._coordinator.ballot
        if ballot is None:
            return
        if state is State.READY and relayed.voted == "":
            relayed.voted = "prepare"
            self.send(wire.Vote(relayed.id, "prepare", stores=ballot.stores, replicas=ballot.replicas))
        elif state is State.DOUBT and relayed.voted == "prepare":
            relayed.voted = "flip"
            self._doubt_since = now
            self.send(wire.Vote(relayed.id, "flip", stores=ballot.stores, replicas=ballot.replicas))

    def _chunk(self, socket: "zmq.Socket[bytes]", chunk: wire.Chunk, now: float) -> None:
        relayed = self.relayed
        buffers = relayed.destinations(chunk, now) if relayed and relayed.id == chunk.session else None
        if receive_payload(socket, buffers) and relayed is not None:
            relayed.received(chunk, now)

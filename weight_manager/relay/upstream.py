"""The store above: joining it, the lease it gives, and its sessions carried out here, one at a time of each line.
Steps: relay/messages.py.

`tick` runs once per turn of the loop and says upward whatever has become true since.
"""

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import zmq

from rollout_client.curve import TrainerKeys
from rollout_client.protocol import MAX_HEADER_BYTES
from weight_manager.adapters.lines import Lines
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.data_plane import DataPlane
from weight_manager.errors import UNREADABLE, IllegalTransition, PushRefused
from weight_manager.life import Event
from weight_manager.relay import messages as wire
from weight_manager.relay.lease import Lease
from weight_manager.relay.members import Members
from weight_manager.relay.messages import VersionName, version_of
from weight_manager.relay.relayed import DataRoute, Relayed
from weight_manager.watching import Watching
from weight_manager.wire import TURN_MESSAGES, drain, receive_payload


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


log = logging.getLogger(__name__)

JOIN_AGAIN_S = 1.0
FAILED_AGAIN_S = 2.0
REFUSED_AGAIN_S = 5.0
DOUBT_S = 2.0
TRY_AGAIN_S = 0.1
BEATS = 30
"""Per lease. A store hands on what is left of its own lease, so each hop costs up to the time between two beats: with
six a lease, stores seven hops below the root had none at times."""


def own_name(config: StoreConfig, store: str) -> str:
    """What a store is called by the one above; no other store is."""
    return f"{config.name}@{socket.gethostname()}-{store}"


class Upstream:
    """One DEALER. next, relayed: sessions of the store above that have to wait for the one before, and that were begun;
    by line: an adapter's name, "" = the model.
    """

    def __init__(
        self,
        config: StoreConfig,
        coordinator: Coordinator,
        lines: Lines,
        members: Members,
        *,
        lease: Lease,
        data: DataPlane,
        connect: Callable[[], "zmq.Socket[bytes]"],
        watching: Watching,
    ) -> None:
        """coordinator, data: of the model. connect: a new connection."""
        assert config.upstream is not None
        self._config = config
        self._endpoint = config.upstream
        self._coordinator = coordinator
        self._lines = lines
        self._members = members
        self._data = data
        self._connect = connect
        self._watching = watching
        self._store = coordinator.history.saved.id
        self._name = own_name(config, self._store)
        self._joined = self._deaf = False
        self._next_join = self._next_beat = self._heard = 0.0
        self._ask_in_doubt = float("inf")
        self._leaving: list[str] = []  # as it was said above
        self._try_again = float("inf")  # what is next: every slot was held
        self._ask_again = float("inf")
        self.lease = lease
        self._was_closed = True
        self.next: dict[str, wire.Stage] = {}
        self.relayed: dict[str, Relayed] = {}
        self._told: dict[str, str] = {}  # the session that was told last, by line; its bytes come once
        self.refusal = ""
        self._route = DataRoute(config.upstream)
        self.socket = self._connect()
        watching.add(self.socket)

    @property
    def in_doubt(self) -> bool:
        """Only the store above knows whether a version that this store has voted for was committed."""
        return any(relayed.in_doubt for relayed in self.relayed.values())

    def status(self, now: float) -> dict[str, Any]:
        """What the API shows of the store above."""
        return {
            "endpoint": self._endpoint,
            "joined": self._joined,
            "fenced": self.lease.closed,
            "lease_s": round(self.lease.left_s, 3),
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
        self._try_again = float("inf")
        for stage in list(self.next.values()):
            try:
                self._begin(stage, now)
            except IllegalTransition:
                raise
            except Exception:
                log.exception("the session of the store above could not be begun")
                self._lost("began what could not be begun", now, JOIN_AGAIN_S)
                break
        for relayed in list(self.relayed.values()):
            relayed.tick(now)
        self.relayed = {line: relayed for line, relayed in self.relayed.items() if relayed.running}
        if not self.in_doubt:
            self._ask_in_doubt = float("inf")
        elif self._ask_in_doubt == float("inf"):
            self._ask_in_doubt = now + DOUBT_S
        elif now >= self._ask_in_doubt:
            self._ask_in_doubt = now + DOUBT_S
            self._join(now)
        if self._joined and (now >= self._next_beat or self._leaving != self._lines.leaving):
            self._beat(now)
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
            times.append(time.monotonic() + self.lease.left_s)
        times += [self._ask_in_doubt, self._ask_again, *([self._try_again] if self.next else [])]
        return min([*times, *(relayed.lost_at for relayed in self.relayed.values())])

    def close(self) -> None:
        """Nothing is served here from now on; tell the store above."""
        self.lease.fence()
        if self._joined:
            self.send(wire.Leave(self._members.serving(time.monotonic())))
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
        """Ask for a lease at the next tick."""
        self._next_beat = 0.0

    def _lost(self, why: str, now: float, pause_s: float = 0.0) -> None:
        """Begin again on a new connection, after so long."""
        log.warning("the store above %s; joining again", why)
        self._joined = self._deaf = False
        self._coordinator.changes += 1
        self._forget_all(f"the store above {why}", now)
        old, self.socket = self.socket, self._connect()
        self._watching.remove(old)
        old.close(linger=0)
        self._watching.add(self.socket)
        self._next_join = now + pause_s

    def _forget_all(self, why: str, now: float) -> None:
        for line in sorted({*self.next, *self.relayed}):
            self._forget(line, why, now)
        self._told.clear()

    def _forget(self, line: str, why: str, now: float) -> None:
        """End what the store above began, unless it may be committed there."""
        self.next.pop(line, None)
        self._told.pop(line, None)
        relayed = self.relayed.get(line)
        if relayed is not None:
            relayed.end(why, now, Event.ABOVE_LOST)

    def _join(self, now: float) -> None:
        self._next_join, self._ask_again = now + JOIN_AGAIN_S, float("inf")
        # The store above answers with what we do not take part in, and that may be a session that has failed here.
        self._told = {line: told for line, told in self._told.items() if line in self.next or line in self.relayed}
        layout = self._coordinator.layout.digest
        self.send(wire.Join(self._store, self._name, layout, self._members.live(), self._config.token or ""))

    def _beat(self, now: float) -> None:
        self._next_beat = now + self._config.relay_lease_s / BEATS
        self._leaving, holds = self._lines.leaving, self._members.live()
        self.send(wire.Beat(self.lease.ask(holds), holds, self._leaving))

    def _handle(self, message: wire.FromAbove, now: float) -> None:
        match message:
            case wire.Joined():
                self._welcomed(message, now)
            case wire.NotJoined():
                self._turned_away(message, now)
            case wire.Lease():
                self.lease.given(message.seq, message.lease_s, self._members.live())
            case wire.Adapters():
                self._lines.keep(message.names, now + self._config.max_deadline_s)
                known = {"", *message.names, *self.next, *self.relayed}  # names come and go for weeks
                self._told = {line: told for line, told in self._told.items() if line in known}
                self.beat_soon()
            case wire.Stage() if self._told.get(message.line) == message.session:
                pass  # told twice: begun again it would lack what has come
            case wire.Stage():
                self._forget(message.line, "the store above has begun another session", now)
                self.next[message.line], self._told[message.line] = message, message.session
            case wire.Rollback():
                self._rollback(message, now)
            case wire.Claims() | wire.Seal() | wire.Prepare() | wire.Flip() | wire.Finalize():
                relayed = self._relayed(message.session)
                if relayed is not None:
                    relayed.take(message, now)
                elif isinstance(message, wire.Prepare | wire.Flip):
                    self.send(wire.no(message, "the session is not known here"))
            case _:
                pass

    def _relayed(self, session: str) -> Relayed | None:
        return next((relayed for relayed in self.relayed.values() if relayed.id == session), None)

    def _welcomed(self, message: wire.Joined, now: float) -> None:
        self._joined, self.refusal, self._heard = True, "", now
        self._coordinator.changes += 1
        for line in sorted({*self.next, *self.relayed}):
            relayed, stage = self.relayed.get(line), self.next.get(line)
            known = {relayed.id if relayed else "", stage.session if stage else ""}
            if relayed is not None and relayed.in_doubt:
                decided = relayed.id not in message.undecided
                if decided and not relayed.recorded_above(message.live.of(line), now):
                    # It may have restarted and not yet know what is live; its next lease says that it does.
                    self.lease.fence()
                    relayed.end("the store above did not commit it", now, Event.WITHDRAWN)
            elif not known.intersection(message.sessions):
                self._forget(line, "the store above has taken us in anew", now)
        self._beat(now)

    def _turned_away(self, message: wire.NotJoined, now: float) -> None:
        self._joined = False
        self._coordinator.changes += 1
        self._forget_all(message.message, now)
        if message.refused:
            self.refusal = message.message
            log.error("the store above refuses us: %s", message.message)
        self._next_join = now + (REFUSED_AGAIN_S if message.refused else 0.0)

    def _rollback(self, message: wire.Rollback, now: float) -> None:
        if message.fence:
            self.lease.fence()
        self.next = {line: stage for line, stage in self.next.items() if stage.session != message.session}
        relayed = self._relayed(message.session)
        if relayed is None or not relayed.end(message.reason, now, Event.WITHDRAWN):
            self.over(message.session)

    def over(self, session: str, stall_ms: dict[str, float] | None = None) -> None:
        """A finalize or rollback is carried out."""
        fenced = self.lease.closed and not self._members.serving(time.monotonic())
        if fenced:
            self.lease.fence()  # one that is on its way would make it untrue
        self.send(wire.Over(session, fenced, stall_ms or {}))

    def _begin(self, stage: wire.Stage, now: float) -> None:
        """Once the session before is out of the way, and there is a slot."""
        refused: PushRefused | None = None
        coordinator, data = self._coordinator, self._data
        if stage.adapter is not None:
            try:
                line = self._lines.of_shape(stage.adapter.name, stage.adapter.shape)
            except PushRefused as refusal:
                if refusal.code == "busy":
                    return
                refused = refusal
            else:
                coordinator, data = line.coordinator, line.data
        live = coordinator.history.live
        if refused is None and not (coordinator.session is None and coordinator.settled):
            return
        named = VersionName(stage.run_id, stage.version, stage.digest)
        relayed = Relayed(stage, coordinator, self, self._config, data, self._route)
        if refused is not None:
            relayed.refuse(refused, now)
        elif stage.catch_up and version_of(live) == named:
            self.send(wire.Holds(named, stage.line, moving=coordinator.ballot is not None))
            self.beat_soon()
        elif not coordinator.slots.prepare(live.slot if live else None):
            return
        elif relayed.start(now):
            self.relayed[stage.line] = relayed
        else:
            self._try_again = now + TRY_AGAIN_S
            return
        del self.next[stage.line]

    def _chunk(self, socket: "zmq.Socket[bytes]", chunk: wire.Chunk, now: float) -> None:
        relayed = self._relayed(chunk.session)
        buffers = relayed.destinations(chunk, now) if relayed is not None else None
        if receive_payload(socket, buffers) and relayed is not None:
            relayed.received(chunk, now)

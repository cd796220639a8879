"""A session of the store above, carried out here: the bytes into a slot of ours, the commit gated by its word.

The bytes come through a data connection (a thread, roster.py has the format) or, where there is none, as chunks.
"""

import logging
import socket
import threading
import time
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rollout_client.data_socket import CONNECT_S, MAGIC, READY
from rollout_client.digest import Digest
from rollout_client.protocol import Committed, Copy
from rollout_client.versions import MAX_VERSION
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.data_plane import (
    PIECE_BYTES,
    Arrived,
    DataPlane,
    Ended,
    Finished,
    Hear,
    News,
    Receiver,
    SocketReader,
    Taken,
    Unconnected,
)
from weight_manager.errors import PushRefused
from weight_manager.history import Intent
from weight_manager.layout import ITEMSIZE, Layout
from weight_manager.life import Event, Go, Refused, Role, State
from weight_manager.messages import Live
from weight_manager.push_session import PushSession
from weight_manager.relay import messages as wire
from weight_manager.relay.roster import CLAIM, END, RECORD
from weight_manager.staging import Staging

if TYPE_CHECKING:
    from weight_manager.relay.upstream import Upstream  # which makes us

log = logging.getLogger(__name__)

AGAIN_S = 60.0
"""Seconds for which chunks are wanted after a data connection that failed."""


class DataRoute:
    """How bytes come from the store above: by a data connection, or as chunks. Kept over sessions, and over new
    connections to that store.
    """

    def __init__(self, endpoint: str) -> None:
        """endpoint: of its ZMQ socket, tcp://host:port."""
        self._host = urlsplit(endpoint).hostname or ""
        self._closed_until = 0.0

    def host(self) -> str:
        """Where data connections go; "" = chunks are wanted."""
        return "" if time.monotonic() < self._closed_until else self._host

    def failed(self, why: str) -> None:
        """Note a data connection that failed: chunks are wanted for a while."""
        self._closed_until = time.monotonic() + AGAIN_S
        log.warning("the data port of the store above %s: ZMQ frames for the next %g s", why, AGAIN_S)


KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""Seconds and a count: a way that is dead while nothing comes is noticed after eleven."""


class UpstreamReceiver(Receiver):
    """Connects first. Each target of the staging is a region of the layout."""

    def __init__(self, address: tuple[str, int], key: bytes, staging: Staging, tell: Hear) -> None:
        """address: host, as ZMQ is given it, and port. tell: called in the thread."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(socket.socket(family), tell, "from-above")
        self._address = address
        self._key = key
        self._staging = staging
        self._targets = list(staging.targets)
        self._sums: dict[int, tuple[Digest, int]] = {}  # of regions that came in order so far: bytes
        self._stopped = threading.Event()

    def stop(self) -> None:
        """The session is over; the thread ends soon, and says so."""
        self._stopped.set()
        super().stop()

    def _receive_all(self) -> None:
        if self._connected():
            incoming = SocketReader(self._socket)
            while not self._stopped.is_set() and self._record(incoming):
                pass
        elif not self._stopped.is_set():
            self._tell(Unconnected())

    def _connected(self) -> bool:
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.connect(self._address)
            self._socket.sendall(MAGIC + self._key)
            if self._socket.recv(1) != READY:
                return False
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in KEEPALIVE:
                self._socket.setsockopt(socket.IPPROTO_TCP, option, seconds)
        except OSError:
            return False
        return True

    def _record(self, incoming: SocketReader) -> bool:
        region, first, second = RECORD.unpack(incoming.exactly(RECORD.size))
        if region == END:
            self._tell(Finished())
            return False
        if region == CLAIM:
            self._claimed(first, second)
            return True
        if not second:
            raise PushRefused("bad_message", f"a record of no bytes, of region {region}")
        place = self._staging.expect(region, first, second)
        self._receive(incoming, region, first, place)
        self._staging.arrived(region, second)
        self._tell(Arrived(region, first, second))
        return True

    def _receive(self, incoming: SocketReader, region: int, offset: int, place: memoryview) -> None:
        state, known = self._sums.pop(region, (Digest(), 0))
        done = 0
        while done < len(place):
            piece = place[done : done + PIECE_BYTES]
            count = incoming.some(piece, len(place) - done)
            if known == offset + done:
                state.update(piece[:count])
                known += count
            done += count
        self._sums[region] = state, known  # out of order it stays where it was, and the region is read again

    def _claimed(self, region: int, digest: int) -> None:
        if region >= len(self._targets):
            raise PushRefused("bad_message", f"region {region} is not in the layout")
        target = self._targets[region]
        state, known = self._sums.pop(region, (Digest(), 0))
        if known == target.nbytes:
            target.streamed = state.intdigest()
        self._tell(Taken(region, digest))


LOST_S = 2.0
"""A data connection that closed early: for the store above to say why, before the session is given up."""
CREDIT_STEP = 1 << 20
Order = wire.Claims | wire.Seal | wire.Prepare | wire.Flip | wire.Finalize


class Relayed:
    """Owner of the session. voted: the last question of the store above that was answered yes. line: whose version it
    is, an adapter's name; "" = the model's."""

    def __init__(
        self,
        stage: wire.Stage,
        coordinator: Coordinator,
        voice: "Upstream",
        config: StoreConfig,
        data: DataPlane,
        route: DataRoute,
    ) -> None:
        """coordinator, data: of the line."""
        self.id, self.line = stage.session, stage.line
        self.session: PushSession | None = None
        self.voted = ""
        self._asked: wire.Prepare | wire.Flip | None = None
        self._stage = stage
        self._coordinator = coordinator
        self._voice = voice
        self._config = config
        self._data = data
        self._route = route
        self._received = self._credited = 0
        self._fetching = False  # through a data connection
        self._sealed: wire.Seal | None = None  # heard before all bytes had come
        self._again = False  # all of it comes as chunks, after we gave the connection up
        self.lost_at = float("inf")  # the data connection closed before its end

    @property
    def running(self) -> bool:
        """Whether the session is neither live nor over here."""
        return self.session is not None and self.session is self._coordinator.session

    @property
    def in_doubt(self) -> bool:
        """Only the store above knows whether the version was committed."""
        return self.running and self._coordinator.in_doubt

    def start(self, now: float) -> bool:
        """Take a slot, or the one that holds these bytes already, and say how much may come. False: every slot is held
        for now.
        """
        stage = self._stage
        if not 0 <= stage.version <= MAX_VERSION:
            self.refuse(PushRefused("bad_message", f"version {stage.version} is out of range"), now)
            return True
        intent = Intent(
            *(stage.run_id, stage.version, "relay", stage.client, stage.in_flight, "relay"),
            force=True,
            adapter=self.line,
            merged=stage.merged,
        )
        held = self._held()
        role = Role.CATCH_UP if stage.catch_up else Role.RELAY
        try:
            session = self._coordinator.begin(intent, self, now, role=role, reuse=held)
        except PushRefused as refusal:
            if refusal.code == "busy":
                return False
            self.refuse(refusal, now)
            return True
        self.session = session
        session.quorum, session.expected = stage.quorum, stage.digest
        self._coordinator.announce(session, now)
        if held is not None:
            self._coordinator.seal(session, now + self._config.max_deadline_s, now)
            return True
        layout = self._coordinator.layout
        session.staging.add(_regions(layout), [region.name for region in layout.regions])
        host = self._route.host()
        if stage.data_port and host:
            self._fetch(session, (host, stage.data_port))
        else:
            self._credit()
        return True

    def destinations(self, chunk: wire.Chunk, now: float) -> Sequence[memoryview] | None:
        """Where the payload goes; None if it is refused, which ends the session."""
        session = self.session
        if session is None or session is not self._coordinator.session:
            return None
        try:
            if not 0 <= chunk.region < len(session.staging.targets):
                raise PushRefused("bad_message", f"region {chunk.region} is not in the layout")
            return session.staging.destinations(chunk.region, chunk.offset, chunk.sizes)
        except PushRefused as refusal:
            self._coordinator.abort(session, refusal, now)
            return None

    def received(self, chunk: wire.Chunk, now: float) -> None:
        """The payload is in its place."""
        size = sum(chunk.sizes)
        self._arrived(chunk.region, chunk.offset, size)
        self._received += size
        if self._received + self._config.relay_window - self._credited >= CREDIT_STEP:
            self._credit()

    def _fetch(self, session: PushSession, address: tuple[str, int]) -> None:
        self._fetching = True

        def make(tell: Hear) -> UpstreamReceiver:
            return UpstreamReceiver(address, self._stage.data_key, session.staging, tell)

        self._data.start(session, make, lambda news: self._fetched(session, news, time.monotonic()))

    def _fetched(self, session: PushSession, news: News, now: float) -> None:
        match news:
            case Arrived():
                self._arrived(news.copy, news.offset, news.size)
            case Taken():
                self._claims(session, [(news.copy, news.digest)], now)
            case Finished():
                self._fetching = False
                if self._sealed is not None:
                    self.take(self._sealed, now)
            case Unconnected():
                self._fetching, self._sealed, self._again = False, None, True
                self._route.failed("cannot be reached")
                self._credit()
            case Ended(refusal) if refusal is not None:
                self._coordinator.abort(session, refusal, now)
            case Ended() if self._fetching:
                self.lost_at = now + LOST_S
            case _:
                pass

    def _arrived(self, region: int, offset: int, size: int) -> None:
        assert self.session is not None
        self._coordinator.below.arrived(self.session, self.session.staging.targets[region].start + offset, size)

    def tick(self, now: float) -> None:
        """Give up what does not come any more; say what has become true."""
        if now >= self.lost_at:
            self.lost_at = float("inf")
            session = self._coordinator.session
            if session is not None and session is self.session:
                self._route.failed("broke")
                refusal = PushRefused("aborted", "the data connection to the store above broke", retryable=True)
                self._coordinator.abort(session, refusal, now)
        ballot = self._coordinator.ballot
        if ballot is None or self.session is None or not self.running:
            return
        state = self.session.life.state
        if state is State.READY and self.voted == "":
            self.voted = "prepare"
            self._voice.send(wire.Vote(self.id, "prepare", stores=ballot.stores, replicas=ballot.replicas))
        elif state is State.DOUBT and self.voted == "prepare":
            self.voted = "flip"
            self._voice.send(wire.Vote(self.id, "flip", stores=ballot.stores, replicas=ballot.replicas))

    def end(self, why: str, now: float, event: Event) -> bool:
        """The store above ends it, or is gone; whether there was something to end here."""
        session = self.session
        if session is None or not self.running:
            return False
        refusal = PushRefused("aborted", why, retryable=event is Event.ABOVE_LOST)
        self._coordinator.abort(session, refusal, now, event)
        return True

    def recorded_above(self, live: wire.VersionName | None, now: float) -> bool:
        """Whether the version in doubt was committed: it was if it is what is live above."""
        session, ballot = self.session, self._coordinator.ballot
        if session is None or ballot is None or live != wire.version_of(ballot.live):
            return False
        self._coordinator.recorded_above(session, now)
        return True

    def take(self, order: Order, now: float) -> None:
        """What the store above says about this session."""
        session, coordinator = self.session, self._coordinator
        if session is None:
            return
        running = session is coordinator.session
        match order:
            case wire.Claims() if running:
                self._claims(session, order.digests, now)
            case wire.Seal() if running and self._fetching:
                self._sealed = order
            case wire.Seal() if running and self._again and session.staging.unwritten(0, len(session.staging.targets)):
                pass  # of what went to the connection that we gave up; it comes again
            case wire.Seal() if running and session.life.moves(Event.SENT):
                session.expected = order.digest
                coordinator.seal(session, now + self._config.max_deadline_s, now)
            case wire.Prepare() | wire.Flip():
                self._question(session, order, now)
            case wire.Finalize():
                coordinator.recorded_above(session, now)
            case _:
                pass

    def _question(self, session: PushSession, order: wire.Prepare | wire.Flip, now: float) -> None:
        event = Event.PREPARE if isinstance(order, wire.Prepare) else Event.FLIP
        cell, seconds = session.life.cell(event), self._config.patience(order.deadline_s)
        if isinstance(cell, Go):
            self._asked = order
            if event is Event.PREPARE:
                self._coordinator.commit(session, seconds, now, event)
            else:
                self._coordinator.flip(session, seconds, now)
        elif isinstance(cell, Refused):
            self._voice.send(wire.no(order, cell.why))

    def sealed(self, session: PushSession) -> None:
        """`Owner.sealed`: every byte is there, here and below."""
        if session.role is Role.CATCH_UP:
            self._coordinator.commit(session, self._config.max_deadline_s, time.monotonic())
        else:
            self._voice.send(wire.Staged(self.id, self._coordinator.below.stores()))

    def committed(self, session: PushSession, report: Committed) -> None:
        """`Owner.committed`: the version is live here."""
        self._data.end(session)
        if session.role is Role.CATCH_UP:
            version = wire.VersionName(session.intent.run_id, report.version, report.digest)
            self._voice.send(wire.Holds(version, self.line))
        else:
            self._voice.over(self.id, report.stall_ms)
        self._voice.beat_soon()

    def ended(self, session: PushSession, refusal: PushRefused) -> None:
        """`Owner.ended`: the session has come to nothing here."""
        self._data.end(session)
        match session.life.ended_by:
            case Event.WITHDRAWN:  # it waits to hear that we are back
                self._voice.over(self.id)
            case Event.ABOVE_LOST:
                pass  # it has forgotten it, or will
            case _ if self._asked and session.role is Role.RELAY:
                self._voice.send(wire.no(self._asked, refusal.message, refusal.rank, refusal.tensors))
            case _:
                self.refuse(refusal, time.monotonic())

    def _held(self) -> Live | None:
        """A slot that holds these bytes. Its digest is checked again.

        A note of an earlier life of this store may be about a slot that was given away after it was written down.
        """
        saved, arena = self._coordinator.history.saved, self._coordinator.slots.arena
        for noted in (saved.live, saved.previous, saved.doubt):
            if noted is None or not self._stage.digest or noted.digest != self._stage.digest:
                continue
            if arena.backed(noted.slot) and arena.write_epoch(noted.slot) == noted.write_epoch:
                return noted
        return None

    def _claims(self, session: PushSession, digests: Sequence[tuple[int, int]], now: float) -> None:
        try:
            session.checker.written(digests)
        except PushRefused as refusal:
            self._coordinator.abort(session, refusal, now)

    def refuse(self, refusal: PushRefused, now: float) -> None:
        """Tell the store above that this session cannot be staged here."""
        failed = wire.Failed(self.id, refusal.code, refusal.message, refusal.tensors, refusal.retryable)
        self._voice.send(failed)
        if self._stage.catch_up:
            self._voice.failed_to_catch_up(now)

    def _credit(self) -> None:
        self._credited = self._received + self._config.relay_window
        self._voice.send(wire.Credit(self.id, self._credited))


def _regions(layout: Layout) -> list[Copy]:
    """Each region as one copy onto itself."""
    dtype = layout.manifest.dtype
    return [
        Copy(i, (prod(r.shape),), 0, (1,), r.offset // ITEMSIZE[dtype], (1,), dtype)
        for i, r in enumerate(layout.regions)
    ]

"""The stores below: who has joined, what each takes of the running sessions, and how bytes go to them.

Bytes go over a TCP socket of their own (`Feed`), written by the store's loop, as much at a time as the kernel takes
(rollout_client/data_socket.py says why). After the key and `READY`, as for a trainer: `RECORD` (region, offset, bytes)
and those bytes of the region, in any order; `RECORD` (CLAIM, region, digest) once all of a region was sent; `RECORD`
(END, 0, 0). The store below reads with `UpstreamReceiver`. Little-endian, not encrypted. Without such a socket they go
as chunks, as far as the store below gives credit.
"""

import secrets
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rollout_client.data_socket import KEY_BYTES
from weight_manager.data_port import DataPort
from weight_manager.relay import messages as wire
from weight_manager.relay.messages import Holdings
from weight_manager.relay.stream import Cursor, GoodBytes, Stream
from weight_manager.watching import Watching
from weight_manager.wire import Router

RECORD = struct.Struct("<IQQ")
CLAIM, END = 0xFFFFFFFE, 0xFFFFFFFF


class Feed:
    """One connection, for one session. `lost`: it broke and is closed; the store below gives the session up."""

    def __init__(self, connection: socket.socket, watching: Watching) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lost = False
        self._socket = connection
        self._watching = watching
        self._watched = False
        self._rest: list[memoryview] = []

    def put(self, records: Iterable[tuple[int, int, int]], content: memoryview | None = None) -> None:
        """Queue records, and the bytes that a single one announces; `flush` sends them."""
        if not self.lost:
            self._rest.append(memoryview(b"".join(RECORD.pack(*record) for record in records)))
            self._rest += [] if content is None else [content]

    def flush(self) -> bool:
        """Hand over what was queued; whether nothing is left. If something is, the loop turns when there is room."""
        while self._rest and not self.lost:
            try:
                count = self._socket.sendmsg(self._rest)
            except BlockingIOError:
                break
            except OSError:
                self.lost = True
                self.close()
            else:
                self._sent(count)
        if not self.lost:
            self.turn_again(bool(self._rest))
        return not (self._rest or self.lost)

    def turn_again(self, wanted: bool) -> None:
        """Whether the loop is to turn as soon as there is room, to send more."""
        if wanted == self._watched:
            return
        self._watched = wanted
        if wanted:
            self._watching.watch(self._socket.fileno(), lambda: None, to_write=True)
        else:
            self._watching.unwatch(self._socket.fileno())

    def close(self) -> None:
        """Nothing more is sent. Idempotent."""
        self.turn_again(False)
        self._rest.clear()
        self._socket.close()

    def _sent(self, count: int) -> None:
        while self._rest and count >= len(self._rest[0]):
            count -= len(self._rest.pop(0))
        if count:
            self._rest[0] = self._rest[0][count:]


@dataclass(eq=False)
class Enrolment:
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
class Downstream:
    """A store that has joined. Times are monotonic seconds. Lines go by their adapter's name, the model's by ""."""

    id: str
    name: str
    identity: bytes
    holds: Holdings  # once it has read everything that it was sent
    seen: float
    serves_until: float = 0.0  # the lease it was given last
    behind: set[str] = field(default_factory=set)  # lines whose running commit has left it: no lease until that is over
    deaf: bool = False  # a message to it could not be queued
    stores: int = 1  # of its subtree, itself included
    enrolments: dict[str, Enrolment] = field(default_factory=dict)  # by line
    beginning: frozenset[str] = frozenset()  # adapters under whose names it may begin sequences, as it said last

    def status(self, live: Holdings, now: float) -> dict[str, Any]:
        """What the API shows of this store. Bytes are counted over all running sessions."""
        enrolments = self.enrolments.values()
        return {
            "version": self.holds.model.version if self.holds.model else None,
            "adapters": {name: version.version for name, version in sorted(self.holds.adapters.items())},
            "ready": self.holds.model is not None and self.holds == live and not self.behind,
            "seen_s": round(now - self.seen, 3),
            "fenced": bool(self.behind),
            "behind_bytes": sum(e.stream.logged - e.cursor.sent for e in enrolments if not e.out),
            "sent_bytes": sum(e.cursor.sent for e in enrolments) if enrolments else None,
            "staged": all(e.staged for e in enrolments) if enrolments else None,
            "catching_up": any(e.catch_up for e in enrolments),
            "out": next((e.out for e in enrolments if e.out), ""),
        }


FRAME_BYTES = 256 << 10
CHUNK_BYTES = 1 << 20
TURN_BYTES = 8 << 20
"""Bytes that one store is sent through its data connection before the loop looks at everything else."""


class Roster:
    """The stores that have joined, and how messages and bytes go to each. absent: stores that are away and may still be
    serving -> until when.
    """

    def __init__(self, known: list[str], lease_s: float) -> None:
        """known: stores that had a lease of our last life."""
        self.router: Router | None = None
        self._port: DataPort | None = None
        self._watching: Watching | None = None
        self.sent_bytes = 0
        self.absent = dict.fromkeys(known, time.monotonic() + lease_s)
        self._by_id: dict[str, Downstream] = {}
        self._by_identity: dict[bytes, Downstream] = {}

    def open(self, router: Router, port: DataPort | None, watching: Watching) -> None:
        """Stores may join. Without a port bytes go as chunks."""
        self.router, self._port, self._watching = router, port, watching

    def close(self) -> None:
        """The store stops."""
        for store in self.all():
            self._end_all(store)

    def all(self) -> list[Downstream]:
        """All stores that have joined."""
        return list(self._by_id.values())

    def taking_part(self, line: str) -> list[tuple[Downstream, Enrolment]]:
        """The stores that a session of a line goes to, each with its enrolment."""
        return [(store, store.enrolments[line]) for store in self._by_id.values() if line in store.enrolments]

    def of_id(self, store: str) -> Downstream | None:
        """The store of this id, which stays the same over restarts."""
        return self._by_id.get(store)

    def of_peer(self, identity: bytes) -> Downstream | None:
        """The store behind this connection."""
        return self._by_identity.get(identity)

    def named(self, name: str) -> Downstream | None:
        """The store of this name."""
        return next((store for store in self._by_id.values() if store.name == name), None)

    def add(self, store: Downstream) -> None:
        """A store has joined. A lease it had goes on."""
        known = self._by_id.get(store.id)
        if known is not None:
            self._end_all(known)
        store.serves_until = max(known.serves_until if known else 0.0, self.absent.pop(store.name, 0.0))
        self._by_id[store.id] = self._by_identity[store.identity] = store

    def remove(self, store: Downstream) -> None:
        """A store has left, or is lost."""
        self._by_id.pop(store.id, None)
        self._by_identity.pop(store.identity, None)
        self._end_all(store)
        if store.serves_until > time.monotonic():
            self.absent[store.name] = store.serves_until

    def names(self) -> list[str]:
        """Names of all stores that may have a lease."""
        return [*(store.name for store in self._by_id.values()), *self.absent]

    def answer(self, peer: bytes, message: wire.Message) -> bool:
        """Send to somebody who need not have joined; returns whether it could be queued."""
        return self.router is not None and self.router.send(peer, wire.encode(message))

    def send(self, store: Downstream, message: wire.Message) -> None:
        """Send one message. A store that misses one no longer knows what it is asked: it is `deaf`, and must join
        again.
        """
        if not self.answer(store.identity, message):
            store.deaf = True

    def give(self, store: Downstream, line: str, enrolment: Enrolment) -> tuple[int, bytes]:
        """Enrol a store in a session, instead of any other of the line. Returns port and key of a data connection;
        0 = none."""
        self.take(store, line)
        store.enrolments[line] = enrolment
        if self._port is None:
            return 0, b""
        enrolment.key = secrets.token_bytes(KEY_BYTES)
        self._port.expect(enrolment.key, lambda connection: self._connected(enrolment, connection))
        return self._port.port, enrolment.key

    def take(self, store: Downstream, line: str) -> Enrolment | None:
        """End a store's enrolment in the session of a line, and return it."""
        enrolment = store.enrolments.pop(line, None)
        if enrolment is not None:
            self._end(enrolment)
        return enrolment

    def credit(self, enrolment: Enrolment, upto: int) -> None:
        """The store below wants chunks: it could not connect, or there is nothing to connect to."""
        if enrolment.feed is not None:
            enrolment.cursor, enrolment.told = Cursor(), False  # it gave up waiting while we accepted
        self._end(enrolment)
        enrolment.allowed = max(enrolment.allowed, upto)

    def _connected(self, enrolment: Enrolment, connection: socket.socket) -> None:
        enrolment.key = b""
        if self._watching is not None:
            enrolment.feed = Feed(connection, self._watching)
        else:
            connection.close()

    def _end_all(self, store: Downstream) -> None:
        for enrolment in store.enrolments.values():
            self._end(enrolment)

    def _end(self, enrolment: Enrolment) -> None:
        if enrolment.key and self._port is not None:
            self._port.forget(enrolment.key)
        if enrolment.feed is not None:
            enrolment.feed.close()
        enrolment.key, enrolment.feed = b"", None

    def pump(self) -> None:
        """Send what is good and wanted."""
        for store in self._by_id.values():
            for enrolment in store.enrolments.values():
                if enrolment.out:
                    self._end(enrolment)
                elif enrolment.feed is not None:
                    self._feed(store, enrolment, enrolment.feed)
                else:
                    self._send_chunks(store, enrolment)

    def _send_chunks(self, store: Downstream, enrolment: Enrolment) -> None:
        room = enrolment.allowed - enrolment.cursor.sent
        for entry in enrolment.cursor.read(enrolment.stream, room, CHUNK_BYTES):
            if isinstance(entry, GoodBytes):
                self._send_bytes(store, enrolment, entry)
            else:
                self.send(store, wire.Claims(enrolment.session, [(c.region, c.digest) for c in entry]))
        if enrolment.complete:
            enrolment.told = True
            self.send(store, wire.Seal(enrolment.session, enrolment.digest))

    def _feed(self, store: Downstream, enrolment: Enrolment, feed: Feed) -> None:
        room = TURN_BYTES
        while feed.flush() and room > 0:
            entry = next(enrolment.cursor.read(enrolment.stream, CHUNK_BYTES, CHUNK_BYTES), None)
            if entry is None:
                break
            if isinstance(entry, GoodBytes):
                start = enrolment.stream.starts[entry.region] + entry.offset
                feed.put([entry], enrolment.slot[start : start + entry.size])
                self.sent_bytes += entry.size
                room -= entry.size
                continue
            feed.put((CLAIM, claim.region, claim.digest) for claim in entry)
        if feed.lost:
            return
        if room <= 0:
            feed.turn_again(True)
        elif enrolment.complete:
            enrolment.told = True
            feed.put([(END, 0, 0)])
            feed.flush()
            self.send(store, wire.Seal(enrolment.session, enrolment.digest))

    def _send_bytes(self, store: Downstream, enrolment: Enrolment, good: GoodBytes) -> None:
        """Straight from the slot; ZMQ keeps the mapping until it is done."""
        if self.router is None:
            return
        start = enrolment.stream.starts[good.region] + good.offset
        stops = [*range(start + FRAME_BYTES, start + good.size, FRAME_BYTES), start + good.size]
        frames = [enrolment.slot[a:b] for a, b in zip([start, *stops[:-1]], stops, strict=True)]
        head = wire.Chunk(enrolment.session, good.region, good.offset, [len(f) for f in frames])
        if self.router.send_payload(store.identity, wire.encode(head), frames):
            self.sent_bytes += good.size
        else:
            store.deaf = True

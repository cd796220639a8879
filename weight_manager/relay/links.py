"""The stores that have joined, by every name they have, and the way bytes go to them."""

import secrets
import socket
import time

from rollout_client.data_socket import KEY_BYTES
from weight_manager.data_port import DataPort
from weight_manager.relay import messages as wire
from weight_manager.relay.feed import CLAIM, END, Feed
from weight_manager.relay.link import Link, Part
from weight_manager.relay.stream import Cursor, Span
from weight_manager.watching import Watching
from weight_manager.wire import Router

FRAME_BYTES = 256 << 10
CHUNK_BYTES = 1 << 20
TURN_BYTES = 8 << 20
"""To one store through its data connection, before the loop looks at everything else."""


class Links:
    """absent: stores that are away and may still be serving -> until when."""

    def __init__(self, known: list[str], lease_s: float) -> None:
        """known: stores that had a lease of our last life."""
        self.router: Router | None = None
        self._port: DataPort | None = None
        self._watching: Watching | None = None
        self.sent_bytes = 0
        self.absent = dict.fromkeys(known, time.monotonic() + lease_s)
        self._links: dict[str, Link] = {}
        self._by_identity: dict[bytes, Link] = {}

    def open(self, router: Router, port: DataPort | None, watching: Watching) -> None:
        """Stores may join. Without a port bytes go as chunks."""
        self.router, self._port, self._watching = router, port, watching

    def close(self) -> None:
        """The store stops."""
        for link in self.all():
            self.take(link)

    def all(self) -> list[Link]:
        """Everybody."""
        return list(self._links.values())

    def taking_part(self) -> list[tuple[Link, Part]]:
        """Those that a session goes to."""
        return [(link, link.part) for link in self._links.values() if link.part is not None]

    def of_store(self, store: str) -> Link | None:
        """By what stays the same over restarts."""
        return self._links.get(store)

    def of_peer(self, identity: bytes) -> Link | None:
        """By connection."""
        return self._by_identity.get(identity)

    def named(self, name: str) -> Link | None:
        """By name."""
        return next((link for link in self._links.values() if link.name == name), None)

    def add(self, link: Link) -> None:
        """It has joined. A lease it had goes on."""
        known = self._links.get(link.store)
        self._end(known.part if known else None)
        link.serves_until = max(known.serves_until if known else 0.0, self.absent.pop(link.name, 0.0))
        self._links[link.store] = self._by_identity[link.identity] = link

    def remove(self, link: Link) -> None:
        """It has left, or is lost."""
        self._links.pop(link.store, None)
        self._by_identity.pop(link.identity, None)
        self._end(link.part)
        if link.serves_until > time.monotonic():
            self.absent[link.name] = link.serves_until

    def names(self) -> list[str]:
        """Everybody who may have a lease."""
        return [*(link.name for link in self._links.values()), *self.absent]

    def answer(self, peer: bytes, message: wire.Message) -> bool:
        """To somebody who need not have joined; whether it could be queued."""
        return self.router is not None and self.router.send(peer, wire.encode(message))

    def send(self, link: Link, message: wire.Message) -> None:
        """One message. A store that misses one no longer knows what it is asked: it is `deaf`, and must join again."""
        if not self.answer(link.identity, message):
            link.deaf = True

    def give(self, link: Link, part: Part) -> tuple[int, bytes]:
        """Its part in a session, instead of what it had. Port and key of a data connection for it; 0 = none."""
        self.take(link)
        link.part = part
        if self._port is None:
            return 0, b""
        part.key = secrets.token_bytes(KEY_BYTES)
        self._port.expect(part.key, lambda connection: self._connected(link, part, connection))
        return self._port.port, part.key

    def take(self, link: Link) -> Part | None:
        """It has no part in a session any more; the one it had."""
        part, link.part = link.part, None
        self._end(part)
        return part

    def credit(self, part: Part, upto: int) -> None:
        """The store below wants chunks: it could not connect, or there is nothing to connect to."""
        if part.feed is not None:
            part.cursor, part.told = Cursor(), False  # it gave up waiting while we accepted
        self._end(part)
        part.allowed = max(part.allowed, upto)

    def _connected(self, link: Link, part: Part, connection: socket.socket) -> None:
        part.key = b""
        if link.part is part and self._watching is not None:
            part.feed = Feed(connection, self._watching)
        else:
            connection.close()

    def _end(self, part: Part | None) -> None:
        if part is None:
            return
        if part.key and self._port is not None:
            self._port.forget(part.key)
        if part.feed is not None:
            part.feed.close()
        part.key, part.feed = b"", None

    def pump(self) -> None:
        """Send what is good and wanted."""
        for link, part in self.taking_part():
            if part.out:
                self._end(part)
                continue
            if part.feed is not None:
                self._feed(link, part, part.feed)
                continue
            for entry in part.cursor.read(part.stream, part.allowed - part.cursor.sent, CHUNK_BYTES):
                if isinstance(entry, Span):
                    self._send_span(link, part, entry)
                else:
                    self.send(link, wire.Claims(part.session, [(c.region, c.digest) for c in entry]))
            if part.complete:
                part.told = True
                self.send(link, wire.Seal(part.session, part.digest))

    def _feed(self, link: Link, part: Part, feed: Feed) -> None:
        room = TURN_BYTES
        while feed.flush() and room > 0:
            entry = next(part.cursor.read(part.stream, CHUNK_BYTES, CHUNK_BYTES), None)
            if entry is None:
                break
            if isinstance(entry, Span):
                start = part.stream.starts[entry.region] + entry.offset
                feed.put([entry], part.slot[start : start + entry.size])
                self.sent_bytes += entry.size
                room -= entry.size
                continue
            feed.put((CLAIM, claim.region, claim.digest) for claim in entry)
        if feed.lost:
            return
        if room <= 0:
            feed.turn_again(True)
        elif part.complete:
            part.told = True
            feed.put([(END, 0, 0)])
            feed.flush()
            self.send(link, wire.Seal(part.session, part.digest))

    def _send_span(self, link: Link, part: Part, span: Span) -> None:
        """Straight from the slot; ZMQ keeps the mapping until it is done."""
        if self.router is None:
            return
        start = part.stream.starts[span.region] + span.offset
        stops = [*range(start + FRAME_BYTES, start + span.size, FRAME_BYTES), start + span.size]
        frames = [part.slot[a:b] for a, b in zip([start, *stops[:-1]], stops, strict=True)]
        head = wire.Chunk(part.session, span.region, span.offset, [len(f) for f in frames])
        if self.router.send_payload(link.identity, wire.encode(head), frames):
            self.sent_bytes += span.size
        else:
            link.deaf = True

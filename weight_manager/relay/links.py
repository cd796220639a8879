"""The stores that have joined, by every name they have, and the way bytes go to them."""

import time

from weight_manager.relay import messages as wire
from weight_manager.relay.link import Link, Part
from weight_manager.relay.stream import Span
from weight_manager.wire import Router

FRAME_BYTES = 256 << 10
CHUNK_BYTES = 1 << 20


class Links:
    """absent: stores that are away and may still be serving -> until when."""

    def __init__(self, known: list[str], lease_s: float) -> None:
        """known: stores that had a lease of our last life."""
        self.router: Router | None = None
        self.sent_bytes = 0
        self.absent = dict.fromkeys(known, time.monotonic() + lease_s)
        self._links: dict[str, Link] = {}
        self._by_identity: dict[bytes, Link] = {}

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
        link.serves_until = max(known.serves_until if known else 0.0, self.absent.pop(link.name, 0.0))
        self._links[link.store] = self._by_identity[link.identity] = link

    def remove(self, link: Link) -> None:
        """It has left, or is lost."""
        self._links.pop(link.store, None)
        self._by_identity.pop(link.identity, None)
        if link.serves_until > time.monotonic():
            self.absent[link.name] = link.serves_until

    def names(self) -> list[str]:
        """Everybody who may have a lease."""
        return [*(link.name for link in self._links.values()), *self.absent]

    def answer(self, peer: bytes, message: wire.Message) -> None:
        """To somebody who need not have joined."""
        if self.router is not None:
            self.router.send(peer, wire.encode(message))

    def send(self, link: Link, message: wire.Message) -> None:
        """One message."""
        self.answer(link.identity, message)

    def pump(self) -> None:
        """Send what is good and wanted."""
        for link, part in self.taking_part():
            if part.out:
                continue
            for entry in part.cursor.read(part.stream, part.allowed - part.cursor.sent, CHUNK_BYTES):
                if isinstance(entry, Span):
                    self._send_span(link, part, entry)
                else:
                    self.send(link, wire.Claims(part.session, [(c.region, c.digest) for c in entry]))
            if part.digest and not part.told and part.cursor.item == len(part.stream.log):
                part.told = True
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

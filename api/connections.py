"""HTTP connections that do not wait for ever for their clients, and never more of them than there is room for.

    waiting for a head  -head complete->  reading a body  -body complete->  answering  -answered->  kept open
    any of them         -refused, or answered for the last time before its body came->  lingering

A head has to be complete `head_timeout_s` after the connection was made, or after its first byte when the connection
was kept open. A body, and a client that reads its answer, may take as long as they like but have to get on: `PACE`
bytes a second over each `stall_timeout_s`. What is late is cut off, with 408 where the client may still read it.
A connection that is kept open and silent is closed by uvicorn (timeout_keep_alive); one that is answered waits for us.

A head has at most `HEAD_BYTES`, and a client may send at most `AHEAD` requests before the first is answered: the parser
itself counts neither. Fields after a chunked body are ignored: the application has read the head by then.

A client of HTTP/1.0 knows no chunks: a stream to it ends with the connection.

When all places are taken, the connection goes that has waited longest for a head, or else was kept open longest; when
all are at work, it is the new one, with 503.

Whom we refuse may be sending still, and a socket that is closed with bytes unread is reset: the client's next write
fails, and most look for no answer after that. So a refusal is followed by an end, what still comes is read and dropped,
and the socket is closed when the client closes, or `linger_s` later. A client that lingers has no place and no request;
of `lingerers` the first goes for each that comes. A server that leaves waits for them: it is not long.
"""

import asyncio
import functools
import logging
import resource
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

log = logging.getLogger(__name__)

PACE = 1024
"""Bytes a second below which a client that sends a body, or reads an answer, counts as stalled."""
HEAD_BYTES = 64 << 10
"""Most bytes of request line and header fields together."""
AHEAD = 128
"""Most requests of one connection that wait for the one before them; a client that sends more is cut off."""
OTHER_FILES = 512
"""File descriptors that the process needs for anything but HTTP clients that have a place: links to replicas and the
store, files, clients that linger."""
WRITE_NOW = "rollout.write_now"
"""ASGI extension: a function of bytes that writes a part of the body and says whether it did, without an await. It does
not where the client has to catch up first, has gone, or has had no status yet: `send` is for all of that."""
SOCKET = "rollout.socket"
"""ASGI extension: a function that returns the descriptor of the connection's socket, for parts of this body to be sent
there as chunks of the transfer coding; -1 where something waits to be written before, or `WRITE_NOW` would not write.
Its first argument is a function that is called before the descriptor is closed. Whoever has it may only use it until
anything is written in another way."""
WRITE_REST = "rollout.write_rest"
"""ASGI extension: a function of bytes that writes, as they are, those of a chunk whose beginning went to SOCKET."""
LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
UNREADABLE = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close"
    b"\r\n\r\n%b"
)
LINGER_BYTES = 4 << 20
"""Of what comes from a client that lingers, so much is read; the rest stays with the kernels, and the client waits."""


@dataclass
class Room:
    """The places of a server. waiting, kept, lingering: connections without a request, the first to come in front."""

    places: int
    head_timeout_s: float
    stall_timeout_s: float
    linger_s: float = 1.0
    lingerers: int = 64
    taken: set["Connection"] = field(default_factory=set)
    waiting: dict["Connection", None] = field(default_factory=dict)
    kept: dict["Connection", None] = field(default_factory=dict)
    lingering: dict["Connection", None] = field(default_factory=dict)
    turned_away: int = 0

    def enter(self, one: "Connection") -> bool:
        """Whether there is a place; somebody idle may have had to leave it."""
        if len(self.taken) >= self.places:
            idle = next(iter(self.waiting or self.kept), None)
            if self.turned_away % 1000 == 0:
                log.warning("all %d places for connections are taken (max_connections)", self.places)
            self.turned_away += 1
            if idle is None:
                return False
            self.leave(idle)
            idle.give_way()
        self.taken.add(one)
        self.waiting[one] = None
        return True

    def works(self, one: "Connection") -> None:
        """A connection has a request."""
        self.waiting.pop(one, None)
        self.kept.pop(one, None)

    def rests(self, one: "Connection") -> None:
        """A connection is kept open for another request."""
        if one in self.taken:
            self.kept[one] = None

    def lingers(self, one: "Connection") -> None:
        """A connection has had its last word from us: its place is free, and another may have to stop lingering."""
        self.leave(one)
        if len(self.lingering) >= self.lingerers:
            first = next(iter(self.lingering))
            self.leave(first)
            first.give_way()
        self.lingering[one] = None

    def leave(self, one: "Connection") -> None:
        """A connection has ended: its place is free."""
        self.taken.discard(one)
        self.lingering.pop(one, None)
        self.works(one)


class Connection(HttpToolsProtocol):
    """One HTTP connection. What uvicorn knows of a request (`cycle`) says in which of the states a connection is."""

    def __init__(self, *args: Any, room: Room, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = room
        self._reading: asyncio.TimerHandle | None = None  # the head or the body is due
        self._head_is_due = False
        self._in_head = False
        self._head_bytes = 0  # of a head that is not complete
        self._received = 0  # bytes of the body since it was last looked at
        self._writing: asyncio.TimerHandle | None = None
        self._lingers = False
        self._dropped = 0  # bytes that came meanwhile
        self._closing: asyncio.TimerHandle | None = None
        self._socket = -1
        self._on_lost: Callable[[], None] = _nothing

    # What the transport calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; it may have to be turned away."""
        super().connection_made(transport)
        self._outlet = _Outlet(transport, self)
        if not self._room.enter(self):
            transport.write(FULL)
            self._linger()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Bytes of a head or a body, or those that nobody wants any more."""
        if self._lingers:
            self._drop(data)
        if self._is_over:
            return
        super().data_received(data)
        if self._is_over:
            return  # it could not be read
        self._received += len(data)
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        if self._head_bytes > HEAD_BYTES:
            self._refuse(LONG)
            return
        self._look()
        if self._reading is None and self._is_between:
            self._await_head()  # the first bytes on a connection that was kept open

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._on_lost()
        self._stop_reading()
        self._stop_writing()
        if self._closing is not None:
            self._closing.cancel()
        self._room.leave(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Answered; the next request may be here already."""
        self._on_lost = _nothing
        if self._lingers:
            return
        super().on_response_complete()
        self._look()

    # What the server calls

    def shutdown(self) -> None:
        """Close, now or after the answer that is being given."""
        if not self._lingers:
            super().shutdown()

    # What the application calls

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        extensions: dict[str, Any] = {
            WRITE_NOW: functools.partial(self._write_now, cycle),
            SOCKET: functools.partial(self._idle_socket, cycle),
            WRITE_REST: self._write_rest,
        }
        cycle.scope["extensions"] = extensions
        if cycle.scope["http_version"] == "1.0":
            app = functools.partial(_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, functools.partial(_answered, app))

    def _write_now(self, cycle: RequestResponseCycle, body: bytes) -> bool:
        """See WRITE_NOW; body is not empty. One chunk of the transfer coding, in one write."""
        if not self._takes_chunks(cycle):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _idle_socket(self, cycle: RequestResponseCycle, on_lost: Callable[[], None]) -> int:
        """See SOCKET."""
        if not self._takes_chunks(cycle) or self.transport.get_write_buffer_size():
            return -1
        if self._socket < 0:
            self._socket = self.transport.get_extra_info("socket").fileno()
        self._on_lost = on_lost
        return self._socket

    def _write_rest(self, rest: bytes) -> None:
        """See WRITE_REST."""
        if not self._is_over:
            self.transport.write(rest)

    def _takes_chunks(self, cycle: RequestResponseCycle) -> bool:
        paused, over = self.flow.write_paused, cycle.response_complete or self._is_over
        return cycle.response_started and cycle.chunked_encoding is True and not (paused or over)

    # What the parser calls

    def on_message_begin(self) -> None:
        """The first byte of a head. Raises ValueError, which ends the connection, when too many wait already."""
        if len(self.pipeline) >= AHEAD:
            raise ValueError(f"over {AHEAD} requests before the first was answered")
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of a head, or one that follows a body."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head of a request is complete."""
        self._in_head = False
        super().on_headers_complete()
        self.cycle.transport = self._outlet  # type: ignore[assignment]

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read."""
        self._refuse(UNREADABLE % (len(msg), msg.encode("ascii")))

    # What flow control calls

    def pause_writing(self) -> None:
        """The client does not read as fast as we write."""
        super().pause_writing()
        if self._writing is None:
            self._watch_writing()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._stop_writing()

    # What is due

    @property
    def _is_between(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _look(self) -> None:
        """See who waits for whom now, after anything has happened."""
        if self._is_between:
            if self._reading is not None and not self._head_is_due:
                self._stop_reading()  # answered before its body was complete
            if self.cycle is not None:
                self._room.rests(self)
            if self._in_head and self._reading is None and not self._is_over:
                self._await_head()  # a part of it came with the request before it
            return
        self._room.works(self)
        if not self.cycle.more_body:
            self._stop_reading()
        elif self._reading is None or self._head_is_due:
            self._stop_reading()
            self._await_body()

    def _await_head(self) -> None:
        self._head_is_due = True
        self._reading = self.loop.call_later(self._room.head_timeout_s, self._late)

    def _await_body(self) -> None:
        self._received = 0
        self._reading = self.loop.call_later(self._room.stall_timeout_s, self._check_body)

    def _check_body(self) -> None:
        if self._received >= PACE * self._room.stall_timeout_s or self.flow.read_paused:
            self._await_body()
        else:
            self._late()

    def _watch_writing(self) -> None:
        before = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self._room.stall_timeout_s, self._check_writing, before)

    def _check_writing(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() >= PACE * self._room.stall_timeout_s:
            self._watch_writing()
        else:
            self.transport.abort()

    def _late(self) -> None:
        self._reading = None
        if not self._is_over:
            self._refuse(LATE)

    def _refuse(self, words: bytes) -> None:
        """Close; with these words unless they could be taken for the answer to an earlier request, or end up in it."""
        reads_body = not self._is_between and self.cycle.more_body and not self.cycle.response_started
        if self._is_between or (reads_body and not self.pipeline):
            self.transport.write(words)
            self._linger()
        else:
            self.transport.close()

    def end(self) -> None:
        """Close after an answer, or in the midst of one that cannot go on."""
        if self._lingers:
            return
        if self.cycle.more_body or self.pipeline:
            self._linger()
        else:
            self.transport.close()

    # After the last word

    @property
    def _is_over(self) -> bool:
        return self._lingers or self.transport.is_closing()

    def _linger(self) -> None:
        """End what we say, and whatever of a request was left; see above."""
        self._lingers = True
        self._room.lingers(self)
        self._stop_reading()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._closing = self.loop.call_later(self._room.linger_s, self._close)

    def _drop(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > LINGER_BYTES:
            self.flow.pause_reading()

    def _close(self, before: int | None = None) -> None:
        """Close, but let a client finish reading a long answer. before: bytes of it that were unwritten last time."""
        left = self.transport.get_write_buffer_size()
        if not left:
            self.transport.close()
        elif before is None or before - left >= PACE * self._room.stall_timeout_s:
            self._closing = self.loop.call_later(self._room.stall_timeout_s, self._close, left)
        else:
            self.transport.abort()

    def give_way(self) -> None:
        """Close at once: another needs the place."""
        self.transport.abort()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading, self._head_is_due = None, False

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._writing = None


class _Outlet:
    """What answers see of their connection's transport: how it is closed is the connection's matter."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self.write, self.is_closing, self._connection = transport.write, transport.is_closing, weakref.ref(connection)

    def close(self) -> None:
        """Close after an answer; what is gone is closed."""
        connection = self._connection()
        if connection is not None:
            connection.end()


async def _answered(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Have the application answer. Then nothing of the request is held by itself: its extensions hold what holds them,
    and Python's collector of cycles, which would have to find that, comes seldom (weight_manager/garbage.py).
    """
    try:
        await app(scope, receive, send)
    finally:
        del scope["extensions"]


async def _without_chunks(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a client of HTTP/1.0: what has no length there ends with the connection. Uvicorn, which would send it in
    chunks, is told that it is as long as it gets.
    """
    is_open = False

    async def plain(message: Message) -> None:
        nonlocal is_open
        if message["type"] == "http.response.start":
            is_open = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = False if is_open else None
        elif is_open:
            more = message.get("more_body", False)
            cycle.expected_content_length = sys.maxsize if more else len(message.get("body", b""))
        await send(message)

    await app(scope, receive, plain)


def _nothing() -> None:
    """Do nothing: what `_idle_socket` is given where nobody has to know that the descriptor is closed."""


def places(wanted: int) -> int:
    """How many connections there may be: as many as wanted, or as the system lets this process have open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    found = max(soft - OTHER_FILES, soft // 2)
    log.warning("room for %d connections instead of %d: raise the limit of open files (ulimit -n)", found, wanted)
    return found

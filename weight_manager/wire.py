"""The store's two ROUTER sockets: whole messages in, bad bytes sorted out, nothing that blocks.

Payload frames of a chunk are received straight into the buffers that `chunk` names, so a push over the
network costs one copy out of the socket. Whatever is refused is still read to its last frame, because the
next message starts only there. Sends never wait: a peer that is gone or does not read loses its message.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import zmq

from rollout_client.protocol import MAX_HEADER_BYTES, Chunk, ErrorCode, Request, decode_request
from weight_manager.curve import StoreKeys
from weight_manager.errors import UNREADABLE, IllegalTransition
from weight_manager.metrics import Counters

log = logging.getLogger(__name__)

M = TypeVar("M")

TURN_MESSAGES = 64
"""Messages taken from one socket before the loop looks at everything else."""
TURN_S = 0.001
"""Nor does it look at trainers' messages for longer: replicas may be voting."""


class PushReceiver(Protocol):
    """What trainers send (trainers.py)."""

    def request(self, peer: bytes, request: Request) -> None:
        """Take any message but a `Chunk`."""
        ...

    def chunk(self, peer: bytes, chunk: Chunk) -> Sequence[memoryview] | None:
        """Where its payload goes, one buffer per frame; None = throw it away."""
        ...

    def received(self, peer: bytes, chunk: Chunk) -> None:
        """The chunk's payload is in those buffers."""
        ...

    def malformed(self, peer: bytes, code: ErrorCode, message: str, session: str = "") -> None:
        """Bytes that cannot be read, a frame over the cap, a chunk whose frames are not what it says."""
        ...


class Router:
    """A bound ROUTER. Only the loop's thread touches it."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        max_message: int,
        backlog: int,
        keys: StoreKeys | None = None,
    ) -> None:
        """backlog: messages or frames queued per peer. A frame over max_message makes ZMQ drop the connection.

        keys: only those who hold one of them may connect, and everything is encrypted.
        """
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.set(zmq.MAXMSGSIZE, max_message)
        self.socket.set(zmq.RCVHWM, backlog)
        self.socket.set(zmq.LINGER, 500)
        if keys is not None:
            keys.lock(self.socket)
        if endpoint.startswith("tcp://"):
            self.socket.set(zmq.IPV6, 1 if "[" in endpoint else 0)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError:
            self.socket.close()
            raise
        self.endpoint = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def send(self, peer: bytes, content: bytes) -> bool:
        """Queue one message; False if the peer is not connected or its queue is full."""
        try:
            self.socket.send_multipart([peer, content], flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def send_payload(self, peer: bytes, head: bytes, payload: Sequence[memoryview]) -> bool:
        """Queue one message whose payload is not copied; False as `send`, then nothing was queued."""
        last = len(payload) - 1
        try:
            self.socket.send_multipart([peer, head], flags=zmq.DONTWAIT | (zmq.SNDMORE if payload else 0))
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        for i, buffer in enumerate(payload):
            self.socket.send(buffer, flags=zmq.DONTWAIT | (zmq.SNDMORE if i < last else 0), copy=False)
        return True

    def next(self) -> tuple[bytes, zmq.Frame] | None:
        """Peer and first frame of the next message; None when there is none."""
        try:
            peer = self.socket.recv(flags=zmq.DONTWAIT)
        except zmq.Again:
            return None
        return peer, self.socket.recv(copy=False)

    def drain(self) -> int:
        """Throw the rest of a message away; how many frames that were."""
        return drain(self.socket)

    def close(self) -> None:
        """Gives what was queued half a second to leave."""
        self.socket.close()


def drain(socket: "zmq.Socket[bytes]") -> int:
    """Throw the rest of a message away; how many frames that were."""
    count = 0
    while socket.get(zmq.RCVMORE):
        socket.recv(copy=False)
        count += 1
    return count


def receive_payload(socket: "zmq.Socket[bytes]", buffers: Sequence[memoryview] | None) -> bool:
    """The payload frames of a message into these buffers; False if they do not fit, or None: thrown away."""
    fits = buffers is not None
    for buffer in buffers or ():
        if not socket.get(zmq.RCVMORE) or socket.recv_into(buffer) != len(buffer):
            fits = False
            break
    return not drain(socket) and fits


def receive_pushes(router: Router, receiver: PushReceiver, max_frame: int, counters: Counters) -> None:
    """One turn on the trainers' socket. A bug of ours costs one message its answer, not everybody the store, unless it
    leaves nobody knowing what is live: raises IllegalTransition.
    """
    until = time.monotonic() + TURN_S
    for _ in range(TURN_MESSAGES):
        message = router.next() if time.monotonic() < until else None
        if message is None:
            return
        peer, head = message
        if len(head) > MAX_HEADER_BYTES:
            router.drain()
            counters.add("oversized_frames")
            receiver.malformed(
                peer, "too_large", f"a message of {len(head)} bytes, at most {MAX_HEADER_BYTES} are read"
            )
            continue
        try:
            request = decode_request(head.buffer)
        except UNREADABLE as error:
            router.drain()
            counters.add("bad_messages")
            receiver.malformed(peer, "bad_message", f"not a message of this protocol: {error}")
            continue
        try:
            if isinstance(request, Chunk):
                _receive_chunk(router, receiver, peer, request, max_frame=max_frame, counters=counters)
            elif router.drain():
                counters.add("bad_messages")
                receiver.malformed(peer, "bad_message", f"{type(request).__name__} takes no payload frames")
            else:
                receiver.request(peer, request)
        except IllegalTransition:
            raise  # as of `receive_messages`
        except Exception as error:
            router.drain()
            log.exception("a %s could not be handled", type(request).__name__)
            receiver.malformed(peer, "internal", f"the store failed: {error!r}", getattr(request, "session", ""))


def _receive_chunk(
    router: Router, receiver: PushReceiver, peer: bytes, chunk: Chunk, *, max_frame: int, counters: Counters
) -> None:
    if max(chunk.sizes, default=0) > max_frame:
        router.drain()
        counters.add("oversized_frames")
        message = f"a payload frame of {max(chunk.sizes)} bytes, at most {max_frame} are read"
        receiver.malformed(peer, "too_large", message, chunk.session)
        return
    buffers = receiver.chunk(peer, chunk)
    if receive_payload(router.socket, buffers):
        receiver.received(peer, chunk)
        return
    if buffers is None:
        return
    counters.add("bad_messages")
    message = f"the payload frames of copy {chunk.copy} are not the {len(buffers)} announced, of the sizes announced"
    receiver.malformed(peer, "bad_message", message, chunk.session)


def receive_messages(
    router: Router,
    decode: Callable[[Any], M],
    *,
    request: Callable[[bytes, M], None],
    malformed: Callable[[bytes, str], Any],
    broken: Callable[[bytes, str], Any],
    counters: Counters,
) -> None:
    """One turn on a socket whose messages have no payload; see `receive_pushes`. decode: raises as msgspec does.

    malformed: told of bytes that cannot be read. broken: of a message that could not be handled.
    """
    for _ in range(TURN_MESSAGES):
        message = router.next()
        if message is None:
            return
        peer, head = message
        try:
            if extra := router.drain():
                raise msgspec.DecodeError(f"{extra} frames too many")
            decoded = decode(head.buffer)
        except UNREADABLE as error:
            counters.add("bad_messages")
            malformed(peer, f"not a message that is taken here: {error}")
            continue
        try:
            request(peer, decoded)
        except IllegalTransition:
            raise  # nobody knows what is served any more; the next life of the store does
        except Exception as error:
            log.exception("a %s could not be handled", type(decoded).__name__)
            broken(peer, f"sent a {type(decoded).__name__} that could not be handled: {error!r}")

"""A trainer's connection to a store: one DEALER, one thread at a time, no wait without an end."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq

from rollout_client.curve import Handshakes, TrainerKeys
from rollout_client.errors import StoreUnavailable, Unauthorized, from_wire
from rollout_client.protocol import MAX_HEADER_BYTES, Error, Message, Reply, decode_reply, encode

R = TypeVar("R", bound=Message)
QUEUED_MESSAGES = 8
"""Outgoing messages in the socket. With 2 MiB chunks enough to keep TCP busy, little to throw away on abort."""
HEARTBEAT_MS = 2000
SILENCE_MS = 10000
"""A peer whose machine is gone is noticed by ZMQ itself; the connection is then made anew."""


class Channel:
    """Requests and their answers. After `StoreUnavailable` call `reset`: a late answer then finds nobody."""

    def __init__(self, endpoint: str, keys: TrainerKeys | None = None) -> None:
        """Nothing is connected before the first message. Raises ValueError for an endpoint ZMQ cannot parse."""
        self.endpoint = endpoint
        self.data_port_closed = False  # the store offers one, and it cannot be reached from here
        self._keys = keys
        self._handshakes: Handshakes | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._open()
        except ValueError:
            self._context.term()
            raise

    def send(self, message: Message, payload: Sequence[Any] = (), *, timeout_s: float) -> None:
        """Queue a message; payload buffers are not copied and must stay as they are until the session is over."""
        if not self.ready(timeout_s):
            hint = ", and a handshake failed: is it this store's key?" if self._failed_handshake else ""
            what = type(message).__name__
            raise StoreUnavailable(
                f"no store took a {what} at {self.endpoint} in {timeout_s:.1f} s{hint or ': does the service run?'}"
            )
        more = zmq.SNDMORE if payload else 0
        self._socket.send(encode(message), zmq.DONTWAIT | more)
        for i, buffer in enumerate(payload, 1):
            self._socket.send(buffer, zmq.DONTWAIT | (zmq.SNDMORE if i < len(payload) else 0), copy=False)

    def ready(self, timeout_s: float) -> bool:
        """Whether a message can be queued; waits up to timeout_s for it. Raises Unauthorized if the key is refused."""
        if self._handshakes is None:
            return bool(self._socket.poll(int(timeout_s * 1000), zmq.POLLOUT))
        poller, end = zmq.Poller(), time.monotonic() + timeout_s
        poller.register(self._socket, zmq.POLLOUT)
        poller.register(self._handshakes.monitor, zmq.POLLIN)
        while self._socket not in dict(poller.poll(max(int((end - time.monotonic()) * 1000), 0))):
            self._handshakes.hear()
            if self._handshakes.refused:
                raise Unauthorized("unauthorized", f"the store at {self.endpoint} does not know this trainer's key")
            if time.monotonic() >= end:
                return False
        return True

    @property
    def _failed_handshake(self) -> bool:
        return self._handshakes is not None and self._handshakes.failed

    def receive(self, timeout_s: float) -> Reply | None:
        """The next answer, or None when there is none in time. Answers that cannot be read are dropped."""
        end = time.monotonic() + timeout_s
        while self._socket.poll(max(int((end - time.monotonic()) * 1000), 0), zmq.POLLIN):
            frames = self._socket.recv_multipart(zmq.DONTWAIT)
            try:
                reply: Reply = decode_reply(frames[0])
                return reply
            except msgspec.MsgspecError:
                continue
        return None

    def request(self, message: Message, answer: type[R] | tuple[type[R], ...], *, timeout_s: float) -> R:
        """Send and wait for an answer of this kind and session. Raises PushError, StoreUnavailable."""
        session = getattr(message, "session", "")
        end = time.monotonic() + timeout_s
        self.send(message, timeout_s=timeout_s)
        while (reply := self.receive(max(end - time.monotonic(), 0))) is not None:
            if getattr(reply, "session", "") not in ("", session) and session:
                continue  # of a session given up before
            if isinstance(reply, Error):
                if reply.session and not session:
                    continue
                raise from_wire(reply)
            if isinstance(reply, answer):
                return reply
        raise StoreUnavailable(
            f"the store at {self.endpoint} did not answer {type(message).__name__} in {timeout_s:.1f} s"
        )

    def reset(self) -> None:
        """Forget everything that was queued or is still to come."""
        self._shut()
        self._socket = self._open()

    def close(self) -> None:
        """Close at once; what is queued is lost. Idempotent."""
        self._shut()
        self._context.term()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shut(self) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
            self._handshakes = None
        self._socket.close()

    def _open(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a store that is not there
        socket.set(zmq.SNDHWM, QUEUED_MESSAGES)
        socket.set(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.set(zmq.IPV6, 1 if "[" in self.endpoint else 0)
        if self._keys is not None:
            self._handshakes = self._keys.lock(socket)
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            if self._handshakes is not None:
                self._handshakes.close()
            socket.close()
            raise ValueError(f"{self.endpoint!r} is no endpoint, expected something like tcp://host:5600") from error
        return socket

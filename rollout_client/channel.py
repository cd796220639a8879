"""A trainer's connection to a store: one DEALER socket, used by one thread at a time; no wait is without an end."""

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import msgspec
import zmq
import zmq.utils.monitor

from rollout_client.curve import TrainerKeys
from rollout_client.errors import RolloutError, StoreUnavailable, Unauthorized, from_wire
from rollout_client.prompt_threads import prompt_context
from rollout_client.protocol import MAX_HEADER_BYTES, Error, Message, Reply, decode_reply, encode

_FAILED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_WATCHED = _FAILED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class ConnectionMonitor:
    """What ZMQ says of the connection behind a socket with one endpoint. Only the socket's thread touches it.

    ZMQ makes a lost connection anew by itself, but answers to what was sent over the old one never come.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        """To be called before the socket connects."""
        self._socket = socket
        self.events: Any = socket.get_monitor_socket(int(_WATCHED))
        self.up = False
        self.losses = 0  # connections that were there and are gone
        self.refused = False  # by name: the store knows the key and does not want it
        self.failed = False  # the other side broke off: another store's key, or no keys there at all

    def hear(self) -> None:
        """Take in what has happened."""
        while int(self.events.get(zmq.EVENTS)) & zmq.POLLIN:  # in a tenth of the time of a poll
            event = zmq.utils.monitor.parse_monitor_message(self.events.recv_multipart(zmq.DONTWAIT))["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.up = True
            elif event == zmq.Event.DISCONNECTED:
                self.losses += self.up
                self.up = False
            else:
                self.failed = True
                self.refused = self.refused or event == zmq.Event.HANDSHAKE_FAILED_AUTH

    def close(self) -> None:
        """Stop listening, before the socket is closed."""
        self._socket.disable_monitor()
        self.events.close(0)


R = TypeVar("R", bound=Message)
QUEUED_MESSAGES = 8
"""Outgoing messages in the socket. With 2 MiB chunks enough to keep TCP busy, little to throw away on abort."""
HEARTBEAT_MS = 2000
SLICE_MS = 50
SILENCE_MS = 10000
"""A peer whose machine is gone is noticed by ZMQ itself; the connection is then made anew."""


class ConnectionLost(StoreUnavailable):
    """The store that was asked is gone, or the way to it was; there is one again, and it will not answer."""


class Channel:
    """Requests and their answers. After `StoreUnavailable` call `reset`: a late answer then finds nobody."""

    def __init__(self, endpoint: str, keys: TrainerKeys | None = None) -> None:
        """Nothing is connected before the first message. Raises ValueError for an endpoint ZMQ cannot parse."""
        self.endpoint = endpoint
        self.data_port_closed = False  # the store offers one, and it cannot be reached from here
        self._keys = keys
        self._context = prompt_context()
        self._closed = False
        self._opened = 0  # sockets so far
        try:
            self._socket, self._monitor = self._open()
        except ValueError:
            self._context.term()
            raise

    def send(self, message: Message, payload: Sequence[Any] = (), *, timeout_s: float, computing: bool = False) -> None:
        """Queue a message; payload buffers are not copied and must stay as they are until the session is over.

        computing: this thread goes on with something else. What sends is a thread of ZMQ's, which the kernel often puts
        where this one runs: it gets a turn now, and not after milliseconds, when this one waits for something. So do
        the store and ranks, where they wait for this core: threads that are prompt make that no faster (measured).
        Raises StoreUnavailable when no store takes it in time, or it is gone before it has taken all of it.
        """
        end = time.monotonic() + timeout_s
        more = zmq.SNDMORE if payload else 0
        while True:
            if not self.ready(max(end - time.monotonic(), 0)):
                self._refuse(message, timeout_s)
            try:
                self._socket.send(encode(message), zmq.DONTWAIT | more)
                break
            except zmq.Again:  # it had room, and the connection was gone before it was used
                if time.monotonic() >= end:
                    self._refuse(message, timeout_s)
        if computing:
            os.sched_yield()
        try:
            for i, buffer in enumerate(payload, 1):
                self._socket.send(buffer, zmq.DONTWAIT | (zmq.SNDMORE if i < len(payload) else 0), copy=False)
        except zmq.Again as error:
            raise StoreUnavailable(f"the connection to the store at {self.endpoint} broke within a message") from error

    def _refuse(self, message: Message, timeout_s: float) -> NoReturn:
        failed = self._keys is not None and self._monitor.failed
        hint = ", and a handshake failed: is it this store's key?" if failed else ""
        what = type(message).__name__
        raise StoreUnavailable(
            f"no store took a {what} at {self.endpoint} in {timeout_s:.1f} s{hint or ': does the service run?'}"
        )

    def ready(self, timeout_s: float) -> bool:
        """Whether a message can be queued; waits up to timeout_s for it. Raises Unauthorized if the key is refused."""
        if self._closed:
            raise RolloutError("this connection to the store was closed")
        monitor, end = self._monitor, time.monotonic() + timeout_s
        while True:
            monitor.hear()
            if monitor.refused:
                raise Unauthorized("unauthorized", f"the store at {self.endpoint} does not know this trainer's key")
            left = max(int((end - time.monotonic()) * 1000), 0)
            if not monitor.up:  # the socket may still take a message for a connection that is gone
                if not monitor.events.poll(left):
                    return False
            elif int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT or self._socket.poll(min(left, SLICE_MS), zmq.POLLOUT):
                return True
            elif not left:
                return False

    @property
    def connection(self) -> tuple[int, int] | None:
        """What names the connection that is there now, among all this channel has had; None while there is none."""
        if self._closed:
            return None
        self._monitor.hear()
        return (self._opened, self._monitor.losses) if self._monitor.up else None

    @property
    def losses(self) -> int:
        """Connections to the store that are gone."""
        self._monitor.hear()
        return self._monitor.losses

    def receive(self, timeout_s: float) -> Reply | None:
        """The next answer, or None when there is none in time. Answers that cannot be read are dropped."""
        end = time.monotonic() + timeout_s
        while self._socket.poll(max(int((end - time.monotonic()) * 1000), 0), zmq.POLLIN):
            try:
                reply: Reply = decode_reply(self._socket.recv_multipart(zmq.DONTWAIT)[0])
                return reply
            except (msgspec.MsgspecError, zmq.Again):
                continue
        return None

    def request(
        self,
        message: Message,
        answer: type[R] | tuple[type[R], ...],
        *,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> R:
        """Send and wait for an answer of this kind and session. meanwhile: called once it is sent.

        Raises PushError, StoreUnavailable.
        """
        end = time.monotonic() + timeout_s
        self.send(message, timeout_s=timeout_s)
        losses = self._monitor.losses
        meanwhile()
        return self.answer(message, answer, timeout_s=max(end - time.monotonic(), 0.0), losses=losses)

    def answer(self, message: Message, answer: type[R] | tuple[type[R], ...], *, timeout_s: float, losses: int) -> R:
        """The answer, or the next one, to what was sent; see `request`. losses: when it was sent."""
        session = getattr(message, "session", "")
        end = time.monotonic() + timeout_s
        while (reply := self._answer(losses, end)) is not None:
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

    def _answer(self, losses: int, end: float) -> Reply | None:
        """The next answer. losses: `self.losses` when the question was sent; with more of them, raises ConnectionLost
        once a store is there again.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor.events, zmq.POLLIN)
        while True:
            reply = self.receive(0)
            left = max(end - time.monotonic(), 0)
            if reply is not None or not left:
                return reply
            if self.losses > losses:
                if self.ready(left):
                    raise ConnectionLost(f"the connection to the store at {self.endpoint} was lost before its answer")
                return None
            poller.poll(int(left * 1000) + 1)

    def reset(self) -> None:
        """Forget everything that was queued or is still to come."""
        if not self._closed:
            self._shut()
            self._socket, self._monitor = self._open()

    def close(self) -> None:
        """Close at once; what is queued is lost. Idempotent."""
        self._closed = True
        self._shut()
        self._context.term()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shut(self) -> None:
        if not self._socket.closed:
            self._monitor.close()
            self._socket.close()

    def _open(self) -> tuple["zmq.Socket[bytes]", ConnectionMonitor]:
        self._opened += 1
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a store that is not there
        socket.set(zmq.SNDHWM, QUEUED_MESSAGES)
        socket.set(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.set(zmq.IPV6, 1 if "[" in self.endpoint else 0)
        if self._keys is not None:
            self._keys.hold(socket)
        monitor = ConnectionMonitor(socket)
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            monitor.close()
            socket.close()
            raise ValueError(f"{self.endpoint!r} is no endpoint, expected something like tcp://host:5600") from error
        return socket, monitor

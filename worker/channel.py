"""Rank 0's sockets: the API and supervisor on one side, the weight store on the other, one inbox for both.

Messages are handed out in the order in which they were read, typed; bytes that do not decode are answered
and counted here. All sockets belong to the thread that made the channel.
"""

import logging
import math
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rollout_client.prompt_threads import prompt_context
from weight_manager import messages as store_messages
from weight_manager.curve import Gate, StoreKeys
from weight_manager.errors import UNREADABLE
from weight_manager.metrics import Counters
from worker import messages

log = logging.getLogger(__name__)

_HANDSHAKE = zmq.Event.HANDSHAKE_SUCCEEDED
_GONE = zmq.Event.DISCONNECTED
_MAX_PER_RECEIVE = 256
"""Messages taken in one go, so that a flood cannot keep the loop from stepping."""


Send = Callable[[bytes, messages.ToApi], object]
"""How answers go to a connection of the API or the supervisor: `Channel.send_api`."""


@dataclass(frozen=True)
class FromApi:
    """A message of the API or the supervisor; origin names the connection to answer on."""

    origin: bytes
    message: messages.FromApi


@dataclass(frozen=True)
class FromStore:
    """A message of the weight store."""

    message: store_messages.ToReplica


@dataclass(frozen=True)
class StoreUp:
    """A store answers at the other end, maybe a new one: register."""


@dataclass(frozen=True)
class StoreDown:
    """The connection to the store is gone; it is being tried again by itself."""


@dataclass(frozen=True)
class Terminate:
    """SIGTERM."""


@dataclass(frozen=True)
class OriginGone:
    """The connection `origin` cannot be written to any more; nobody waits for its requests."""

    origin: bytes


Incoming = FromApi | FromStore | StoreUp | StoreDown | Terminate | OriginGone


class Channel:
    """ROUTER bound at run_dir/replica-{r}.sock and DEALER connected to run_dir/store.sock."""

    def __init__(self, run_dir: Path, replica: int, listen: str = "", keys: StoreKeys | None = None) -> None:
        """listen: a tcp:// endpoint instead of the socket file, for an API on another host; it takes keys."""
        if listen and keys is None:
            raise ValueError(f"{listen} can be reached from other hosts: worker.curve_keys must be set")
        self.bad_messages = 0
        self._gone: list[bytes] = []
        self._context = prompt_context()
        self.run_dir = run_dir
        self._path = run_dir / f"replica-{replica}.sock"
        self._path.unlink(missing_ok=True)  # left by a predecessor that was killed
        self._api = self._context.socket(zmq.ROUTER)
        self._api.set(zmq.LINGER, 500)
        self._api.set(zmq.ROUTER_MANDATORY, 1)  # a connection that is gone is an error, not silence
        self._api.set(zmq.SNDHWM, 100_000)
        self._api.set(zmq.MAXMSGSIZE, 256 << 20)
        self._gate: Gate | None = None
        if listen:
            assert keys is not None
            self._gate = Gate(self._context, keys, Counters())
            keys.lock(self._api)
            self._api.set(zmq.IPV6, int("[" in listen))
        self._api.bind(listen or f"ipc://{self._path}")
        self._store = self._context.socket(zmq.DEALER)
        self._store.set(zmq.LINGER, 500)
        self._store.set(zmq.IMMEDIATE, 1)  # nothing is kept for a store that is not there
        self._store.set(zmq.RECONNECT_IVL, 50)
        self._store.set(zmq.RECONNECT_IVL_MAX, 500)
        self._monitor = self._store.get_monitor_socket(int(_HANDSHAKE | _GONE))
        self._store.connect(f"ipc://{run_dir / 'store.sock'}")
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._poller = zmq.Poller()
        for readable in (self._api, self._store, self._monitor, self._wake_read):
            self._poller.register(readable, zmq.POLLIN)
        if self._gate is not None:
            self._poller.register(self._gate.socket, zmq.POLLIN)

    def on_sigterm(self) -> None:
        """Deliver SIGTERM as `Terminate`. Call from the main thread."""
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _noted)

    def receive(self, timeout_s: float) -> list[Incoming]:
        """Wait up to timeout_s for anything, then take what is there."""
        inbox: list[Incoming] = [OriginGone(origin) for origin in self._gone]
        self._gone.clear()
        wait_ms = 0 if inbox else max(0, math.ceil(timeout_s * 1000))
        ready = dict(self._poller.poll(wait_ms))
        if self._wake_read.fileno() in ready and self._wake_read.recv(64):
            inbox.append(Terminate())
        if self._monitor in ready:
            event = recv_monitor_message(self._monitor)["event"]
            inbox.append(StoreUp() if event == _HANDSHAKE else StoreDown())
        if self._gate is not None and self._gate.socket in ready:
            self._gate.answer()
        if self._store in ready:
            self._drain(self._store, self._read_store, inbox)
        if self._api in ready:
            self._drain(self._api, self._read_api, inbox)
        return inbox

    def receive_store(self) -> list[store_messages.ToReplica]:
        """What the store has said and is unread; does not wait."""
        inbox: list[Incoming] = []
        if self.store_waits:
            self._drain(self._store, self._read_store, inbox)
        return [incoming.message for incoming in inbox if isinstance(incoming, FromStore)]

    @property
    def store_waits(self) -> bool:
        """A message of the store lies unread."""
        return bool(int(self._store.get(zmq.EVENTS)) & zmq.POLLIN)

    def send_api(self, origin: bytes, message: messages.ToApi) -> bool:
        """False if that connection is gone or takes nothing any more; `OriginGone` follows."""
        return self._reply(origin, messages.encode(message))

    def send_store(self, message: store_messages.FromReplica) -> bool:
        """False if no store is connected: the message is dropped, and `StoreUp` will come."""
        try:
            self._store.send(store_messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Flush for half a second at most, and unlink the socket file."""
        self._store.disable_monitor()
        for closing in (self._monitor, self._store, self._api):
            closing.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        self._wake_read.close()
        self._wake_write.close()
        self._path.unlink(missing_ok=True)

    def _drain(self, source: Any, read: Callable[[list[bytes]], Incoming | None], inbox: list[Incoming]) -> None:
        for _ in range(_MAX_PER_RECEIVE):
            try:
                frames: list[bytes] = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            incoming = read(frames)
            if incoming is not None:
                inbox.append(incoming)

    def _read_api(self, frames: list[bytes]) -> Incoming | None:
        origin, *rest = frames
        try:
            if len(rest) != 1:
                raise ValueError(f"one frame is wanted, {len(rest)} came")
            return FromApi(origin, messages.decode_from_api(rest[0]))
        except (ValueError, *UNREADABLE) as error:
            self.bad_messages += 1
            log.warning("bad message on the replica socket: %s", error)
            self._reply(origin, messages.encode(messages.CallFailed("", "bad_message", str(error))))
            return None

    def _read_store(self, frames: list[bytes]) -> Incoming | None:
        try:
            if len(frames) != 1:
                raise ValueError(f"one frame is wanted, {len(frames)} came")
            return FromStore(store_messages.decode_for_replica(frames[0]))
        except (ValueError, *UNREADABLE) as error:
            self.bad_messages += 1
            log.warning("bad message from the weight store: %s", error)
            return None

    def _reply(self, origin: bytes, payload: bytes) -> bool:
        try:
            self._api.send_multipart([origin, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if origin not in self._gone:
                self._gone.append(origin)
            return False
        return True


def _noted(_signum: int, _frame: FrameType | None) -> None:
    """The wake-up socket says the rest."""

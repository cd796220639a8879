"""One DEALER that stays connected to one process of this service: a replica's rank 0, or the store.

A link is up between a completed ZMQ handshake and the first sign of death:

| seen | means | the link |
|---|---|---|
| the socket closes (at once, through the socket monitor) | the process is gone, or hung and ended itself | is lost |
| ZMQ's own heartbeats are not answered for `silence_s` | the process is stopped, or its host is gone | is lost |
| they are, by ZMQ's thread in the process, but it says nothing | it is in a long step | stays |
| the same for `stuck_s` | it hangs, and did not notice | is lost |

What this process stands still itself is no silence of the other's: nobody was asked or heard meanwhile.

Each connection uses a fresh socket, so nothing from before a death is delivered after it.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from rollout_client.curve import TrainerKeys
from weight_manager.errors import UNREADABLE
from worker.background import AGAIN_S

log = logging.getLogger(__name__)

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class LinkDown(Exception):
    """The process at the other end is gone, or was never there."""


class Listener(Protocol[T_contra]):
    """What a link tells its owner. All calls come from the event loop and must not block."""

    def on_up(self) -> None:
        """Connected: greet."""

    def on_message(self, message: T_contra) -> None:
        """Something arrived (answers to `call` too)."""

    def on_quiet(self) -> None:
        """Nothing was heard for a while: ask for a sign of life."""

    def on_down(self, reason: str) -> None:
        """Lost; whatever was asked will not be answered."""


class Link(Generic[T]):
    """A connection that is made anew when it is lost. `run` keeps it going until cancelled."""

    def __init__(
        self,
        endpoint: str,
        listener: Listener[T],
        *,
        encode: Callable[[Any], bytes],
        decode: Callable[[bytes], T],
        quiet_s: float,
        silence_s: float,
        stuck_s: float,
        keys: TrainerKeys | None = None,
        name: str = "",
    ) -> None:
        """quiet_s: after how long the other side is asked for a word. keys: who we are, where it asks for that.

        name: what all connections of ours are called, one after the other; "" = nothing.
        """
        self.endpoint = endpoint
        self._listener = listener
        self._encode = encode
        self._decode = decode
        self._quiet_s = quiet_s
        self._silence_s = silence_s
        self._stuck_s = stuck_s
        self._keys = keys
        self._name = name
        self._socket: zmq.asyncio.Socket | None = None
        self._calls: dict[str, asyncio.Future[T]] = {}
        self._ids = itertools.count(1)
        self._heard = 0.0

    @property
    def up(self) -> bool:
        """Whether a process is there."""
        return self._socket is not None

    @property
    def silent_s(self) -> float:
        """How long nothing was heard; infinite when nobody is there."""
        return asyncio.get_running_loop().time() - self._heard if self.up else float("inf")

    def post(self, message: Any) -> None:
        """Send without waiting; messages leave in the order of the calls. Raises LinkDown, and what encoding raises."""
        if self._socket is None:
            raise LinkDown(f"nothing listens on {self.endpoint}")
        self._socket.send(self._encode(message))

    def start_call(self, build: Callable[[str], Any]) -> asyncio.Future[T]:
        """Send a message built around a fresh call id; the future is its answer or LinkDown."""
        call = f"c{next(self._ids)}"
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        future.add_done_callback(lambda _: self._calls.pop(call, None))
        try:
            self.post(build(call))
        except LinkDown as error:
            future.set_exception(error)
        except BaseException:  # it cannot be written: nobody will answer
            future.cancel()
            raise
        return future

    async def run(self) -> None:
        """Connect, serve, reconnect, for ever. What the listener fails at ends one connection, not this."""
        context = zmq.asyncio.Context.instance()
        while True:
            socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._silence_s * 250))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._silence_s * 750))
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            if self.endpoint.startswith("tcp://"):
                socket.setsockopt(zmq.IPV6, int("[" in self.endpoint))
            if self._name:
                socket.setsockopt(zmq.IDENTITY, f"{self._name}-{secrets.token_hex(8)}".encode())
            if self._keys is not None:
                self._keys.hold(socket)
            monitor = socket.get_monitor_socket(_EVENTS)
            socket.connect(self.endpoint)
            reason, failed = "", False  # no reason: we are being cancelled, and nobody needs to be told
            try:
                while (await recv_monitor_message(monitor))["event"] != zmq.Event.HANDSHAKE_SUCCEEDED:
                    pass
                self._socket = socket
                self._heard = asyncio.get_running_loop().time()
                self._listener.on_up()
                reason = await self._serve(socket, monitor)
            except Exception as error:
                log.exception("%s: the connection is given up", self.endpoint)
                reason = f"an error of our own: {error!r}"
                failed = True
            finally:
                was_up, self._socket = self._socket is not None, None
                socket.disable_monitor()
                monitor.close(linger=0)
                socket.close(linger=0)
                for future in list(self._calls.values()):
                    if not future.done():
                        future.set_exception(LinkDown(f"{self.endpoint}: {reason or 'closed'}"))
                if was_up and reason:
                    self._lost(reason)
            if failed:
                await asyncio.sleep(AGAIN_S)

    def _lost(self, reason: str) -> None:
        try:
            self._listener.on_down(reason)
        except Exception:
            log.exception("%s: after the connection was lost", self.endpoint)

    async def _serve(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> str:
        tasks = [
            asyncio.create_task(self._receive(socket)),
            asyncio.create_task(self._until_disconnected(monitor)),
            asyncio.create_task(self._until_silent()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, socket: zmq.asyncio.Socket) -> str:
        clock = asyncio.get_running_loop().time
        while True:
            frame = await socket.recv()
            self._heard = clock()
            try:
                message = self._decode(frame)
            except UNREADABLE as error:
                # Only a process of another build can do this; its next message may be good.
                log.error("unreadable message from %s: %s", self.endpoint, error)
                continue
            call = getattr(message, "call", "")
            if call and (future := self._calls.get(call)) is not None and not future.done():
                future.set_result(message)
            self._listener.on_message(message)

    async def _until_disconnected(self, monitor: zmq.asyncio.Socket) -> str:
        while (await recv_monitor_message(monitor))["event"] != zmq.Event.DISCONNECTED:
            pass
        return "the process is gone, stood still, or cannot be reached"

    async def _until_silent(self) -> str:
        clock = asyncio.get_running_loop().time
        while True:
            silent = clock() - self._heard
            if silent >= self._stuck_s:
                return f"silent for {silent:.0f} s"
            if silent >= self._quiet_s:
                self._listener.on_quiet()
            pause, before = min(self._quiet_s, self._stuck_s - silent) / 2 + 0.01, clock()
            await asyncio.sleep(pause)
            late = clock() - before - pause  # it is we who were given no time, and nobody was asked or heard meanwhile
            self._heard = min(clock(), self._heard + late)

"""The one poll of the store's loop: ZMQ sockets by themselves, file descriptors with what is to be called for them."""

from collections.abc import Callable
from typing import Any

import zmq

Ready = dict[Any, Callable[[], object] | None]


class Watching:
    """Only the loop's thread touches it."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._calls: dict[int, Callable[[], object]] = {}

    def add(self, socket: "zmq.Socket[bytes]") -> None:
        """Wake up when messages wait in it."""
        self._poller.register(socket, zmq.POLLIN)

    def remove(self, socket: "zmq.Socket[bytes]") -> None:
        """Do not wake up for it any more."""
        self._poller.unregister(socket)

    def watch(self, fd: int, ready: Callable[[], object], *, to_write: bool = False) -> None:
        """Call `ready` once per turn while fd is readable, or while it can be written to."""
        self._calls[fd] = ready
        self._poller.register(fd, zmq.POLLOUT if to_write else zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Do not call anything for this descriptor any more."""
        if self._calls.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def wait(self, patience_ms: int | None) -> Ready:
        """What is ready, with what is to be called for descriptors; nothing after so long."""
        return {ready: self._calls.get(ready) for ready, _ in self._poller.poll(patience_ms)}

    def call(self, ready: Ready) -> None:
        """Make the calls of what was ready, unless it is no longer watched: the number may be another's by now."""
        for fd, call in ready.items():
            if call is not None and self._calls.get(fd) is call:
                call()

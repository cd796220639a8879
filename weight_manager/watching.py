"""The one poll of the store's loop: ZMQ sockets by themselves, file descriptors with what is to be called for them."""

from collections.abc import Callable

import zmq


class Watching:
    """Only the loop's thread touches it."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._calls: dict[int, Callable[[], object]] = {}

    def add(self, socket: "zmq.Socket[bytes]") -> None:
        """Wake up when messages wait in it."""
        self._poller.register(socket, zmq.POLLIN)

    def remove(self, socket: "zmq.Socket[bytes]") -> None:
        """Stop that."""
        self._poller.unregister(socket)

    def watch(self, fd: int, ready: Callable[[], object], *, to_write: bool = False) -> None:
        """Call `ready` once per turn while fd is readable, or while it can be written to."""
        self._calls[fd] = ready
        self._poller.register(fd, zmq.POLLOUT if to_write else zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop that."""
        if self._calls.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def wait(self, patience_ms: int | None) -> set[object]:
        """Sockets and descriptors that are ready; none after so long."""
        return set(dict(self._poller.poll(patience_ms)))

    def call(self, ready: set[object]) -> None:
        """What is to be called for these, unless it is no longer watched."""
        for fd in ready:
            call = self._calls.get(fd) if isinstance(fd, int) else None
            if call is not None:
                call()

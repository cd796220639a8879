"""Reading a data connection in a thread: it sleeps until much has come, and never for long."""

import select
import socket

LOW_WATER = 1 << 20
"""Bytes that are waited for: on a link slower than the processor each packet would wake the thread otherwise."""
HEARD_S = 0.25
"""The most that a reader waits for the rest of them; also how often the loop hears that bytes arrive."""
PIECE_BYTES = 256 << 10
"""Received and hashed at a time: small enough to be in the core's cache still."""


class Receiving:
    """Of one connection. Raises ConnectionError when the peer has gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._low = 0

    def some(self, place: memoryview, left: int) -> int:
        """Bytes that were put into `place`, at least one. left: that the peer sends in any case, these included."""
        while True:
            try:
                count = self._socket.recv_into(place, len(place), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(min(left, LOW_WATER))
                continue
            if not count:
                raise ConnectionError("the peer is gone")
            return count

    def exactly(self, size: int) -> memoryview:
        """So many bytes."""
        content, done = memoryview(bytearray(size)), 0
        while done < size:
            done += self.some(content[done:], size - done)
        return content

    def _wait(self, size: int) -> None:
        if size != self._low:
            self._low = size
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        self._poll.poll(HEARD_S * 1000)

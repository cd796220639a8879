"""The bytes of a session for one store below, over a TCP socket of their own (rollout_client/data_socket.py says why).

Written by the store's loop, as much at a time as the kernel takes. After the key and `READY`, as for a trainer:
`RECORD` (region, offset, bytes) and those bytes of the region, in any order; `RECORD` (CLAIM, region, digest) once all
of a region was sent; `RECORD` (END, 0, 0). The store below reads with `Reception`. Little-endian, not encrypted.
"""

import socket
import struct
from collections.abc import Iterable

from weight_manager.watching import Watching

RECORD = struct.Struct("<IQQ")
CLAIM, END = 0xFFFFFFFE, 0xFFFFFFFF


class Feed:
    """One connection, for one session. `lost`: it broke and is closed; the store below gives the session up."""

    def __init__(self, connection: socket.socket, watching: Watching) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lost = False
        self._socket = connection
        self._watching = watching
        self._watched = False
        self._rest: list[memoryview] = []

    def put(self, records: Iterable[tuple[int, int, int]], content: memoryview | None = None) -> None:
        """Queue records, and the bytes that a single one announces; `flush` sends them."""
        if not self.lost:
            self._rest.append(memoryview(b"".join(RECORD.pack(*record) for record in records)))
            self._rest += [] if content is None else [content]

    def flush(self) -> bool:
        """Hand over what was queued; whether nothing is left. If something is, the loop turns when there is room."""
        while self._rest and not self.lost:
            try:
                count = self._socket.sendmsg(self._rest)
            except BlockingIOError:
                break
            except OSError:
                self.lost = True
                self.close()
            else:
                self._sent(count)
        if not self.lost:
            self.turn_again(bool(self._rest))
        return not (self._rest or self.lost)

    def turn_again(self, wanted: bool) -> None:
        """Whether the loop is to turn as soon as there is room, to send more."""
        if wanted == self._watched:
            return
        self._watched = wanted
        if wanted:
            self._watching.watch(self._socket.fileno(), lambda: None, to_write=True)
        else:
            self._watching.unwatch(self._socket.fileno())

    def close(self) -> None:
        """Nothing more is sent. Idempotent."""
        self.turn_again(False)
        self._rest.clear()
        self._socket.close()

    def _sent(self, count: int) -> None:
        while self._rest and count >= len(self._rest[0]):
            count -= len(self._rest.pop(0))
        if count:
            self._rest[0] = self._rest[0][count:]

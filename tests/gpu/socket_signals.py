"""What the ranks of a replica tell each other, over a Unix socket: in the place of Paddle's gloo group, on a host that
has no Paddle. Rank 0 is in the middle of it."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from worker.orders import GroupDead, Int32, Order

_PATIENCE_S = 60.0
_LONGEST_S = 30.0
"""As Paddle's gloo: a collective fails then, and the group is dead."""
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Order).decode
_encode_all, _decode_all = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(list[bytes]).decode


class SocketSignals:
    """`worker.orders.Signals`. A rank that closes its end, as the kernel does for a dead one, ends it for all."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._others: list[socket.socket] = []
        if rank == 0:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen(size)
            listener.settimeout(_PATIENCE_S)
            ends = dict(self._accepted(listener) for _ in range(size - 1))
            self._others = [ends[other] for other in range(1, size)]
        else:
            self._others = [self._connected(path)]
        for other in self._others:
            other.settimeout(_LONGEST_S)
        self.pids = [int(data) for data in self.gather(str(os.getpid()).encode())]

    def agree(self, order: Order | None) -> Order:
        """Rank 0's order."""
        return _decode(self._from_first(_encode(order) if order is not None else b""))

    def share(self, batch: Int32 | None) -> Int32 | None:
        """Rank 0's batch, or none."""
        data = self._from_first(b"" if batch is None else np.ascontiguousarray(batch).tobytes())
        return np.frombuffer(data, np.int32).copy() if data else None

    def vote(self, mine: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's numbers."""
        return [tuple(data) for data in self.gather(bytes(mine))]

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes."""
        if self.rank:
            self._send(self._others[0], data)
            return _decode_all(self._received(self._others[0]))
        found = [data, *(self._received(other) for other in self._others)]
        for other in self._others:
            self._send(other, _encode_all(found))
        return found

    def _from_first(self, data: bytes) -> bytes:
        if self.rank:
            return self._received(self._others[0])
        for other in self._others:
            self._send(other, data)
        return data

    def _accepted(self, listener: socket.socket) -> tuple[int, socket.socket]:
        end, _ = listener.accept()
        return int(self._received(end)), end

    def _connected(self, path: Path) -> socket.socket:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            end = socket.socket(socket.AF_UNIX)
            try:
                end.connect(str(path))
            except OSError:
                end.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                self._send(end, str(self.rank).encode())
                return end

    @staticmethod
    def _send(end: socket.socket, data: bytes) -> None:
        try:
            end.sendall(len(data).to_bytes(8, "little") + data)
        except OSError as error:
            raise GroupDead(f"a peer closed the group: {error}") from error

    def _received(self, end: socket.socket) -> bytes:
        return self._exactly(end, int.from_bytes(self._exactly(end, 8), "little"))

    @staticmethod
    def _exactly(end: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = end.recv(size - len(data))
            except OSError as error:
                raise GroupDead(f"a peer closed the group: {error}") from error
            if not more:
                raise GroupDead("a peer closed the group")
            data += more
        return data

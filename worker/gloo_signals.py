"""The signal group of a tensor-parallel replica: one gloo group, made once at start, on CPU tensors.

Collectives here carry integers, never weights, and nobody works between two of them, so Paddle's fixed 30 s
limit is reached only when a rank is gone or has stood still that long. Both surface as a RuntimeError that
says TIMEOUT; the pids tell which it was.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from worker.orders import VOTE_CELLS, GroupDead, Int32, Order, Phase, Signal

_HEADER = 6  # tick, signal, phase, vote, step, bytes of details
_INLINE = 2047
"""int32 of a batch that travel with its length in one broadcast; a longer one needs a second."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Order).decode


class GlooSignals:
    """`Signals` over a Paddle gloo group whose ranks are 0..size-1 of the process world."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        import paddle.distributed as dist  # noqa: PLC0415  only ranks that need a group load Paddle for it
        from paddle.utils.dlpack import from_dlpack  # noqa: PLC0415

        self.rank = rank
        self.size = size
        self.ticks = 0
        self._dist = dist
        self._group = group
        self._as_tensor = from_dlpack
        self._pids: list[int] = []
        self._header = np.zeros(_HEADER, np.int64)
        self._cells = np.zeros((size, VOTE_CELLS), np.int64)
        self._batch = np.zeros(1 + _INLINE, np.int32)
        # The tensors alias the arrays: a broadcast writes straight into them.
        self._header_tensor = from_dlpack(self._header)
        self._cells_tensor = from_dlpack(self._cells)
        self._batch_tensor = from_dlpack(self._batch)
        self._pids = [int(data) for data in self.gather(str(os.getpid()).encode())]

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        return list(self._pids)

    def agree(self, order: Order | None) -> Order:
        """One broadcast of six integers, and one more when the order has details: anything that these do not say."""
        details = b""
        if order is not None:
            if order != Order(order.signal, order.phase, order.vote, order.step):
                details = _encode(order)
            self._header[:] = (self.ticks + 1, order.signal, order.phase, order.vote, order.step, len(details))
        self._broadcast(self._header_tensor, 0)
        tick, signal, phase, vote, step, size = (int(x) for x in self._header)
        if tick != self.ticks + 1:
            raise GroupDead(f"rank {self.rank} is at tick {self.ticks} and was sent tick {tick}")
        self.ticks = tick
        if size:
            return _decode(self._bytes(details, size, 0))
        return Order(Signal(signal), Phase(phase), bool(vote), bool(step))

    def share(self, batch: Int32 | None) -> Int32 | None:
        """The batch behind its length; one broadcast for most, two for long ones."""
        if self.rank == 0:
            size = 0 if batch is None else len(batch)
            self._batch[0] = size
            if batch is not None:
                self._batch[1 : 1 + min(size, _INLINE)] = batch[:_INLINE]
        self._broadcast(self._batch_tensor, 0)
        size = int(self._batch[0])
        if size == 0:
            return None
        if size <= _INLINE:
            return self._batch[1 : 1 + size].copy()
        rest = np.zeros(size - _INLINE, np.int32) if batch is None else np.ascontiguousarray(batch[_INLINE:])
        self._broadcast(self._as_tensor(rest), 0)
        return np.concatenate((self._batch[1:], rest))

    def vote(self, mine: Sequence[int]) -> list[tuple[int, ...]]:
        """One all-reduce in which every rank writes its own row only."""
        self._cells[:] = 0
        self._cells[self.rank] = mine
        self._run(lambda: self._dist.all_reduce(self._cells_tensor, group=self._group))
        return [tuple(int(x) for x in row) for row in self._cells]

    def gather(self, data: bytes) -> list[bytes]:
        """The lengths by one all-reduce, then one broadcast from each rank that has anything."""
        sizes = np.zeros(self.size, np.int64)
        sizes[self.rank] = len(data)
        tensor = self._as_tensor(sizes)
        self._run(lambda: self._dist.all_reduce(tensor, group=self._group))
        return [
            self._bytes(data if source == self.rank else b"", int(size), source) if size else b""
            for source, size in enumerate(sizes)
        ]

    def _bytes(self, data: bytes, size: int, source: int) -> bytes:
        buffer: npt.NDArray[np.uint8] = np.zeros(size, np.uint8)
        if data:
            buffer[:] = np.frombuffer(data, np.uint8)
        self._broadcast(self._as_tensor(buffer), source)
        return buffer.tobytes()

    def _broadcast(self, tensor: Any, source: int) -> None:
        self._run(lambda: self._dist.broadcast(tensor, src=source, group=self._group))

    def _run(self, collective: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            collective()
        except RuntimeError as error:
            raise self._dead(time.monotonic() - began, error) from error

    def _dead(self, waited: float, error: RuntimeError) -> GroupDead:
        """Peer death or overrun: the message says TIMEOUT for both, so ask the system who is alive."""
        lost = [rank for rank, pid in enumerate(self._pids) if not _alive(pid)]
        if lost:
            names = ", ".join(f"rank {rank} (pid {self._pids[rank]})" for rank in lost)
            return GroupDead(f"{names} is gone", lost)
        # A peer that leaves closes its sockets before its pid goes.
        detail = str(error).strip().splitlines()[-1] if str(error).strip() else "no detail"
        if waited < 20.0:
            return GroupDead(f"a peer closed the group after {waited:.1f} s: {detail}")
        return GroupDead(f"every rank lives, but one did not answer for {waited:.0f} s: {detail}")


def _alive(pid: int) -> bool:
    """A zombie is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

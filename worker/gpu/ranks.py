"""A rank on a GPU among those that share its replica's model: what it holds, and how it sums with the others.

Every collective follows from the step's batch alone, which all ranks were given: so all launch the same ones in the
same order, and none waits for another's host.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from worker.gpu.driver import Driver, Handle
from worker.gpu.nccl import FLOAT32, INT32, NcclGroups
from worker.gpu.peers import FEW, PeerSums
from worker.models.shard import Shard
from worker.orders import Groups


@dataclass(frozen=True)
class Meeting:
    """How the ranks of a replica find each other. gather: every rank's bytes, in rank order, on all; called by all in
    the same order. pids: of their processes. deadline_s: for a sum, and for the ranks to come.
    """

    gather: Callable[[bytes], list[bytes]]
    pids: Sequence[int]
    deadline_s: float


class SharingDriver(Driver):
    """A driver whose waits are for nothing when the sums that they waited for were ended."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self.check: Callable[[], None] = lambda: None

    def wait(self, event_or_stream: Handle, *, event: bool = False) -> None:
        """Let the host wait for an event or a stream. Raises GroupDead."""
        try:
            super().wait(event_or_stream, event=event)
        finally:
            self.check()  # why kernels failed, if they did, before how


@dataclass(frozen=True)
class Ranks:
    """This rank and the others. shards: of all, in rank order. peers: sums of few numbers; None: NCCL has them too."""

    shards: tuple[Shard, ...]
    rank: int
    groups: NcclGroups
    peers: PeerSums | None = None

    @property
    def first(self) -> bool:
        """This rank has the residual stream to which the others add, and draws."""
        return self.rank == 0

    @property
    def own(self) -> Shard:
        """What this rank holds."""
        return self.shards[self.rank]

    @property
    def splits_vocabulary(self) -> bool:
        """Each rank has rows of embedding and head of its own, else all have all."""
        return "model.embed_tokens.weight" not in self.own.whole

    def sum(self, address: int, count: int, stream: Handle) -> None:
        """Queue the sum of float32 numbers over the ranks, in place."""
        if self.peers is not None and count <= FEW:
            self.peers.sum(address, count, stream)
        else:
            self.groups.all_reduce(address, count, FLOAT32, stream)

    def gather(self, source: int, target: int, count: int, stream: Handle) -> None:
        """Queue all ranks' float32 numbers one after the other."""
        self.groups.all_gather(source, target, count, FLOAT32, stream)

    def tell(self, address: int, count: int, stream: Handle) -> None:
        """Queue the first rank's int32 numbers to all others' places."""
        self.groups.broadcast(address, count, INT32, stream)


class SharedGroups:
    """`worker.orders.Groups` of a rank whose graphs hold the communicator: both go and come together.

    others: groups that Paddle made, first in both halves.
    """

    def __init__(
        self, others: Groups, groups: NcclGroups, drop_graphs: Callable[[], None], capture: Callable[[], None]
    ) -> None:
        self._others, self._groups, self._drop_graphs, self._capture = others, groups, drop_graphs, capture

    def shutdown(self) -> list[str]:
        """Shut what can be shut; names. NCCL waits for graphs that hold its communicator, so these go first."""
        names = self._others.shutdown()
        self._drop_graphs()
        return [*names, *self._groups.shutdown()]

    def restart(self) -> list[str]:
        """Bring back what is shut, and capture again; names. Repeatable: graphs that are there stay."""
        names = self._others.restart()
        names += self._groups.restart()
        self._capture()
        return names

    def prove(self) -> None:
        """Raises GroupDead when the next step would fail, too."""
        self._others.prove()
        self._groups.prove()


def least(meeting: Meeting, mine: int) -> int:
    """The smallest of all ranks' numbers."""
    return min(int(data) for data in meeting.gather(str(mine).encode()))


def same(meeting: Meeting, mine: Any) -> bool:
    """Whether all ranks say the same."""
    return len(set(meeting.gather(json.dumps(mine).encode()))) == 1

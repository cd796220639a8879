"""What the ranks of one replica tell each other, once a tick: rank 0 decides, every rank does the same.

`Order` is a tick's decision. Its fixed part travels as four integers, its details as msgpack bytes and only
when there are any. An order is started at one tick and its outcome is agreed at a later one (`Order.vote`):
each rank fills its own cell, so no rank ever raises alone between two collectives, and no collective waits
for work. A tick without anything to say is not sent, but for a heartbeat.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from weight_manager.messages import Live, LiveAdapter
from worker.messages import Tag

Int32 = npt.NDArray[np.int32]


class Signal(IntEnum):
    """What every rank does at this tick."""

    RUN = 0  # go on; a step may follow
    UPDATE = 1  # one phase of a weight change
    CLEAR = 2  # release parameters and/or KV
    RELOAD = 3  # map the live version and/or allocate KV
    PAUSE = 4  # stand still
    VERIFY = 5  # checksum what is held
    STOP = 6  # leave the loop
    ADAPTER = 7  # hold one more version of an adapter, or one less


class Phase(IntEnum):
    """Which part of a signal that takes several ticks."""

    NONE = 0
    PREPARE = 1  # UPDATE: build views of the staged slot, in the background
    FLIP = 2
    FINALIZE = 3
    ROLLBACK = 4
    RELEASE = 5  # CLEAR: give memory back
    SHUT = 6  # CLEAR: shut the groups, once every rank has released
    RESTART = 7  # RELOAD: groups back
    MAP = 8  # RELOAD: views of the live slot and KV, in the background
    FORGET = 9  # ADAPTER: nothing computes with a version any more (PREPARE as of an UPDATE)


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rank 0's decision for one tick.

    live, session: of the weight change. arena_path: the arena that `live` lies in. tags: what to release or
    bring back. adapter: to prepare; epoch: of the one to forget. vote: every rank tells how its work stands and how its
    last step went, before it acts.
    """

    signal: Signal = Signal.RUN
    phase: Phase = Phase.NONE
    vote: bool = False
    step: bool = False
    session: str = ""
    live: Live | None = None
    arena_path: str = ""
    tags: tuple[Tag, ...] = ()
    adapter: LiveAdapter | None = None
    epoch: int = 0


class GroupDead(RuntimeError):
    """The signal group can no longer be used; this rank must leave.

    lost: ranks whose process is gone. Empty: all live, and one of them overran the group's 30 s.
    """

    def __init__(self, message: str, lost: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.lost = tuple(lost)


class Signals(Protocol):
    """The signal group, seen from one rank. Every call is made by all ranks in the same order."""

    rank: int
    size: int

    def agree(self, order: Order | None) -> Order:
        """Rank 0 gives the tick's order, the others pass None and wait for it. Raises GroupDead."""
        ...

    def share(self, batch: Int32 | None) -> Int32 | None:
        """Rank 0's packed batch on every rank; None when there is none this time. Raises GroupDead."""
        ...

    def vote(self, mine: Sequence[int]) -> list[tuple[int, ...]]:
        """Each rank's small integers, in rank order. `mine` always has VOTE_CELLS of them. Raises GroupDead."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Each rank's bytes, in rank order; every rank gets all. For rare and small things. Raises GroupDead."""
        ...


VOTE_CELLS = 2
PENDING, DONE, FAILED = 0, 1, 2
"""How a rank's work stands, as its cell of a vote says it."""


class LocalSignals:
    """A replica of one rank agrees with itself."""

    rank = 0
    size = 1

    def agree(self, order: Order | None) -> Order:
        """The order itself."""
        assert order is not None
        return order

    def share(self, batch: Int32 | None) -> Int32 | None:
        """The batch itself."""
        return batch

    def vote(self, mine: Sequence[int]) -> list[tuple[int, ...]]:
        """One row."""
        return [tuple(mine)]

    def gather(self, data: bytes) -> list[bytes]:
        """One item."""
        return [data]


@dataclass(frozen=True)
class Verdict:
    """What all ranks said about one thing, the same on every rank.

    rank, error, tensors: of the first rank that failed. data: what each rank reported.
    """

    ok: bool
    rank: int = 0
    error: str = ""
    tensors: list[str] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's word on one thing."""

    error: str = ""
    tensors: list[str] = []
    data: dict[str, Any] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Report).decode


def judge(signals: Signals, states: Sequence[int], report: Report) -> Verdict | None:
    """The verdict once no rank is pending, else None. states: one per rank, from a vote.

    All ranks call it with the same states, so all of them gather, or none does.
    """
    if PENDING in states:
        return None
    reports = [_decode(data) for data in signals.gather(_encode(report))]
    for rank, state in enumerate(states):
        if state == FAILED:
            return Verdict(False, rank, reports[rank].error, reports[rank].tensors)
    return Verdict(True, data=[r.data for r in reports])

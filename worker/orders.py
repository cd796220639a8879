"""Orders: what rank 0 decides at a tick, what the ranks of a replica tell each other of it, and what each one does.

`Order` is a tick's decision. Its fixed part travels as four integers, its details as msgpack bytes and only when there
are any; a tick without anything to say is not sent, but for a heartbeat. `Actions.start` begins an order's work, and
`settle` ends it at a later tick (`Order.vote`), once all ranks agreed how it went: each rank fills its own cell, so no
rank ever raises alone between two collectives, and no collective waits for work. What may take long (building views of
a slot, allocating KV, checksums) runs in a thread between the two, so the loop keeps ticking and generating. What may
not fail halfway (the flip itself) is a pointer swap in `start` or `settle`.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from weight_manager.dynamic_weight_manager import CopiesAhead, DynamicWeightManager
from weight_manager.layout import unpacked
from weight_manager.messages import InPlace, Live, LiveAdapter
from worker.adapter_views import AdapterViews
from worker.engine.base import Engine, Float32, ForwardBatch, Logits, OnDevice
from worker.messages import Tag

log = logging.getLogger(__name__)

Int32 = npt.NDArray[np.int32]
_PREPARE_S, _PREPARE_BESIDE_S = 0.005, 0.0015
"""Preparing a version takes a millisecond or two where nothing has to be moved. The second is where devices of several
ranks compute meanwhile: less than a step, and a vote that is not there by then waits for the end of one. A rank that is
alone looks for it while a step is computed.
"""


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
    TAKE_IN = 10  # ADAPTER: bytes of the next version are there


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rank 0's decision for one tick.

    live, session: of the weight change. regions: digests of those of `live`, as in `Prepare`. arena_path: the arena
    that `live` lies in. tags: what to release or bring back. adapter: to prepare; epoch: of the one to forget;
    in_place: what can be taken in of one that arrives. vote: every rank tells how its work stands and how its last step
    went, before it acts. arrived: parts of the next version of the model that can be copied already.
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
    in_place: InPlace | None = None
    regions: bytes = b""
    arrived: tuple[InPlace, ...] = ()

    @property
    def beside_steps(self) -> bool:
        """A step follows, and the order itself is nothing to one that is under way: the next version is prepared in a
        thread, the one before it is forgotten.
        """
        quiet = self.signal is Signal.UPDATE and self.phase in (Phase.PREPARE, Phase.FINALIZE)
        return self.step and (self.signal is Signal.RUN or quiet)


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
        """The order as it is: there is no other rank."""
        assert order is not None
        return order

    def share(self, batch: Int32 | None) -> Int32 | None:
        """The batch as it is: there is no other rank."""
        return batch

    def vote(self, mine: Sequence[int]) -> list[tuple[int, ...]]:
        """What this rank says, alone."""
        return [tuple(mine)]

    def gather(self, data: bytes) -> list[bytes]:
        """What this rank reports, alone."""
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


class Groups(Protocol):
    """The process groups this rank's collectives run on."""

    def shutdown(self) -> list[str]:
        """Shut what can be shut, in one order. Returns names; repeatable."""
        ...

    def restart(self) -> list[str]:
        """Bring back what is shut, in the same order. Returns names; repeatable."""
        ...

    def prove(self) -> None:
        """Called on every rank after a failed step: raises GroupDead when the next would fail too."""
        ...


class Work:
    """The outcome of an order on this rank, filled in here or by a thread."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.state = PENDING
        self.error = ""
        self.tensors: list[str] = []
        self.data: dict[str, object] = {}
        self._thread: threading.Thread | None = None

    def run(self, act: Callable[[], dict[str, object] | None]) -> None:
        """Do it now. An exception is this rank's no, told to all at the next vote."""
        try:
            self.data = act() or {}
        except Exception as error:
            log.exception("%s %s failed", self.order.signal.name, self.order.phase.name)
            self.error = f"{type(error).__name__}: {error}"
            self.tensors = list(getattr(error, "tensors", ()))
            self.state = FAILED
        else:
            self.state = DONE

    def run_in_background(self, act: Callable[[], dict[str, object] | None], patience_s: float = 0.0) -> None:
        """Do it in a thread, and wait so long for it: what is done by then is voted on as soon as can be. Where the
        system has no thread left, that is this rank's no.
        """
        thread = threading.Thread(target=self.run, args=(act,), name="work", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.error("%s %s failed: %s", self.order.signal.name, self.order.phase.name, error)
            self.error, self.state = str(error), FAILED
            return
        self._thread = thread
        thread.join(patience_s)

    def wait(self, patience_s: float) -> None:
        """Wait so long for its end, and leave Python's lock to whoever does it: one who asks again and again takes it
        from them each time that they come back from the device.
        """
        if self._thread is not None:
            self._thread.join(patience_s)


class Actions:
    """One rank's hands. `work` is the order under way, None between orders."""

    def __init__(
        self,
        engine: Engine,
        map_arena: Callable[[str], DynamicWeightManager],
        groups: Groups,
        release_cached: Callable[[], None],
        adapters: AdapterViews,
    ) -> None:
        self.engine = engine
        self.adapters = adapters
        self.weights: DynamicWeightManager | None = None
        self.released: frozenset[Tag] = frozenset()
        self.work: Work | None = None
        self._map_arena = map_arena
        self._groups = groups
        self._release_cached = release_cached
        self._arena_path = ""
        self._mapping: tuple[str, DynamicWeightManager] | None = None
        self._heard: list[InPlace] = []

    @property
    def fenced(self) -> bool:
        """The store went on without this replica: what it computed with may have been overwritten meanwhile."""
        return bool(self.adapters.overwritten()) or (self.weights is not None and self.weights.fenced())

    @property
    def live(self) -> Live | None:
        """What this rank's engine is bound to."""
        return self.weights.live if self.weights else None

    @property
    def former(self) -> Live | None:
        """The version before the live one, if a step may be computed with it."""
        return self.weights.former if self.weights and "weights" not in self.released else None

    def forward(self, batch: ForwardBatch) -> Float32 | Logits | None:
        """The engine's step, with the weights that the batch names."""
        if not batch.former:
            return self.engine.forward(batch)
        assert self.weights is not None
        with self.weights.bound_to_former():
            return self.engine.forward(batch)

    def launching_with_next(self) -> AbstractContextManager[None] | None:
        """As `DynamicWeightManager` has it; None, too, where no weights are held."""
        if self.weights is None or "weights" in self.released:
            return None
        return self.weights.launching_with_next()

    @property
    def flips_behind(self) -> bool:
        """As `DynamicWeightManager` has it; False where no weights are held."""
        return self.weights is not None and "weights" not in self.released and self.weights.flips_behind

    @property
    def copies_ahead(self) -> bool:
        """Whether this rank's engine copies a version while it arrives."""
        return isinstance(self.engine, CopiesAhead)

    @property
    def adapters_ahead(self) -> bool:
        """Whether this rank copies versions of adapters, and may do so while they arrive."""
        return self.adapters.takes_in

    def hear(self, message: InPlace) -> None:
        """Part of the next version can be copied already: rank 0 hears it, and the next order tells all ranks. What is
        heard of one push until then is one message.
        """
        last = self._heard[-1] if self._heard else None
        if last is not None and (last.slot, last.write_epoch) == (message.slot, message.write_epoch):
            self._heard[-1] = msgspec.structs.replace(last, spans=[*last.spans, *message.spans])
        else:
            self._heard.append(message)

    @property
    def heard(self) -> bool:
        """Whether there is something that ranks have not been told."""
        return bool(self._heard)

    def take_heard(self) -> tuple[InPlace, ...]:
        """What rank 0 has heard since it was last asked."""
        heard, self._heard = self._heard, []
        return tuple(heard)

    def start(self, order: Order, *, alone: bool = False, behind: bool = False) -> None:
        """Begin. FINALIZE, ROLLBACK, FORGET, TAKE_IN and orders without work are over when this returns.

        alone: of no other ranks, so that what has begun can be settled while a step is computed. behind: a flip, while
        steps of the version before may be computed (`flips_behind`).

        What has arrived was heard before an order to prepare it, but after the end of the version before.
        """
        ends = order.phase in (Phase.FINALIZE, Phase.ROLLBACK)
        if not ends:
            self._copy_ahead(order.arrived)
        self._start(order, alone=alone, behind=behind)
        if ends:
            self._copy_ahead(order.arrived)

    def _copy_ahead(self, heard: Sequence[InPlace]) -> None:
        if self.weights is not None and "weights" not in self.released:
            for part in heard:
                self.weights.copy_ahead(part.slot, part.write_epoch, part.spans)

    def _start(self, order: Order, *, alone: bool, behind: bool) -> None:
        match order.signal, order.phase:
            case Signal.UPDATE, Phase.FINALIZE:
                if self.weights and "weights" not in self.released:
                    self.weights.finalize()
            case Signal.UPDATE, Phase.ROLLBACK:
                if self.weights and "weights" not in self.released:
                    self.weights.rollback()
            case Signal.ADAPTER, Phase.FORGET:
                self.adapters.forget(order.epoch)
            case Signal.ADAPTER, Phase.TAKE_IN:
                assert order.in_place is not None
                self.adapters.take_in(order.in_place)
            case Signal.RUN | Signal.PAUSE | Signal.STOP, _:
                pass
            case _:
                assert self.work is None, "one order at a time"
                self.work = Work(order)
                self._begin(self.work, order, alone=alone, behind=behind)

    def settle(self, ok: bool) -> Work:
        """All ranks are through with `work`: keep its effect, or undo it on every rank."""
        work = self.work
        assert work is not None
        self.work = None
        match work.order.signal, work.order.phase:
            case Signal.UPDATE, Phase.PREPARE | Phase.FLIP if not ok:
                if self.weights and "weights" not in self.released:
                    self.weights.rollback()
            case Signal.ADAPTER, _ if not ok and work.order.adapter is not None:
                self.adapters.forget(work.order.adapter.live.epoch)
            case Signal.CLEAR, Phase.RELEASE if ok:
                self.released |= frozenset(work.order.tags)
            case Signal.RELOAD, Phase.MAP:
                self._settle_map(work.order, ok)
        return work

    def recover(self) -> None:
        """Make a new KV cache: after a failed step the old one holds anything. Raises GroupDead."""
        self._groups.prove()
        self.engine.release_kv()
        self.engine.allocate_kv()

    def _begin(self, work: Work, order: Order, *, alone: bool, behind: bool) -> None:
        skip = "weights" in self.released
        match order.signal, order.phase:
            case Signal.UPDATE, Phase.PREPARE:
                computing = order.step and isinstance(self.engine, OnDevice)  # which goes on meanwhile
                patience = (0.0 if alone else _PREPARE_BESIDE_S) if computing else _PREPARE_S
                work.run_in_background(lambda: None if skip else self._prepare(order), patience)
            case Signal.ADAPTER, Phase.PREPARE:
                assert order.adapter is not None
                quick = self.adapters.is_quick(order.adapter)
                self.adapters.get_memory(order.adapter)
                if quick:
                    work.run(lambda: self._prepare_adapter(order))
                else:
                    work.run_in_background(lambda: self._prepare_adapter(order), _PREPARE_S)
            case Signal.UPDATE, Phase.FLIP:
                work.run(lambda: None if skip else self._flip(behind=behind))
            case Signal.CLEAR, Phase.RELEASE:
                work.run(lambda: self._release(order))
            case Signal.CLEAR, Phase.SHUT:
                work.run(lambda: {"groups": self._groups.shutdown()})
            case Signal.RELOAD, Phase.RESTART:
                work.run(lambda: {"groups": self._groups.restart()})
            case Signal.RELOAD, Phase.MAP:
                work.run_in_background(lambda: self._map(order))
            case Signal.VERIFY, _:
                work.run_in_background(lambda: dict(self.weights.verify()) if self.weights and not skip else {})
            case _:
                raise AssertionError(f"no such order: {order}")

    def _prepare(self, order: Order) -> None:
        assert order.live is not None
        if self.weights is None:
            raise RuntimeError("no arena is mapped yet")
        self.weights.prepare(order.live, unpacked(order.regions))

    def _prepare_adapter(self, order: Order) -> None:
        assert order.adapter is not None
        self.adapters.prepare(order.adapter)

    def _flip(self, *, behind: bool) -> None:
        if self.weights is None:
            raise RuntimeError("no arena is mapped yet")
        self.weights.flip(behind=behind)

    def _release(self, order: Order) -> dict[str, object]:
        freed: dict[str, object] = {}
        if "kv_cache" in order.tags:
            freed["kv_cache"] = self._released_by(self.engine.release_kv)
        if "weights" in order.tags:
            if self.weights and "weights" not in self.released:
                self.weights.rollback()  # a version that was only prepared goes too
            freed["weights"] = self._released_by(self.weights.clear_parameters) if self.weights else 0
        self._release_cached()
        return freed

    def _released_by(self, release: Callable[[], int]) -> int:
        """Bytes: of a device's memory what it got back, which is what another process can have now."""
        engine = self.engine
        if not isinstance(engine, OnDevice):
            return release()
        before = engine.free_memory()
        release()
        return max(0, engine.free_memory() - before)

    def _map(self, order: Order) -> None:
        if "weights" in order.tags:
            assert order.live is not None
            weights = self.weights
            if weights is None or order.arena_path != self._arena_path or "weights" in self.released:
                weights = self._map_arena(order.arena_path)
                self._mapping = (order.arena_path, weights)
            weights.prepare(order.live, verify=True)
        if "kv_cache" in order.tags:
            self.engine.allocate_kv()

    def _settle_map(self, order: Order, ok: bool) -> None:
        mapping, self._mapping = self._mapping, None
        if ok:
            if mapping:
                if self.weights:
                    self.weights.clear_parameters()  # of an arena that the store has left
                self._arena_path, self.weights = mapping
            if "weights" in order.tags:
                assert self.weights is not None
                self.weights.flip()
                self.weights.finalize()
            self.released -= frozenset(order.tags)
            return
        if mapping:
            mapping[1].close()
        elif "weights" in order.tags and self.weights:
            self.weights.rollback()
        if "kv_cache" in order.tags and "kv_cache" in self.released:
            self.engine.release_kv()

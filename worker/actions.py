"""What one rank does when an order says so. The same code on every rank; nothing here talks to anyone.

`start` begins an order's work and `settle` ends it once all ranks agreed how it went. What may take long
(building views of a slot, allocating KV, checksums) runs in a thread between the two, so the loop keeps
ticking and generating; what may not fail halfway (the flip itself) is a pointer swap in `start` or `settle`.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from weight_manager.messages import Live, LiveAdapter
from worker.engine.base import Engine, Float32, ForwardBatch, Logits, OnDevice
from worker.messages import Tag
from worker.signals import DONE, FAILED, PENDING, Order, Phase, Signal

log = logging.getLogger(__name__)

_PREPARE_S = 0.005
"""Preparing a version takes a millisecond or two where nothing has to be moved."""


class Weights(Protocol):
    """The rank's side of the weight manager: views of one arena's slots."""

    @property
    def live(self) -> Live | None:
        """What is bound, None when nothing is."""
        ...

    @property
    def former(self) -> Live | None:
        """What was live before, while it can still be computed with."""
        ...

    def bound_to_former(self) -> AbstractContextManager[None]:
        """It is bound meanwhile."""
        ...

    def prepare(self, live: Live, *, verify: bool = False) -> None:
        """Build views of a slot beside what is bound. Raises naming the tensor, or when its digest differs."""
        ...

    def flip(self) -> None:
        """Bind what was prepared; what was bound before stays until finalize or rollback."""
        ...

    def finalize(self) -> None:
        """Let go of what was bound before."""
        ...

    def rollback(self) -> None:
        """Back to what was bound before, and forget what was prepared. Idempotent."""
        ...

    def clear_parameters(self) -> int:
        """Release; returns bytes. Idempotent."""
        ...

    def close(self) -> None:
        """Let an arena go that is not bound, without a word to the engine."""
        ...

    def verify(self) -> dict[str, str]:
        """16 hex digits per parameter."""
        ...

    def fenced(self) -> bool:
        """The store has begun to overwrite what is bound."""
        ...


class AdapterVersions(Protocol):
    """The rank's adapters (worker/adapter_views.py)."""

    def prepare(self, adapter: LiveAdapter) -> None:
        """Hold a version. Raises naming the tensor, or when its digest differs."""
        ...

    def forget(self, epoch: int) -> None:
        """Let a version go. Idempotent."""
        ...

    def fenced(self) -> bool:
        """The store has begun to overwrite one that is held."""
        ...


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
        """Do it in a thread, and wait so long for it: what is done by then is voted on in the next tick."""
        thread = threading.Thread(target=self.run, args=(act,), name="work", daemon=True)
        thread.start()
        thread.join(patience_s)


class Actions:
    """One rank's hands. `work` is the order under way, None between orders."""

    def __init__(
        self,
        engine: Engine,
        map_arena: Callable[[str], Weights],
        groups: Groups,
        release_cached: Callable[[], None],
        adapters: AdapterVersions,
    ) -> None:
        self.engine = engine
        self.adapters = adapters
        self.weights: Weights | None = None
        self.released: frozenset[Tag] = frozenset()
        self.work: Work | None = None
        self._map_arena = map_arena
        self._groups = groups
        self._release_cached = release_cached
        self._arena_path = ""
        self._mapping: tuple[str, Weights] | None = None

    @property
    def fenced(self) -> bool:
        """The store went on without this replica: what it computed with may have been overwritten meanwhile."""
        return self.adapters.fenced() or (self.weights is not None and self.weights.fenced())

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

    def start(self, order: Order) -> None:
        """Begin. FINALIZE, ROLLBACK and orders without work are over when this returns."""
        match order.signal, order.phase:
            case Signal.UPDATE, Phase.FINALIZE:
                if self.weights and "weights" not in self.released:
                    self.weights.finalize()
            case Signal.UPDATE, Phase.ROLLBACK:
                if self.weights and "weights" not in self.released:
                    self.weights.rollback()
            case Signal.ADAPTER, Phase.FORGET:
                self.adapters.forget(order.epoch)
            case Signal.RUN | Signal.PAUSE | Signal.STOP, _:
                pass
            case _:
                assert self.work is None, "one order at a time"
                self.work = Work(order)
                self._begin(self.work, order)

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

    def _begin(self, work: Work, order: Order) -> None:
        skip = "weights" in self.released
        match order.signal, order.phase:
            case Signal.UPDATE, Phase.PREPARE:
                work.run_in_background(lambda: None if skip else self._prepare(order), _PREPARE_S)
            case Signal.ADAPTER, Phase.PREPARE:
                work.run_in_background(lambda: self._prepare_adapter(order), _PREPARE_S)
            case Signal.UPDATE, Phase.FLIP:
                work.run(lambda: None if skip else self._flip(order))
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
        self.weights.prepare(order.live)

    def _prepare_adapter(self, order: Order) -> None:
        assert order.adapter is not None
        self.adapters.prepare(order.adapter)

    def _flip(self, order: Order) -> None:
        if self.weights is None:
            raise RuntimeError("no arena is mapped yet")
        self.weights.flip()

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

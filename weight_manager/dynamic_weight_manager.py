"""The rank's side of a weight change: which version this rank holds, and the two-phase move to the next.

    prepare -> flip -> finalize             a commit: views of the staged slot, pointer swap, forget the old
                  \\-> rollback -> live      back to the old slot, still untouched and still prepared

After a commit the views of the old version are kept: until its slot is given to the next push it can be computed with
(`former`), as can be done with nothing else that is not live.

At start, after a reload or a missed commit the same is done at once, with `verify`. Everything that can fail or takes
time is in `prepare`; `flip` and `rollback` swap pointers.
The engine is anything with `prepare` and `bind` (worker/engine/base.py). One thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt
import xxhash

from rollout_client.errors import ArenaError
from weight_manager.arena import ArenaReader
from weight_manager.errors import WeightManagerError
from weight_manager.layout import Layout, rank_views, region_digests, version_digest
from weight_manager.messages import Live

Views = Mapping[str, npt.NDArray[Any]]


class SupportsBind(Protocol):
    """What is asked of an engine here."""

    def prepare(self, views: Views) -> object:
        """Everything that may fail before a flip; raises ValueError naming the tensor."""
        ...

    def bind(self, prepared: object | None) -> None:
        """Pointer swaps only; None = hold no weights."""
        ...


@runtime_checkable
class SupportsStage(Protocol):
    """An engine with memory of its own, which may have a version already."""

    def stage(self, live: Live, views: Views, regions: Sequence[int]) -> object:
        """As `prepare`; proves that its own memory holds the very version: by its digest where this rank has all of it
        (tp is 1), else by those of its regions among `regions`, of all. Raises ValueError.
        """
        ...

    def read(self, handle: object, name: str) -> npt.NDArray[Any]:
        """A parameter's bytes in its own memory, of a version that was staged. [bytes] uint8."""
        ...


Spans = Sequence[tuple[int, int]]
"""(offset, bytes) in a slot."""


@runtime_checkable
class CopiesAhead(SupportsStage, Protocol):
    """One that can copy a version into its memory while it still arrives."""

    def copy_ahead(self, key: tuple[int, int], memory: memoryview, spans: Spans) -> None:
        """Begin to copy these bytes of a slot, or leave them to `stage`; returns at once, and steps go on.

        key: the slot and its write epoch, as `Live` has them. memory: the slot.
        """
        ...


@runtime_checkable
class LaunchesBeforeFlips(SupportsBind, Protocol):
    """One that computes behind the caller's back, and can be given a step of other weights than those that are bound:
    it comes to it when those before are through.
    """

    def bind_behind(self, prepared: object) -> None:
        """As `bind` for steps that are launched from now on; those before may still be computed. Whoever calls it has
        them over, or calls `bind`, before the weights of before are given up.
        """
        ...

    def launching_with(self, prepared: object) -> AbstractContextManager[None]:
        """What is launched within is computed with these weights."""
        ...


@runtime_checkable
class SaysWhetherItCopies(Protocol):
    """An engine whose prepared weights may be copies of the views, as large as those. copies: they are."""

    copies: bool


class WeightsRefused(WeightManagerError):
    """This rank cannot take the version; the message says why and names the tensor if one is to blame."""


@dataclass(frozen=True)
class _Held:
    """A version this rank can bind. write_epoch: of its slot when its bytes were known to be good."""

    live: Live
    reader: ArenaReader
    write_epoch: int
    views: Views
    handle: object


class DynamicWeightManager:
    """One rank's weights in one arena. After `clear_parameters` it is of no use: a reload maps the arena anew."""

    def __init__(self, arena_path: str | Path, layout: Layout, rank: int, engine: SupportsBind) -> None:
        """Maps the arena read-only. Raises ArenaError or OSError when it cannot."""
        self.layout = layout
        self.rank = rank
        self._engine = engine
        self.flips_behind = isinstance(engine, LaunchesBeforeFlips)
        """Whether a flip may come while steps of the version before are computed. Found out once: it is asked for every
        few ten microseconds then, and Python needs ten for it.
        """
        self._reader = self._open(Path(arena_path))
        self._live: _Held | None = None
        self._staged: _Held | None = None
        self._previous: _Held | None = None
        self._former: _Held | None = None
        self._flipped = False
        self._behind = False  # flipped so, while steps of the version before were computed
        self._views: dict[int, tuple[memoryview, Views]] = {}  # of each slot, as it is mapped

    @property
    def live(self) -> Live | None:
        """What this rank computes with; None = it holds no weights."""
        return self._live.live if self._live else None

    @property
    def former(self) -> Live | None:
        """The version that was live before, while its slot holds it whole. It may be given away at any time: what is
        computed with it counts only if it is still this one afterwards.
        """
        held = self._former
        if held is None or held.reader.expired():
            return None
        if held.reader.write_epoch(held.live.slot) != held.write_epoch:
            self._former = None
            return None
        return held.live

    @contextmanager
    def bound_to_former(self) -> Iterator[None]:
        """Bind `former`, and the live version again afterwards."""
        assert self._former is not None
        assert self._live is not None
        self._engine.bind(self._former.handle)
        try:
            yield
        finally:
            self._engine.bind(self._live.handle)

    def prepare(self, live: Live, regions: Sequence[int] = (), *, verify: bool = False) -> None:
        """Views of a sealed slot, ready to bind; serving goes on. regions: digests of all its regions, where the store
        has sent them. verify: against its digest. Raises WeightsRefused.
        """
        self._staged = self._hold(live, regions, verify=verify)

    def copy_ahead(self, slot: int, write_epoch: int, spans: Spans) -> None:
        """Bytes of a version that still arrives, and is none before `prepare` has proved it: an engine with memory of
        its own may copy them. Not while a version is held that a rollback would go back to, nor from a slot that is not
        mapped here yet, which takes long: `prepare` does that.
        """
        engine, reader = self._engine, self._reader
        idle = self._live is not None and self._staged is None and not self._flipped
        if isinstance(engine, CopiesAhead) and idle and reader.mapped(slot) and reader.write_epoch(slot) == write_epoch:
            engine.copy_ahead((slot, write_epoch), reader.slot(slot), spans)

    def launching_with_next(self) -> AbstractContextManager[None] | None:
        """What the engine is given within is computed with what was prepared, or has been flipped to, as all that comes
        after; None: nothing was, or the engine cannot.
        """
        engine, following = self._engine, self._live if self._flipped else self._staged
        if following is None or not isinstance(engine, LaunchesBeforeFlips):
            return None
        return engine.launching_with(following.handle)

    def flip(self, *, behind: bool = False) -> None:
        """Bind what was prepared; the old version stays at hand. behind: steps of it may still be computed, to which
        this is nothing. Raises WeightsRefused if nothing is prepared.
        """
        staged, engine = self._staged, self._engine
        if staged is None:
            raise WeightsRefused("asked to flip, but nothing is prepared")
        if behind:
            assert isinstance(engine, LaunchesBeforeFlips)
            engine.bind_behind(staged.handle)
        else:
            engine.bind(staged.handle)
        self._previous, self._live, self._staged, self._flipped = self._live, staged, None, True
        self._behind = behind

    def rollback(self) -> None:
        """Back to what was live before `prepare`; idempotent."""
        self._staged = None
        if self._flipped:
            self._engine.bind(self._previous.handle if self._previous else None)
            self._live, self._previous, self._flipped = self._previous, None, False

    def finalize(self) -> None:
        """The flip is for good: the old version is at hand as `former` at most; idempotent."""
        if self._flipped:
            self._former = self._previous if self._keeps_former else None
            if self._behind and self._live is not None:
                self._engine.bind(self._live.handle)  # waits for what reads memory that others may write to from now on
        self._previous, self._flipped = None, False

    def clear_parameters(self) -> int:
        """Hold no weights and no mapping; returns the bytes let go, 0 the second time."""
        released = sum(view.nbytes for view in self._parameters().values())
        self._engine.bind(None)
        self._live = self._staged = self._previous = self._former = None
        self._flipped = False
        self._views.clear()
        self._reader.close()
        return released

    def close(self) -> None:
        """Let go of an arena of which nothing was bound; the engine stays as it is. Idempotent."""
        assert self._live is None
        self._staged = None
        self._views.clear()
        self._reader.close()

    def verify(self) -> dict[str, str]:
        """xxh3-64 (16 hex digits) of the bytes of every parameter this rank holds, by canonical name."""
        held, engine = self._live, self._engine
        found = self._parameters()
        if held is not None and isinstance(engine, SupportsStage):
            return {name: xxhash.xxh3_64_hexdigest(engine.read(held.handle, name).data) for name in found}
        return {name: xxhash.xxh3_64_hexdigest(view.data) for name, view in found.items()}

    def fenced(self) -> bool:
        """True if this rank's step is void: it slept through a commit and its slot was given away, or the fleet of
        stores may have gone on without this one. Between a flip and the last word on it either version may be live, and
        the other's slot may be given to the next push before a step that was under way is over.
        """
        held = self._live
        if held is None:
            return False
        may_be_live = [one for one in (held, self._previous) if one is not None]
        given_away = all(one.reader.write_epoch(one.live.slot) != one.write_epoch for one in may_be_live)
        return given_away or held.reader.expired()

    @property
    def _keeps_former(self) -> bool:
        """It costs no memory: not with copies of weights, nor of a device, whose memory the next push fills."""
        engine = self._engine
        return not (isinstance(engine, SupportsStage) or (isinstance(engine, SaysWhetherItCopies) and engine.copies))

    def _parameters(self) -> dict[str, npt.NDArray[Any]]:
        views = self._live.views if self._live else {}
        return {p.name: views[p.name] for p in self.layout.manifest.parameters if p.name in views}

    def _hold(self, live: Live, regions: Sequence[int], *, verify: bool) -> _Held:
        try:
            reader = self._reader
            epoch = live.write_epoch or reader.write_epoch(live.slot)
            slot = reader.slot(live.slot)
            views = self._views_of(live.slot, slot)
            stages = isinstance(self._engine, SupportsStage)
            if self.layout.tp > 1 if stages else verify:  # a rank that has all of a version in its own proves all of it
                regions = regions or region_digests(self.layout, slot)
                if live.digest != version_digest(self.layout, regions):
                    raise WeightsRefused(f"slot {live.slot} does not hold version {live.version}: its digest differs")
            if isinstance(self._engine, SupportsStage):
                handle = self._engine.stage(live, views, regions)
            else:
                handle = self._engine.prepare(views)
            held = _Held(live, reader, epoch, views, handle)
        except (ArenaError, OSError, ValueError) as error:
            raise WeightsRefused(str(error)) from error
        if reader.write_epoch(live.slot) != epoch:
            raise WeightsRefused(f"slot {live.slot} was given away before version {live.version} could be mapped")
        return held

    def _views_of(self, number: int, slot: memoryview) -> Views:
        """Of a slot; the same ones for as long as it is mapped, as making hundreds takes half a millisecond."""
        memory, views = self._views.get(number, (None, {}))
        if memory is not slot:
            views = rank_views(self.layout, self.rank, slot)
            self._views[number] = slot, views
        return views

    def _open(self, path: Path) -> ArenaReader:
        reader = ArenaReader(path)
        if reader.slot_bytes != self.layout.slot_bytes:
            reader.close()
            raise ArenaError(f"{path}: slots of {reader.slot_bytes} bytes, this layout needs {self.layout.slot_bytes}")
        return reader

"""The rank's side of adapters: versions mapped from shared memory, proved, and handed to the engine by their epoch.

    (take_in ->) prepare -> (rank 0 moves the name) -> ... -> forget

Between the two a version stays as it is, whatever is pushed: several versions of one adapter lie side by side, and
which of them a sequence computes with is rank 0's to say, in each batch. So nothing happens here at a commit.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_client import copying
from rollout_client.digest import PIECE, digest_of
from rollout_client.errors import ArenaError
from weight_manager.adapters.plan import AdapterShape, adapter_layout
from weight_manager.arena import ArenaReader
from weight_manager.dynamic_weight_manager import WeightsRefused
from weight_manager.layout import ITEMSIZE, Extent, Layout, rank_extents, region_digests, slot_array, version_digest
from weight_manager.messages import InPlace, LiveAdapter
from worker.engine.base import Adapters, GetsMemory, TakesPieces, Taking
from worker.versions import Version

log = logging.getLogger(__name__)

QUICK_BYTES = 64 << 20
"""Bytes of a version that are hashed and packed in some ten milliseconds: less than a step of a model with such
adapters.
"""


@dataclass(frozen=True)
class _Held:
    """A version that the engine has. write_epoch: of its slot when its bytes were proved."""

    name: str
    version: Version
    reader: ArenaReader
    slot: int
    write_epoch: int


class _Pieces(NamedTuple):
    """What an engine copies a version by, and the regions of the layout that these are.

    numbers: (offset, bytes) -> region. piece_of: [regions] its piece; -1: it is another rank's.
    """

    numbers: dict[tuple[int, int], int]
    piece_of: npt.NDArray[np.int64]

    @classmethod
    def of(cls, pieces: Sequence[Extent], layout: Layout) -> "_Pieces | None":
        """None if there are none, or some piece is not a region, or hashed in parts for its size."""
        size = ITEMSIZE[layout.manifest.dtype]
        spans = {(p.start * size, prod(p.shape) * size): number for number, p in enumerate(pieces)}
        piece_of = np.array([spans.get(span, -1) for span in layout.ranges], np.int64)
        if not pieces or np.count_nonzero(piece_of >= 0) < len(pieces) or max(nbytes for _, nbytes in spans) > PIECE:
            return None
        return cls({span: number for number, span in enumerate(layout.ranges)}, piece_of)


class _Fit(NamedTuple):
    """What all versions of one shape have in common. plan: the engine's. pieces: None = it holds versions at once."""

    shape: AdapterShape
    layout: Layout
    plan: object
    pieces: _Pieces | None


class _Key(NamedTuple):
    """Where a version lies. write_epoch: of its slot, while it does."""

    reader: ArenaReader
    slot: int
    write_epoch: int


class _Arriving:
    """A version that the engine copies, as far as it has. What is proved are the bytes that were copied.

    there: [regions] was copied from where `key` says.
    """

    def __init__(self, layout: Layout, pieces: _Pieces, taking: Taking) -> None:
        self.taking = taking
        self.key: _Key | None = None
        self.there = np.zeros(len(pieces.piece_of), np.bool_)
        self._layout, self._pieces = layout, pieces
        self._digests = np.zeros(len(pieces.piece_of), np.uint64)

    def begin(self, key: _Key) -> None:
        """What was copied so far is of no use."""
        self.key, self.there[:] = key, False

    def take(self, slot: memoryview, numbers: Sequence[int]) -> None:
        """Copy these regions, unless they are there."""
        wanted, piece_of = np.array(numbers, np.int64), self._pieces.piece_of
        wanted = wanted[~self.there[wanted]]
        mine = wanted[piece_of[wanted] >= 0]
        self._digests[mine] = self.taking.take(slot_array(self._layout, slot), piece_of[mine])
        for number in wanted[piece_of[wanted] < 0].tolist():
            start, size = self._layout.ranges[number]
            self._digests[number] = digest_of(slot[start : start + size])
        self.there[wanted] = True

    def complete(self, key: _Key, slot: memoryview) -> str:
        """Copy what is missing. The version's digest, of the bytes that were copied."""
        if self.key != key:
            self.begin(key)
        if not self.there.all():
            self.take(slot, np.flatnonzero(~self.there).tolist())
        return version_digest(self._layout, self._digests.tolist())


class AdapterViews:
    """All adapter versions of one rank. `prepare` may run in a thread, one at a time; the rest runs in the loop's."""

    def __init__(self, base: Layout, rank: int, table: Adapters | None) -> None:
        """table: None = this engine takes no adapters."""
        self._base = base
        self._rank = rank
        self._table = table
        self._copying = table if isinstance(table, TakesPieces) and table.by_pieces else None
        self._getting = table if isinstance(table, GetsMemory) and table.gets else None
        self._held: dict[int, _Held] = {}
        self._fits: dict[str, _Fit] = {}  # the last of each name
        self._arriving: dict[str, _Arriving] = {}  # what comes next of each name, as far as it is there
        if table is not None:
            copying.prepare()

    def is_quick(self, adapter: LiveAdapter) -> bool:
        """Whether one like it is held, and it is read in a few milliseconds, into memory that is there."""
        known = self._fits.get(adapter.name)
        return known is not None and known.shape == adapter.shape and self._fits_a_step(adapter.name, known)

    def get_memory(self, adapter: LiveAdapter) -> None:
        """Before `prepare`, in the loop's thread: what the engine may get between steps alone. What is wrong with the
        version, or that there is no memory, is for `prepare` to say.
        """
        if self._getting is not None and adapter.live.epoch not in self._held:
            with contextlib.suppress(ArenaError, OSError, ValueError):
                fit = self._fit(adapter)
                self._getting.get(fit.plan, fit.layout.slot_bytes)

    def prepare(self, adapter: LiveAdapter) -> None:
        """Map, prove and hand over one version, unless it is there. Raises WeightsRefused naming what is wrong, also
        where its epoch still names another; the loop is to `forget` the version then, as the engine may have it.
        """
        live, reader = adapter.live, None
        held = self._held.get(live.epoch)
        if held is not None:
            if (held.name, held.version) != (adapter.name, Version.of(live)):
                raise WeightsRefused(f"epoch {live.epoch} is that of version {held.version.version} of {held.name}")
            return
        if self._table is None:
            raise WeightsRefused("this engine takes no adapters")
        try:
            fit = self._fit(adapter)
            layout = fit.layout
            reader = self._reader(adapter.arena_path)
            if reader.slot_bytes != layout.slot_bytes:
                raise ArenaError(f"{reader.path}: slots of {reader.slot_bytes} bytes, {layout.slot_bytes} are needed")
            epoch = live.write_epoch or reader.write_epoch(live.slot)
            slot = reader.slot(live.slot)
            self._hold(adapter, fit, slot, _Key(reader, live.slot, epoch))
            if reader.write_epoch(live.slot) != epoch:
                raise ArenaError(f"slot {live.slot} was given away before it could be mapped")
            self._held[live.epoch] = _Held(adapter.name, Version.of(live), reader, live.slot, epoch)
        except (ArenaError, OSError, ValueError) as error:
            raise WeightsRefused(f"adapter {adapter.name}: {error}") from error
        finally:
            self._tidy(adapter.name, reader)  # nothing of a version that is not held

    def forget(self, epoch: int) -> None:
        """Let a version go, also one that `prepare` refused; between steps. Idempotent."""
        held = self._held.pop(epoch, None)
        if self._table is not None:
            self._table.forget(epoch)
        if held is not None:
            self._tidy(held.name, held.reader)

    def overwritten(self) -> set[int]:
        """Epochs that are held and whose slots the store has begun to overwrite: it went on without this replica."""
        held = list(self._held.items())  # a thread that prepares may add one meanwhile
        return {epoch for epoch, one in held if one.reader.write_epoch(one.slot) != one.write_epoch}

    @property
    def takes_in(self) -> bool:
        """Whether versions are copied here, and may be while they arrive."""
        return self._copying is not None

    def take_in(self, message: InPlace) -> None:
        """Bytes of an adapter's next version are there, as its trainer says: copy them, if that is done in a few
        milliseconds. Nothing depends on it: what is missing in the end, or differs, is copied in `prepare`.
        """
        adapter, slot, write_epoch, spans = message.adapter, message.slot, message.write_epoch, message.spans
        fit, reader = self._fits.get(adapter), self._known_reader(message.arena_path)
        if fit is None or fit.pieces is None or reader is None or not self._fits_a_step(adapter, fit):
            return
        arriving, key = self._arriving.get(adapter), _Key(reader, slot, write_epoch)
        try:
            if reader.write_epoch(slot) != write_epoch or reader.slot_bytes != fit.layout.slot_bytes:
                return
            if arriving is None:
                arriving = self._arriving[adapter] = self._begin(fit, fit.pieces)
            if arriving.key != key:
                arriving.begin(key)
            arriving.take(reader.slot(slot), [n for span in spans if (n := fit.pieces.numbers.get(span)) is not None])
        except (ArenaError, OSError) as error:
            log.warning("adapter %s is not taken in while it arrives: %s", adapter, error)

    def _hold(self, adapter: LiveAdapter, fit: _Fit, slot: memoryview, key: _Key) -> None:
        """Prove that a slot holds the version, and have the engine hold it. Raises WeightsRefused."""
        assert self._table is not None
        live, layout = adapter.live, fit.layout
        if fit.pieces is None:
            if live.digest != version_digest(layout, region_digests(layout, slot)):
                raise _other(adapter)
            self._table.hold(live.epoch, fit.plan, slot_array(layout, slot))
            return
        assert self._copying is not None
        arriving = self._arriving.pop(adapter.name, None) or self._begin(fit, fit.pieces)
        early = arriving.key == key and bool(arriving.there.any())
        same = live.digest == arriving.complete(key, slot)
        if early and not same:
            arriving.begin(key)
            same = live.digest == arriving.complete(key, slot)
        if not same:
            raise _other(adapter)
        self._copying.keep(live.epoch, arriving.taking)

    def _tidy(self, name: str, reader: ArenaReader | None) -> None:
        """Keep nothing that no version needs any more: of this name, and this mapping."""
        if reader is not None and not any(other.reader is reader for other in self._held.values()):
            reader.close()
        if not any(other.name == name for other in self._held.values()):
            self._fits.pop(name, None)
            self._arriving.pop(name, None)

    def _fits_a_step(self, name: str, fit: _Fit) -> bool:
        """Whether a version that lies so is taken in within a few milliseconds."""
        if fit.layout.slot_bytes > QUICK_BYTES:
            return False
        return self._copying is None or name in self._arriving or self._copying.has_room(fit.plan)

    def _begin(self, fit: _Fit, pieces: _Pieces) -> _Arriving:
        assert self._copying is not None
        return _Arriving(fit.layout, pieces, self._copying.begin(fit.plan))

    def _known_reader(self, path: str) -> ArenaReader | None:
        return next((h.reader for h in self._held.values() if str(h.reader.path) == path), None)

    def _reader(self, path: str) -> ArenaReader:
        return self._known_reader(path) or ArenaReader(path)

    def _fit(self, adapter: LiveAdapter) -> _Fit:
        known = self._fits.get(adapter.name)
        if known is None or known.shape != adapter.shape:
            assert self._table is not None
            layout, shape = adapter_layout(adapter.shape, self._base), adapter.shape
            extents = rank_extents(layout, self._rank)
            plan = self._table.plan(adapter.name, extents, shape.modules, shape.dtype)
            pieces = None if self._copying is None else _Pieces.of(self._copying.pieces(plan), layout)
            known = _Fit(shape, layout, plan, pieces)
            self._fits[adapter.name] = known
            self._arriving.pop(adapter.name, None)
        return known


def _other(adapter: LiveAdapter) -> WeightsRefused:
    live = adapter.live
    return WeightsRefused(f"slot {live.slot} does not hold version {live.version} of {adapter.name}")

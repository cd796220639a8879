"""The rank's side of adapters: versions mapped from shared memory, proved, and handed to the engine by their epoch.

    prepare -> (rank 0 moves the name) -> ... -> forget

Between the two a version stays as it is, whatever is pushed: several versions of one adapter lie side by side, and
which of them a sequence computes with is rank 0's to say, in each batch. So nothing happens here at a commit.
"""

from dataclasses import dataclass
from typing import NamedTuple

from rollout_client import copying
from rollout_client.errors import ArenaError
from weight_manager.adapters.plan import AdapterShape, adapter_layout
from weight_manager.arena import ArenaReader
from weight_manager.dynamic_weight_manager import WeightsRefused
from weight_manager.layout import Layout, rank_extents, region_digests, slot_array, version_digest
from weight_manager.messages import LiveAdapter
from worker.engine.base import Adapters

QUICK_BYTES = 64 << 20
"""Bytes of a version that are hashed and packed in some ten milliseconds: less than a step of a model with such
adapters.
"""


@dataclass(frozen=True)
class _Held:
    """A version that the engine has. write_epoch: of its slot when its bytes were proved."""

    name: str
    reader: ArenaReader
    slot: int
    write_epoch: int


class _Fit(NamedTuple):
    """What all versions of one shape have in common. plan: the engine's."""

    shape: AdapterShape
    layout: Layout
    plan: object


class AdapterViews:
    """All adapter versions of one rank. `prepare` may run in a thread, one at a time; the rest runs in the loop's."""

    def __init__(self, base: Layout, rank: int, table: Adapters | None) -> None:
        """table: None = this engine takes no adapters."""
        self._base = base
        self._rank = rank
        self._table = table
        self._held: dict[int, _Held] = {}
        self._fits: dict[str, _Fit] = {}  # the last of each name
        if table is not None:
            copying.prepare()

    def is_quick(self, adapter: LiveAdapter) -> bool:
        """Whether one like it is held, and it is read in a few milliseconds."""
        known = self._fits.get(adapter.name)
        return known is not None and known.shape == adapter.shape and known.layout.slot_bytes <= QUICK_BYTES

    def prepare(self, adapter: LiveAdapter) -> None:
        """Map, prove and hand over one version, unless it is there. Raises WeightsRefused naming what is wrong."""
        live = adapter.live
        if live.epoch in self._held:
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
            if live.digest != version_digest(layout, region_digests(layout, slot)):
                raise WeightsRefused(f"slot {live.slot} does not hold version {live.version} of {adapter.name}")
            self._table.hold(live.epoch, fit.plan, slot_array(layout, slot))
        except (ArenaError, OSError, ValueError) as error:
            raise WeightsRefused(f"adapter {adapter.name}: {error}") from error
        held = _Held(adapter.name, reader, live.slot, epoch)
        self._held[live.epoch] = held
        if reader.write_epoch(live.slot) != epoch:
            self.forget(live.epoch)
            raise WeightsRefused(f"slot {live.slot} was given away before {adapter.name} could be mapped")

    def forget(self, epoch: int) -> None:
        """Let a version go. Idempotent."""
        held = self._held.pop(epoch, None)
        if held is None or self._table is None:
            return
        self._table.forget(epoch)
        if not any(other.reader is held.reader for other in self._held.values()):
            held.reader.close()
        if not any(other.name == held.name for other in self._held.values()):
            self._fits.pop(held.name, None)

    def overwritten(self) -> set[int]:
        """Epochs that are held and whose slots the store has begun to overwrite: it went on without this replica."""
        return {e for e, held in self._held.items() if held.reader.write_epoch(held.slot) != held.write_epoch}

    def _reader(self, path: str) -> ArenaReader:
        return next((h.reader for h in self._held.values() if str(h.reader.path) == path), None) or ArenaReader(path)

    def _fit(self, adapter: LiveAdapter) -> "_Fit":
        known = self._fits.get(adapter.name)
        if known is None or known.shape != adapter.shape:
            assert self._table is not None
            layout, shape = adapter_layout(adapter.shape, self._base), adapter.shape
            extents = rank_extents(layout, self._rank)
            known = _Fit(shape, layout, self._table.plan(adapter.name, extents, shape.modules, shape.dtype))
            self._fits[adapter.name] = known
        return known

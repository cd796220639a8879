"""Two weight slots in device memory: one is computed with while the other is filled.

A slot holds what this rank reads, at the distances it has in the store's arena, so that a version arrives in few large
copies and stays in HF layout. It is copied while it arrives (`Ahead`), as far as it is in the arena, and the rest once
it is whole. Both slots keep their addresses for as long as the process lives (memory.py).
"""

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_manager.intervals import Intervals
from weight_manager.layout import ITEMSIZE, PAGE, Layout, rank_views
from worker.gpu.driver import DeviceMemoryError, Driver
from worker.gpu.memory import Region
from worker.gpu.pinned import Pinned

Array = npt.NDArray[Any]
_GAP = 64
"""Views further apart than the padding between regions are copied one by one: another rank's lie between them."""
_ALIGN = 256


@dataclass(frozen=True)
class Tensor:
    """A weight on the device: where, and its shape. In the served dtype."""

    address: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Bytes that are copied at once: from `source` of a slot of the arena to `target` of a slot here."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """Where a rank's tensors lie.

    places: byte offset in a device slot and shape, by name (fused groups too). pieces: (offset in a slot of the arena,
    bytes) of what the rank reads, each byte once, rising; between them is padding, or what others read. first: a tensor
    that lies at the first run's begin.
    """

    places: dict[str, tuple[int, tuple[int, ...]]]
    runs: tuple[Run, ...]
    pieces: tuple[tuple[int, int], ...]
    nbytes: int
    first: str

    def tensors(self, base: int) -> dict[str, Tensor]:
        """All of them in the slot that begins at an address."""
        return {name: Tensor(base + offset, shape) for name, (offset, shape) in self.places.items()}


def placement(layout: Layout, rank: int) -> Placement:
    """What `rank` reads of the arena's layout, without what other ranks read."""
    slot = np.empty(layout.slot_bytes, np.uint8)  # never touched, so never in memory
    base = slot.ctypes.data
    size = ITEMSIZE[layout.manifest.dtype]
    spans = {
        name: (view.ctypes.data - base, view.size * size, view.shape)
        for name, view in rank_views(layout, rank, slot).items()
    }
    runs: list[Run] = []
    pieces: list[tuple[int, int]] = []
    for start, nbytes, _ in sorted(spans.values(), key=lambda span: (span[0], -span[1])):
        end = start + nbytes
        if not pieces or start >= sum(pieces[-1]):  # else it is of a group, which is there whole
            pieces.append((start, nbytes))
        last = runs[-1] if runs else None
        if last is not None and start <= last.source + last.nbytes + _GAP:
            runs[-1] = Run(last.source, last.target, max(last.nbytes, end - last.source))
        else:
            runs.append(Run(start, -(-(last.target + last.nbytes) // _ALIGN) * _ALIGN if last else 0, nbytes))
    places = {}
    for name, (start, _, shape) in spans.items():
        run = next(run for run in reversed(runs) if run.source <= start)
        places[name] = (run.target + start - run.source, shape)
    first = min(spans, key=lambda name: spans[name][0])
    return Placement(places, tuple(runs), tuple(pieces), runs[-1].target + runs[-1].nbytes, first)


def joined_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, bytes), rising, with neighbours as one: a copy costs the host as much as a few hundred KB cost the bus.
    Padding between them is copied too.
    """
    found: list[tuple[int, int]] = []
    for start, nbytes in sorted(spans):
        joins = bool(found) and start <= sum(found[-1]) + _GAP
        begin = found.pop()[0] if joins else start
        found.append((begin, start + nbytes - begin))
    return found


def parts_of(runs: Sequence[Run], start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Of these bytes of the arena's slot, what runs have: (offset in a device slot, bytes of them before it, bytes)."""
    at = max(bisect_right(runs, start, key=lambda run: run.source) - 1, 0)
    while at < len(runs) and runs[at].source < start + nbytes:
        run, at = runs[at], at + 1
        low, high = max(start, run.source), min(start + nbytes, run.source + run.nbytes)
        if low < high:
            yield run.target + low - run.source, low - start, high - low


class Ahead:
    """What of a version was copied before it was whole: into which slot, and which bytes of the arena's slot.

    key: the slot of the arena and its write epoch.
    """

    def __init__(self, key: tuple[int, int], slot: int) -> None:
        self.key, self.slot = key, slot
        self._there = Intervals()

    def take(self, start: int, nbytes: int) -> list[tuple[int, int]]:
        """(offset, bytes) of what was not on its way of these; it is now."""
        gaps = self._there.gaps(start, start + nbytes)
        for low, high in gaps:
            self._there.add(low, high)
        return [(low, high - low) for low, high in gaps]

    def missing(self, pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """(offset, bytes) of what is not there of these, neighbours as one."""
        gaps = (gap for start, nbytes in pieces for gap in self._there.gaps(start, start + nbytes))
        return joined_spans((low, high - low) for low, high in gaps)


class Staged:
    """A version in a slot: what `prepare` gives and `bind` takes. Its slot is not given away while somebody has it."""

    def __init__(self, slot: int) -> None:
        self.slot = slot


class DeviceSlots:
    """The two slots. `stage` fills the one that is not bound; calls come from one thread at a time."""

    def __init__(self, driver: Driver, where: Placement) -> None:
        self._driver, self._where = driver, where
        self.stream = driver.stream()
        self.regions = [Region(driver, where.nbytes, "weights (one of two slots)", shared=True) for _ in range(2)]
        self.bound: int | None = None
        self._held: list[weakref.ref[Staged] | None] = [None, None]
        self.pinned = Pinned(driver)

    def tensors(self, slot: int) -> dict[str, Tensor]:
        """The tensors of this slot, by name."""
        return self._where.tensors(self.regions[slot].address)

    def stage(self, views: Mapping[str, Array], ahead: Ahead | None = None) -> Staged:
        """Copy a version into the slot that is not bound, and wait until it is there.

        views: of one slot of the arena, as `rank_views` makes them. ahead: what has been copied of it into this slot.
        Steps go on meanwhile.
        """
        self._driver.enter()
        slot = 0 if self.bound is None else 1 - self.bound
        staged = Staged(slot)
        self._claim()
        base = views[self._where.first].ctypes.data - self._where.runs[0].source
        whole = [(run.source, run.nbytes) for run in self._where.runs]
        if ahead is not None:  # as a rule all is there, which one look at the few runs tells
            whole = ahead.missing(whole) and ahead.missing(self._where.pieces)
        self._copy(slot, base, whole)
        self._driver.wait(self.stream)
        self._held[slot] = weakref.ref(staged)
        return staged

    def ready(self, slot: int, base: int) -> bool:
        """Whether copies into this slot, from the arena's slot at an address, can begin at once."""
        return self.regions[slot].filled and self.pinned.holds(base)

    def copy_ahead(self, ahead: Ahead, base: int, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Begin to copy a part of a version into the spare slot, on `stream`; what was not on its way of it. base:
        address of the arena's slot. spans: of that.
        """
        self._driver.enter()
        self.regions[ahead.slot].fill()
        fresh = joined_spans(gap for span in spans for gap in ahead.take(*span))
        self._copy(ahead.slot, base, fresh)
        return fresh

    def settle(self) -> None:
        """Wait until nothing copies here any more."""
        self._driver.enter()
        self._driver.wait(self.stream)

    def _copy(self, slot: int, base: int, spans: Sequence[tuple[int, int]]) -> None:
        """Queue copies of what this rank reads of these bytes of the arena's slot that begins at `base`."""
        runs, address = self._where.runs, self.regions[slot].address
        self.pinned.pin(base, -(-(runs[-1].source + runs[-1].nbytes) // PAGE) * PAGE)
        for start, nbytes in spans:
            for target, skipped, size in parts_of(runs, start, nbytes):
                self._driver.from_address(address + target, base + start + skipped, size, self.stream)

    def _claim(self) -> None:
        """Memory for both slots or for none that has none: a version is served only where the next one has room."""
        fresh = [region for region in self.regions if not region.filled]
        try:
            for region in fresh:
                region.fill()
        except DeviceMemoryError:
            for region in fresh:
                region.empty()
            raise

    def read(self, staged: Staged, name: str, itemsize: int) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, fetched."""
        self._driver.enter()
        tensor = self.tensors(staged.slot)[name]
        found = np.empty(int(np.prod(tensor.shape)) * itemsize, np.uint8)
        self._driver.to_host(found, tensor.address, self.stream)
        self._driver.wait(self.stream)
        return found

    def enter(self) -> None:
        """Make this thread one that may change what is behind the slots."""
        self._driver.enter()

    @property
    def runs(self) -> tuple[Run, ...]:
        """How the arena's slot lies in one of these."""
        return self._where.runs

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(offset, bytes) of all that is read of the arena's slot."""
        return [(run.source, run.nbytes) for run in self._where.runs]

    @property
    def idle(self) -> bool:
        """All that `stream` was given is through."""
        return self._driver.happened(self.stream, event=False)

    @property
    def spare(self) -> int | None:
        """The slot that nothing is computed with and nobody holds; None while no slot is bound."""
        bound = self.bound  # another thread may bind
        if bound is None:
            return None
        slot = 1 - bound
        held = self._held[slot]
        return slot if held is None or held() is None else None

    def hold(self, slot: int) -> Staged:
        """Stage the spare slot as `stage` does, where somebody else has filled it."""
        staged = Staged(slot)
        self._held[slot] = weakref.ref(staged)
        return staged

    def bind(self, staged: Staged | None) -> None:
        """Compute with this version from the next step on; None: with none, and give back what nobody has staged.

        Steps that use what was bound before are through; or whoever has it staged keeps it until they are.
        """
        if staged is not None:
            self.bound = staged.slot
            return
        was, self.bound = self.bound, None
        self.pinned.let_go()  # the arena may be unmapped next
        for slot, (region, held) in enumerate(zip(self.regions, self._held, strict=True)):
            if slot == was or held is None or held() is None:
                region.empty()

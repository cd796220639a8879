"""What is served, and where it lies in a slot: parameters -> manifest -> layout -> views. Pure data, pure functions.

A `Parameter` is one HF tensor (or alias group), a `Manifest` all of them. A `Layout` places every rank's piece of every
parameter in one slot, so that each rank's views are contiguous. A block is what one rank reads in one go: a parameter's
piece, or the pieces of a fused group (qkv, gate_up) one after the other, so that one matmul reads them. Blocks lie in
manifest order and rank order, each on a cache line of its own; of a tensor split on axis 1 every rank's piece is stored
by itself. The layout depends on (manifest, tp) only; store and ranks compute it alone and compare digests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from rollout_client import copying
from rollout_client.digest import digest_of, joined, piece_spans
from rollout_client.protocol import Dtype

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGN = 64
"""Bytes to a multiple of which every group starts: a cache line, whatever came before it."""
PAGE = 4096
FORMAT = 2
"""The format of slots and their digests: what a release with another one left behind is not taken for the same."""
EVERY_RANK = -1
VIEW_DTYPE: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2")}
"""numpy dtype of a view; bfloat16 is shown as its bits."""

Array = npt.NDArray[Any]
Slot = bytearray | memoryview | Array


@dataclass(frozen=True)
class Parameter:
    """One served tensor.

    name: canonical HF name. shape: of the whole tensor, HF layout (Linear = [out, in]).
    split: tensor-parallel axis, None = every rank reads the whole tensor. Pieces are as equal as they can be.
    heads: when set, axis `split` counts this many units (KV heads); a unit is never cut while tp <= heads, and
        once tp exceeds them (then a multiple of them) the ranks that share a unit each hold a copy of it.
    group: query heads per unit. Set on what belongs to the query heads: once tp exceeds `heads`, the ranks
        that share a unit divide its query heads instead of copying them.
    even: every rank reads the whole tensor when tp does not divide the axis (vocabularies: equal logits pieces).
    aliases: other names of the same bytes (tied lm_head); a push may use any one of them.
    fused: name of the fused group it belongs to; members are placed in the order they are listed.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    heads: int | None = None
    group: int = 0
    even: bool = False
    aliases: tuple[str, ...] = ()
    fused: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The parameters a model serves, in layout order. dtype: the served dtype of all of them.

    stacked: projections that its torch modules hold as one tensor, a fused group's members in order (stacks.py).
    """

    model: str  # architecture, e.g. "LlamaForCausalLM"
    dtype: Dtype
    parameters: tuple[Parameter, ...]
    stacked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Region:
    """Bytes of one parameter in a slot. rank -1: read by every rank.

    offset: bytes from the start of the slot. start/shape: the box of the whole tensor it holds, stored in C order.
    """

    name: str
    rank: int
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where everything lies. slot_bytes is a multiple of the page size; digest names the whole layout."""

    manifest: Manifest
    tp: int
    regions: tuple[Region, ...]
    slot_bytes: int
    digest: str

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """(offset, bytes) of every region."""
        size = ITEMSIZE[self.manifest.dtype]
        return [(region.offset, prod(region.shape) * size) for region in self.regions]

    @cached_property
    def extents(self) -> "dict[int, dict[str, Extent]]":
        """What `rank_extents` has found, by rank."""
        return {}

    @cached_property
    def stretches(self) -> "Stretches":
        """The stretches of a slot that are hashed, one after the other."""
        cut = [piece_spans(*one) for one in self.ranges]
        starts, sizes = np.array([one for pieces in cut for one in pieces], np.int64).T.copy()
        return Stretches(starts, sizes, np.cumsum([0, *map(len, cut)], dtype=np.int64))


class Stretches(NamedTuple):
    """The pieces of all regions (digest.py), as arrays: a slot of hundreds of regions is then hashed in one call.

    starts, sizes: [pieces] bytes. first: [regions + 1] the first piece of each region, and how many there are.
    """

    starts: Array
    sizes: Array
    first: Array


class Extent(NamedTuple):
    """A tensor in a flat array: from element `start` on, in C order."""

    start: int
    shape: tuple[int, ...]

    def of(self, flat: Array) -> Array:
        """The tensor as a view of `flat`."""
        return flat[self.start : self.start + prod(self.shape)].reshape(self.shape)


def make_layout(manifest: Manifest, tp: int) -> Layout:
    """Place every piece. Raises ValueError naming the parameter that cannot be split over `tp` ranks."""
    if tp < 1:
        raise ValueError(f"tp must be at least 1, got {tp}")
    _check_names(manifest)
    regions: list[Region] = []
    end = 0
    for members in _groups(manifest):
        ranks = {tuple(_ranks(p, tp)) for p in members}
        if len(ranks) != 1:
            raise ValueError(f"{members[0].fused}: some members are split over ranks and some are not")
        for rank in ranks.pop():
            end = -(-end // ALIGN) * ALIGN
            for p in members:
                start, shape = piece(p, tp, rank)
                regions.append(Region(p.name, rank, end, start, shape))
                end += prod(shape) * ITEMSIZE[manifest.dtype]
    slot_bytes = max(-(-end // PAGE), 1) * PAGE
    name = xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode((FORMAT, manifest, tp, regions, slot_bytes)))
    return Layout(manifest, tp, tuple(regions), slot_bytes, name)


def piece(p: Parameter, tp: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, shape) of the box of `p` that `rank` of `tp` reads. Raises ValueError when it cannot be split."""
    start, shape = [0] * len(p.shape), list(p.shape)
    if rank != EVERY_RANK and p.split is not None:
        low, high = _bounds(p, p.shape[p.split], tp, rank)
        if low == high:
            raise ValueError(f"{p.name}: axis {p.split} of {p.shape} is too short for {tp} ranks")
        start[p.split], shape[p.split] = low, high - low
    return tuple(start), tuple(shape)


def _bounds(p: Parameter, size: int, tp: int, rank: int) -> tuple[int, int]:
    if p.heads is None:
        return size * rank // tp, size * (rank + 1) // tp
    if size % p.heads:
        raise ValueError(f"{p.name}: axis {p.split} of {p.shape} does not hold {p.heads} equal heads")
    unit = size // p.heads
    if tp <= p.heads:
        return p.heads * rank // tp * unit, p.heads * (rank + 1) // tp * unit
    if tp % p.heads:
        raise ValueError(f"{p.name}: tp {tp} is above the {p.heads} KV heads and not a multiple of them")
    sharers = tp // p.heads
    head, turn = divmod(rank, sharers)
    if not p.group:
        return head * unit, (head + 1) * unit
    if unit % p.group:
        raise ValueError(f"{p.name}: axis {p.split} of {p.shape} does not hold {p.heads * p.group} equal query heads")
    width = unit // p.group
    return head * unit + p.group * turn // sharers * width, head * unit + p.group * (turn + 1) // sharers * width


def _ranks(p: Parameter, tp: int) -> Sequence[int]:
    if p.split is None or (p.even and p.shape[p.split] % tp):
        return (EVERY_RANK,)
    return range(tp)


def _groups(manifest: Manifest) -> list[list[Parameter]]:
    groups: dict[str, list[Parameter]] = {}
    for p in manifest.parameters:
        groups.setdefault(p.fused or p.name, []).append(p)
    for name, members in groups.items():
        if len({p.shape[1:] for p in members}) != 1:
            raise ValueError(f"{name}: members differ beyond axis 0, they cannot be one matrix")
    return list(groups.values())


def _check_names(manifest: Manifest) -> None:
    seen: set[str] = set()
    fused = {p.fused for p in manifest.parameters if p.fused}
    for p in manifest.parameters:
        if not p.shape or min(p.shape) < 1:
            raise ValueError(f"{p.name} has no elements to serve, its shape is {p.shape}")
        for name in (p.name, *p.aliases):
            if name in seen or name in fused:
                raise ValueError(f"{name} is in the manifest twice")
            seen.add(name)


def slot_array(layout: Layout, slot: Slot) -> Array:
    """The whole slot as one flat array of the served dtype (bits for bfloat16), as writable as `slot` is."""
    return np.frombuffer(slot, dtype=VIEW_DTYPE[layout.manifest.dtype], count=layout.slot_bytes // _itemsize(layout))


def region_views(layout: Layout, slot: Slot) -> list[Array]:
    """One flat view per region, in layout order."""
    flat, size = slot_array(layout, slot), _itemsize(layout)
    return [flat[r.offset // size : r.offset // size + prod(r.shape)] for r in layout.regions]


def rank_views(layout: Layout, rank: int, slot: Slot) -> dict[str, Array]:
    """Read-only contiguous views of what `rank` reads: every parameter, and every fused group as one array.

    slot: buffer of `slot_bytes`. Keys are canonical names (no aliases) and group names; shapes are the
    rank's own. float32, or uint16 bits of bfloat16.
    """
    flat = slot_array(layout, slot)
    flat.flags.writeable = False
    return {name: extent.of(flat) for name, extent in rank_extents(layout, rank).items()}


def rank_extents(layout: Layout, rank: int) -> dict[str, Extent]:
    """Where in `slot_array` everything lies that `rank_views` shows. Found once; not to be changed."""
    if rank not in layout.extents:
        layout.extents[rank] = _find_extents(layout, rank)
    return layout.extents[rank]


def _find_extents(layout: Layout, rank: int) -> dict[str, Extent]:
    size = _itemsize(layout)
    parameters = {p.name: p for p in layout.manifest.parameters}
    extents: dict[str, Extent] = {}
    for r in layout.regions:
        if r.rank not in (rank, EVERY_RANK):
            continue
        extents[r.name] = Extent(r.offset // size, r.shape)
        group = parameters[r.name].fused
        if group is not None:
            start, (rows, *_) = extents.get(group, Extent(r.offset // size, (0,)))
            extents[group] = Extent(start, (rows + r.shape[0], *r.shape[1:]))
    return extents


def region_digests(layout: Layout, slot: Slot) -> list[int]:
    """Digest of every region's bytes, in layout order."""
    fast = copying.ready()
    if fast is None:
        return [digest_of(view.data) for view in region_views(layout, slot)]
    starts, sizes, first = layout.stretches
    found: list[int] = fast.digests(np.frombuffer(slot, np.uint8), starts, sizes).tolist()
    if len(found) == len(layout.regions):
        return found
    return [joined(found[start:stop]) for start, stop in pairwise(first.tolist())]


def version_digest(layout: Layout, digests: Sequence[int]) -> str:
    """Name of a whole version: 16 hex digits over the regions' digests. Does not depend on how it was sent."""
    return xxhash.xxh3_64_hexdigest(layout.digest.encode() + packed(digests))


def packed(digests: Sequence[int]) -> bytes:
    """Regions' digests as they are sent and hashed: 8 bytes each, little end first."""
    return np.array(digests, dtype="<u8").tobytes()


def unpacked(digests: bytes) -> list[int]:
    """As `packed` was given them."""
    found: list[int] = np.frombuffer(digests, "<u8").tolist()
    return found


def _itemsize(layout: Layout) -> int:
    return ITEMSIZE[layout.manifest.dtype]

"""An adapter as low_rank.c reads it: of each product A by inputs and B in chunks of outputs, in one piece of memory.

It lies in huge pages: an adapter of all linears is read once a step, some hundred KiB for each product.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_client.aligned_map import HUGE
from rollout_client.native.xxh3 import wheel_functions
from weight_manager.layout import Extent, Manifest
from worker.cpu.native import Native
from worker.models.filled_memory import mapped
from worker.models.shard import Shard

Array = npt.NDArray[Any]

PARTS = 3
"""Linears that one product may hold (q, k and v): PARTS of low_rank.h."""
LANES, CHUNK = 16, 48
"""Numbers worked on together; outputs of B that lie side by side, as in low_rank.h."""
_LINE = 64
"""Bytes in a cache line, or more elements than in one."""
_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p

FACTORS = np.dtype(
    [
        ("a", np.uint64),
        ("scales", np.uint64),
        ("b", np.uint64, PARTS),
        ("rank", np.int64, PARTS),
        ("ranks", np.int64),
        ("narrow", np.int64),
    ]
)
"""`Factors` of low_rank.h; a part without rank adds nothing."""


class _Pack(ctypes.Structure):
    """`Pack` of pack.c."""

    _fields_ = [
        *((name, _Pointer) for name in ("source", "target", "turns", "pieces", "numbers", "digests", "apart", "hash")),
        *((name, _Int) for name in ("count", "source_narrow", "target_narrow")),
    ]


@dataclass(frozen=True)
class Site:
    """One product of the forward pass, and the linears (HF module names) whose rows lie one after the other in it.

    inputs: of this rank. rows: of each linear, of this rank.
    """

    name: str
    modules: tuple[str, ...]
    inputs: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to a linear, this rank's part, as it lies in the array of a version: a [rank, inputs],
    b [rows, rank].
    """

    a: Extent
    b: Extent
    scale: float


class Packed(NamedTuple):
    """One version. factors: [sites] of FACTORS. memory: what they point into. plan: whose."""

    factors: Array
    memory: Array
    plan: "Packing"


class Packing:
    """How versions are copied that lie alike.

    pieces: what is read of a version, and copied one by one. rows: [pieces, 4], `Matrix` of pack.c, in elements.
    factors: [sites], places as elements from the start of the copy. turns: [matrices, 7], `Turn`s of pack.c.
    size: elements of the copy. spare: that of a version that was let go; new memory would be cleared page by page.
    apart: room for the largest piece.
    """

    def __init__(self, native: Native, sites: Sequence[Site], changes: Mapping[str, Factors], *, pairs: bool) -> None:
        """pairs: activations are read as bfloat16, and A lies in pairs of inputs, which are multiplied together."""
        assert native.number("factors_bytes") == FACTORS.itemsize
        assert native.number("pack_bytes") == ctypes.sizeof(_Pack)
        assert native.number("turn_bytes") == 7 * ctypes.sizeof(_Int)
        assert native.number("matrix_bytes") == 4 * ctypes.sizeof(_Int)
        self._native, self._pairs, side = native, pairs, 1 + pairs  # inputs side by side
        ranks = [[changes[m].a.shape[0] if m in changes else 0 for m in site.modules] for site in sites]
        most = _whole(max(map(sum, ranks), default=0), LANES)
        self._factors, self._scales = np.zeros(len(sites), FACTORS), np.zeros((len(sites), most), np.float32)
        self._spare: list[Array] = []
        self.pieces: list[Extent] = []
        self._size, turns, cuts = 0, [], [0]
        for index, (site, of_parts) in enumerate(zip(sites, ranks, strict=True)):
            together, before = sum(of_parts), 0
            if not together:
                continue
            a, b = self._room(_whole(site.inputs, side) * together + LANES * side), [0] * PARTS
            for part, module in enumerate(site.modules):
                if module not in changes:
                    continue
                change, rank, rows = changes[module], of_parts[part], site.rows[part]
                b[part], whole = self._room(_whole(rows, LANES) * rank), rows // CHUNK * CHUNK
                self.pieces += [change.a, change.b]
                turns.append((0, a + before * side, rank, site.inputs, CHUNK, together * side, pairs))
                cuts.append(len(turns))
                turns.append((0, b[part], whole, rank, rank * CHUNK, CHUNK, False))
                rest = whole * rank, b[part] + whole * rank, rows - whole
                turns.append((*rest, rank, 0, _whole(rows - whole, LANES), False))
                cuts.append(len(turns))
                self._scales[index, before : before + rank] = change.scale
                before += rank
            scales = self._scales.ctypes.data + index * self._scales.strides[0]
            self._factors[index] = (a, scales, b, of_parts + [0] * (PARTS - len(of_parts)), together, 0)
        self._turns = np.array(turns, np.int64).reshape(-1, 7)
        spans = [(extent.start, prod(extent.shape)) for extent in self.pieces]
        spans_of_turns = zip(cuts, np.diff(cuts).tolist(), strict=False)
        self._rows = np.array([span + own for span, own in zip(spans, spans_of_turns, strict=True)], np.int64)
        self._apart = np.empty(max((size for _, size in spans), default=0), np.float32)

    def has_room(self, *, narrow: bool) -> bool:
        """Whether `begin` has memory from a version before. New memory takes milliseconds when it is first written to,
        and tens of them where the machine is a guest whose host has to find it first.
        """
        return any(memory.itemsize == (2 if narrow else 4) for memory in self._spare)

    def begin(self, *, narrow: bool) -> "Taking":
        """A version that is to be copied. narrow: as bfloat16, rounded where it is read as float32."""
        assert narrow or not self._pairs
        dtype = np.dtype(np.uint16 if narrow else np.float32)
        spare = [memory for memory in self._spare if memory.dtype == dtype]
        self._spare.clear()
        return Taking(self, spare[0] if spare else _memory(self._size, dtype))

    def copy(self, flat: Array, numbers: npt.NDArray[np.int64], memory: Array) -> npt.NDArray[np.uint64]:
        """Copy these pieces of `flat`, float32 or bfloat16 bits. See `Taking.take`."""
        digests, sizes = np.empty(len(numbers), np.uint64), np.array([flat.itemsize, flat.itemsize, 1, 1])
        arrays = flat, memory, self._turns, self._rows * sizes, numbers, digests, self._apart
        call = _Pack(
            *(array.ctypes.data for array in arrays),
            *(hasher(), len(numbers), flat.dtype == np.uint16, memory.dtype == np.uint16),
        )
        self._native.run_here("pack", ctypes.addressof(call))
        return digests

    def packed(self, memory: Array) -> Packed:
        """The version that this copy is of, all of which is there."""
        factors = self._factors.copy()
        for name in ("a", "b"):
            factors[name] = factors[name] * np.uint64(memory.itemsize) + np.uint64(memory.ctypes.data)
        factors["narrow"] = memory.dtype == np.uint16
        return Packed(factors, memory, self)

    def let_go(self, version: Packed) -> None:
        """Keep a version's memory for the next one."""
        self._spare[:] = [version.memory]

    def _room(self, elements: int) -> int:
        """Where so many begin; every matrix at the beginning of a cache line."""
        start = self._size
        self._size += _whole(elements, _LINE)
        return start


class Taking:
    """A version while it is copied, piece by piece (`Packing.pieces`), by one thread at a time, which need not be the
    one that computes.
    """

    def __init__(self, packing: Packing, memory: Array) -> None:
        """memory: of the copy."""
        self._packing, self._memory = packing, memory

    def take(self, flat: Array, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Copy these pieces of `flat`; xxh3-64 of each, of the very bytes that were copied, whoever writes meanwhile
        (of no use without a `hasher`).
        """
        return self._packing.copy(flat, numbers, self._memory)

    def whole(self) -> Packed:
        """The version, once every piece was taken; nothing is taken any more."""
        return self._packing.packed(self._memory)


@lru_cache(maxsize=1)
def hasher() -> int:
    """The address of xxh3-64 as C calls it; 0 where the xxhash wheel does not show it: then nothing is hashed."""
    try:
        return ctypes.cast(wheel_functions("64bits")[0], ctypes.c_void_p).value or 0
    except OSError:
        return 0


def sites_of(manifest: Manifest, shard: Shard) -> tuple[Site, ...]:
    """The products that an adapter may change: attention's and dense MLPs', shared experts included.

    Not among them: embedding and head, routers, routed experts, and the layer that drafts (what it proposes is judged
    by the model with its adapter).
    """
    members: dict[str, list[str]] = {}
    for p in manifest.parameters:
        drafts = p.name.startswith("model.mtp_")
        if p.name.endswith("_proj.weight") and p.split is not None and not drafts and ".experts." not in p.name:
            members.setdefault(p.fused or p.name, []).append(p.name)
    return tuple(
        Site(
            name,
            tuple(weight.removesuffix(".weight") for weight in weights),
            shard.shapes[name][1],
            tuple(shard.shapes[weight][0] for weight in weights),
        )
        for name, weights in members.items()
    )


def _memory(size: int, dtype: np.dtype[Any]) -> Array:
    """Memory for so many elements: a mapping of its own, from the beginning of a huge page on.

    The heap keeps what is freed, small pages with it, whatever is asked for them: with eight adapters there, a step
    spent as long on looking their pages up as on reading them.
    """
    whole = max(1, -(-size * dtype.itemsize // HUGE)) * HUGE  # a huge page that is not whole is small ones
    memory = mapped((whole + HUGE,), np.uint8)
    start = -memory.ctypes.data % HUGE
    return memory[start : start + size * dtype.itemsize].view(dtype)


def _whole(size: int, of: int) -> int:
    return -(-size // of) * of

"""Low-rank updates of a decoder's linears (LoRA): where they may act, and adding them to the rows of a step.

y += scale * B (A x) for the rows of each adapter, in float32, from A and B as they were pushed. Every row's sums are
made in one order whatever else is in the step: what is added to a sequence is the same alone and among others.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weight_manager.layout import Manifest, Span
from worker.cpu.native import Native
from worker.engine.base import Float32, ForwardBatch, Int32
from worker.models.shard import Shard

Array = npt.NDArray[Any]
Step = Callable[[], object]

_PARTS = 3
"""Linears that one product may hold (q, k and v): PARTS of low_rank.c."""
_RUN_TOKENS = 64
"""Tokens of one adapter that are worked on together: their rows stay in a core's cache."""
_LANES = 16
_PADDED = 64
"""No step has more columns than its tokens rounded up to this."""
_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


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

    a: Span
    b: Span
    scale: float


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


@dataclass(frozen=True)
class Rows:
    """Whose rows a step has: tokens (columns) sorted by adapter, cut into runs [first, first + count) of one adapter.

    epochs: the adapters. runs: [R, 3], (index of the adapter, first, count). order: [tokens with an adapter].
    """

    epochs: tuple[int, ...]
    order: Int32
    runs: npt.NDArray[np.int64]


def rows_of(batch: ForwardBatch) -> Rows:
    """The tokens of sequences with an adapter."""
    per_token = np.repeat(batch.adapters, batch.query_lens)
    order: Int32 = np.argsort(per_token, kind="stable")[np.count_nonzero(per_token == 0) :].astype(np.int32)
    epochs, firsts, counts = np.unique(per_token[order], return_index=True, return_counts=True)
    runs = [
        (index, start, min(_RUN_TOKENS, first + count - start))
        for index, (first, count) in enumerate(zip(firsts.tolist(), counts.tolist(), strict=True))
        for start in range(first, first + count, _RUN_TOKENS)
    ]
    return Rows(tuple(epochs.tolist()), order, np.array(runs, np.int64).reshape(-1, 3))


class LowRank(Protocol):
    """Adds the updates of the adapters it holds."""

    def plan(self, changes: Mapping[str, Factors]) -> object:
        """For `hold`: what versions have in common that change the same modules and lie alike."""
        ...

    def hold(self, epoch: int, plan: Any, flat: Array) -> None:
        """Take in a version, float32 or bfloat16 bits. It is read until `drop`. May run beside a step."""
        ...

    def drop(self, epoch: int) -> None:
        """Let go of it and of its array; between steps."""
        ...

    def begin(self, batch: ForwardBatch) -> None:
        """The next step's rows. Raises KeyError for an adapter that is not held."""
        ...

    def step(self, site: str, x: Array, y: Float32) -> Step:
        """Recorded work: y [rows, T] += what the step's adapters make of x [inputs, T]. Both feature-major views."""
        ...


class PlainLowRank:
    """`LowRank` in numpy, for machines without a C compiler."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = {site.name: site for site in sites}
        self._held: dict[int, Mapping[str, tuple[Float32, Float32, float]]] = {}
        self._rows = Rows((), np.zeros(0, np.int32), np.zeros((0, 3), np.int64))

    def plan(self, changes: Mapping[str, Factors]) -> object:
        """They themselves."""
        return changes

    def hold(self, epoch: int, plan: Any, flat: Array) -> None:
        """Float32 copies of what is bfloat16."""
        changes: Mapping[str, Factors] = plan
        self._held[epoch] = {
            name: (_float32(change.a.of(flat)), _float32(change.b.of(flat)), change.scale)
            for name, change in changes.items()
        }

    def drop(self, epoch: int) -> None:
        """Let go of it."""
        self._held.pop(epoch, None)

    def begin(self, batch: ForwardBatch) -> None:
        """The next step's rows."""
        self._rows = rows_of(batch)
        for epoch in self._rows.epochs:
            _ = self._held[epoch]

    def step(self, site: str, x: Array, y: Float32) -> Step:
        """A product per token: numpy's of many would sum in an order of their number."""
        found = self._sites[site]

        def work() -> None:
            for index, first, count in self._rows.runs.tolist():
                columns = self._rows.order[first : first + count]
                changes, row = self._held[self._rows.epochs[index]], 0
                tokens = _float32(np.ascontiguousarray(x[:, columns].T))[:, None, :]
                for module, rows in zip(found.modules, found.rows, strict=True):
                    if module in changes:
                        a, b, scale = changes[module]
                        between = (tokens @ a.T) * np.float32(scale)
                        y[row : row + rows, columns] += (between @ b.T)[:, 0].T
                    row += rows

        return work


class _Call(ctypes.Structure):
    """`LowRank` of low_rank.c."""

    _fields_ = [
        ("x", _Pointer),
        ("y", _Pointer),
        *((name, _Int) for name in ("x_narrow", "x_round", "x_step", "x_token", "y_step", "y_token")),
        *((name, _Int) for name in ("inputs", "width", "parts")),
        *((name, _Pointer) for name in ("outputs", "factors", "order", "places")),
        ("columns", _Int),
        ("runs", _Pointer),
        *((name, _Int) for name in ("tokens", "run_count", "most")),
        ("turned", _Pointer),
        ("between", _Pointer),
        ("next", _Int * 3),
        ("done", _Int * 2),
    ]


class _Tilings(ctypes.Structure):
    """`Tilings` of low_rank.c."""

    _fields_ = [
        *((name, _Pointer) for name in ("source", "target", "all")),
        *((name, _Int) for name in ("count", "narrow")),
    ]


_FACTORS = np.dtype(
    [
        ("a", np.uint64),
        ("b", np.uint64),
        *((name, np.int64) for name in ("rank", "a_row", "a_narrow", "b_narrow")),
        ("scale", np.float32),
        ("pad", np.float32),
    ]
)
"""`Factors` of low_rank.c; a zero rank adds nothing."""


class _Addresses(NamedTuple):
    """Of what a step's calls share: asking numpy for one costs a microsecond."""

    factors: int
    order: int
    places: int
    runs: int
    turned: int
    between: int


@dataclass(eq=False)
class _Plan:
    """Of all versions that lie alike. factors: [sites, PARTS], addresses as elements from the start of the array and of
    the tiles. places: where in it something is. tilings: [B's, (b, tiles, outputs, rank)]. size: elements of the tiles.
    spare: memory of a version that was let go; new memory would be cleared page by page.
    """

    factors: npt.NDArray[Any]
    places: tuple[Array, Array]
    tilings: npt.NDArray[np.int64]
    size: int
    spare: list[Array] = field(default_factory=list)


class _Held(NamedTuple):
    """One version. factors: [sites, PARTS]. flat, tiles: the arrays that they point at."""

    factors: npt.NDArray[Any]
    flat: Array
    tiles: Array
    plan: _Plan


class NativeLowRank:
    """`LowRank` by the compiled kernel. A is read where it lies, of B there is a copy in tiles.

    narrow: the base's matrices are bfloat16, and so activations are read as bfloat16 wherever they come from.
    """

    def __init__(self, native: Native, sites: Sequence[Site], *, narrow: bool) -> None:
        assert native.number("low_rank_bytes") == ctypes.sizeof(_Call)
        assert native.number("factors_bytes") == _FACTORS.itemsize
        assert native.number("tiling_bytes") == 4 * ctypes.sizeof(_Int)
        self._native, self._narrow = native, narrow
        self._sites = {site.name: (index, site) for index, site in enumerate(sites)}
        self._places = {
            module: (index, part) for index, site in enumerate(sites) for part, module in enumerate(site.modules)
        }
        self._held: dict[int, _Held] = {}
        self._outputs = {site.name: np.array(site.rows, np.int64) for site in sites}
        self._widest = max((-(-site.inputs // _LANES) * _LANES for site in sites), default=0)
        self._turned, self._between = np.zeros(0, np.float32), np.zeros(0, np.float32)
        self._rows = Rows((), np.zeros(0, np.int32), np.zeros((0, 3), np.int64))
        self._factors = np.zeros((len(sites), 0, _PARTS), _FACTORS)  # of the step's adapters
        self._of: tuple[int, ...] = ()  # whose they are
        self._most = [0] * len(sites)  # the largest rank of each site's
        self._by_column = np.zeros(0, np.int32)  # of every column in the order, padding included
        self._addresses = _Addresses(0, 0, 0, 0, 0, 0)

    def plan(self, changes: Mapping[str, Factors]) -> object:
        """Where everything lies, and is to lie."""
        factors, tilings, size = np.zeros((len(self._sites), _PARTS), _FACTORS), [], 0
        for module, change in changes.items():
            (rank, inputs), (rows, _) = change.a.shape, change.b.shape
            factors[self._places[module]] = (change.a.start, size, rank, inputs, 0, 0, change.scale, 0)
            tilings.append((change.b.start, size, rows, rank))
            size += -(-rows // _LANES) * _LANES * rank
        sites, parts = np.nonzero(factors["rank"])
        return _Plan(factors, (sites, parts), np.array(tilings, np.int64).reshape(-1, 4), size)

    def hold(self, epoch: int, plan: Any, flat: Array) -> None:
        """Addresses of A, tiles of B."""
        assert isinstance(plan, _Plan)
        narrow, size = flat.dtype == np.uint16, flat.itemsize
        spare = [tiles for tiles in plan.spare if tiles.dtype == flat.dtype]
        plan.spare.clear()
        tiles = spare[0] if spare else np.zeros(plan.size, flat.dtype)
        places = flat.ctypes.data, tiles.ctypes.data
        call = _Tilings(*places, plan.tilings.ctypes.data, len(plan.tilings), narrow)
        self._native.run_here("tile_all", ctypes.addressof(call))
        factors = plan.factors.copy()
        for name, start in zip(("a", "b"), places, strict=True):
            factors[name][plan.places] = factors[name][plan.places] * size + start
            factors[f"{name}_narrow"][plan.places] = narrow
        self._held[epoch] = _Held(factors, flat, tiles, plan)

    def drop(self, epoch: int) -> None:
        """Let go of it."""
        held = self._held.pop(epoch, None)
        if held is not None:
            held.plan.spare[:] = [held.tiles]
        if epoch in self._of:
            self._of, self._factors = (), self._factors[:, :0]

    def begin(self, batch: ForwardBatch) -> None:
        """The next step's rows, and its adapters side by side."""
        self._rows = rows_of(batch)
        columns = -(-int(batch.query_lens.sum()) // _PADDED) * _PADDED
        if len(self._by_column) < columns:
            self._by_column = np.zeros(columns, np.int32)
        if self._rows.epochs != self._of:
            self._factors = np.stack([self._held[epoch].factors for epoch in self._rows.epochs], axis=1)
            self._most = self._factors["rank"].max(axis=(1, 2)).tolist()
            self._of = self._rows.epochs
        tokens = len(self._rows.order)
        if self._turned.size < tokens * self._widest:
            self._turned = np.empty(tokens * self._widest, np.float32)
        between = tokens * _PARTS * max(self._most)
        if self._between.size < between:
            self._between = np.empty(between, np.float32)
        self._by_column[:] = -1
        self._by_column[self._rows.order] = np.arange(tokens)
        arrays = self._factors, self._rows.order, self._by_column, self._rows.runs, self._turned, self._between
        self._addresses = _Addresses(*(array.ctypes.data for array in arrays))

    def step(self, site: str, x: Array, y: Float32) -> Step:
        """One call of the kernel."""
        (index, found), outputs = self._sites[site], self._outputs[site]
        (x_step, x_token), (y_step, y_token) = ([stride // rows.itemsize for stride in rows.strides] for rows in (x, y))
        call = _Call(
            x=x.ctypes.data,
            y=y.ctypes.data,
            x_narrow=x.dtype == np.uint16,
            x_round=self._narrow and x.dtype == np.float32,
            x_step=x_step,
            x_token=x_token,
            y_step=y_step,
            y_token=y_token,
            inputs=found.inputs,
            width=-(-found.inputs // _LANES) * _LANES,
            parts=len(found.modules),
            outputs=outputs.ctypes.data,
            columns=x.shape[1],
        )
        counters, counter_bytes = ctypes.addressof(call) + _Call.next.offset, _Call.next.size + _Call.done.size
        run, kernel, address = self._native.run, self._native.address("low_rank"), ctypes.addressof(call)

        def work(_: object = (x, y, outputs)) -> None:
            most = self._most[index]
            if not most:
                return  # none of the step's adapters changes this
            factors, call.order, call.places, call.runs, call.turned, call.between = self._addresses
            call.factors = factors + index * self._factors.strides[0]
            call.tokens, call.run_count, call.most = len(self._rows.order), len(self._rows.runs), most
            ctypes.memset(counters, 0, counter_bytes)
            run(kernel, address)

        return work


def _float32(view: Array) -> Float32:
    return (view.astype(np.uint32) << 16).view(np.float32) if view.dtype == np.uint16 else view

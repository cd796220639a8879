"""Low-rank updates of a decoder's linears (LoRA), added to the rows of a step.

y += scale * B (A x) for the rows of each adapter, added up in float32. Every row's sums are made in one order whatever
else is in the step: what is added to a sequence is the same alone and among others.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from worker.cpu.native import Native
from worker.engine.base import Float32, ForwardBatch, Int32
from worker.models.packed_adapter import FACTORS, LANES, PARTS, Factors, Packed, Packing, Site, Taking

Array = npt.NDArray[Any]
Step = Callable[[], object]

_RUN_TOKENS = 64
"""Tokens of one adapter that are worked on together: their rows stay in a core's cache."""
_SLICED = 1024
"""Inputs whose sums are made in four slices: two threads have as much to do each, also with one adapter."""
_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True)
class Rows:
    """Whose rows a step has: tokens (columns) sorted by adapter, cut into runs [first, first + count) of one adapter.

    epochs: the adapters. runs: [R, 3], (index of the adapter, first, count). order: [tokens with an adapter].
    """

    epochs: tuple[int, ...]
    order: Int32
    runs: npt.NDArray[np.int64]


NO_ROWS = Rows((), np.zeros(0, np.int32), np.zeros((0, 3), np.int64))


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


class LowRankMemory(Protocol):
    """Holds adapters."""

    def plan(self, changes: Mapping[str, Factors]) -> object:
        """What versions have in common that change the same modules and lie alike, for `hold`."""
        ...

    def hold(self, epoch: int, plan: Any, flat: Array) -> None:
        """Take in a version, float32 or bfloat16 bits. It is read until `drop`. May run beside a step."""
        ...

    def drop(self, epoch: int) -> None:
        """Let go of a version and of its array; between steps. Nothing happens for one that is not held."""
        ...


@runtime_checkable
class MemoryGotFirst(LowRankMemory, Protocol):
    """One whose memory may have to be got while no step runs, before `hold`.

    gets: it has; else `get` is not called.
    """

    gets: bool

    def get(self, elements: int, itemsize: int) -> None:
        """Between steps: have memory for a version of so many elements, of so many bytes each. Whether there is some
        is for `hold` to say.
        """
        ...


class LowRank(LowRankMemory, Protocol):
    """Adds the updates of the adapters it holds."""

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
        self._rows = NO_ROWS

    def plan(self, changes: Mapping[str, Factors]) -> object:
        """See LowRank: the changes as they are."""
        return changes

    def hold(self, epoch: int, plan: Any, flat: Array) -> None:
        """Float32 copies of what is bfloat16."""
        changes: Mapping[str, Factors] = plan
        self._held[epoch] = {
            name: (_float32(change.a.of(flat)), _float32(change.b.of(flat)), change.scale)
            for name, change in changes.items()
        }

    def drop(self, epoch: int) -> None:
        """Let go of a version."""
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


class _Step(ctypes.Structure):
    """`Step` of low_rank.h."""

    _fields_ = [
        *((name, _Pointer) for name in ("order", "runs", "ready", "between", "factors", "most")),
        *((name, _Int) for name in ("tokens", "run_count", "adapters")),
    ]


class _Call(ctypes.Structure):
    """`LowRank` of low_rank.h."""

    _fields_ = [
        *((name, _Pointer) for name in ("step", "x", "y")),
        *((name, _Int) for name in ("x_narrow", "x_round", "x_step", "x_token", "y_step", "y_token")),
        *((name, _Int) for name in ("columns", "inputs", "parts")),
        ("outputs", _Int * PARTS),
        *((name, _Int) for name in ("slices", "site", "next_site", "next_inputs")),
        ("next", _Int * 2),
        ("done", _Int),
    ]


class Adapted:
    """What adapters add to one product of a program, by low_rank.c: by itself, or as a part of the product's kernel."""

    def __init__(self, site: int, call: _Call, most: Array, arrays: tuple[Array, Array]) -> None:
        """most: see `Step` of low_rank.h. arrays: what the call points into."""
        self.site = site
        self._call, self._most, self._kept = call, most, arrays
        self._address = ctypes.addressof(call)
        self._counters = self._address + _Call.next.offset, 0, _Call.next.size + _Call.done.size

    def before(self, following: "Adapted") -> None:
        """That is done next: some of what it reads is fetched meanwhile."""
        self._call.next_site, self._call.next_inputs = following.site, following._call.inputs

    def begun(self) -> int:
        """The address of the call, for it to be run once; 0 if none of the step's adapters changes this."""
        if not self._most[self.site]:
            return 0
        ctypes.memset(*self._counters)
        return self._address


class NativeLowRank:
    """`LowRank` by the compiled kernel, which reads a copy of each adapter.

    narrow: the base's matrices are bfloat16. So are the copies then, and activations are read as bfloat16 wherever they
    come from.
    """

    def __init__(self, native: Native, sites: Sequence[Site], *, narrow: bool) -> None:
        assert native.number("low_rank_bytes") == ctypes.sizeof(_Call)
        assert native.number("low_rank_step_bytes") == ctypes.sizeof(_Step)
        self._native, self._narrow, self._sites = native, narrow, sites
        self._index = {site.name: index for index, site in enumerate(sites)}
        self._held: dict[int, Packed] = {}
        self._of: tuple[int, ...] = ()  # the step's adapters
        self._factors = np.zeros((len(sites), 0), FACTORS)  # theirs
        self._most = np.zeros(len(sites), np.int64)  # the most ranks of each site's, rounded up to whole vectors
        self._widest = 0  # of what lies between A and B, elements of a token
        self._between, self._ready = np.zeros(0, np.float32), np.zeros(0, np.int64)
        self._rows, self._whose = NO_ROWS, b""
        self._step = _Step(most=self._most.ctypes.data)

    def plan(self, changes: Mapping[str, Factors]) -> object:
        """Where everything lies, and is to lie."""
        return Packing(self._native, self._sites, changes, pairs=self._narrow)

    def hold(self, epoch: int, plan: Any, flat: Array) -> None:
        """Copy a version, as bfloat16 if it or the base is."""
        assert isinstance(plan, Packing)
        taking = self.taking(plan, flat.dtype)
        taking.take(flat, np.arange(len(plan.pieces)))
        self.keep(epoch, taking)

    def taking(self, plan: Packing, dtype: np.dtype[Any]) -> Taking:
        """A version of `dtype` that is to be copied piece by piece, for `keep`."""
        return plan.begin(narrow=self._narrow or dtype == np.uint16)

    def has_room(self, plan: Packing, dtype: np.dtype[Any]) -> bool:
        """Whether `taking` has memory at once."""
        return plan.has_room(narrow=self._narrow or dtype == np.uint16)

    def keep(self, epoch: int, taking: Taking) -> None:
        """Take in a version of which all pieces were copied, as `hold` does."""
        self._held[epoch] = taking.whole()

    def drop(self, epoch: int) -> None:
        """Let go of a version."""
        held = self._held.pop(epoch, None)
        if held is not None:
            held.plan.let_go(held)
        if epoch in self._of:
            self._of, self._whose = (), b""

    def begin(self, batch: ForwardBatch) -> None:
        """The next step's rows, and its adapters side by side."""
        whose = batch.adapters.tobytes() + batch.query_lens.tobytes()
        if whose == self._whose:
            return  # as in the step before
        self._whose, self._rows = b"", rows_of(batch)
        if self._rows.epochs != self._of:
            self._gather(self._rows.epochs)
        self._whose = whose
        tokens, runs = len(self._rows.order), len(self._rows.runs)
        if self._between.size < tokens * self._widest:
            self._between = np.empty(tokens * self._widest, np.float32)
        if self._ready.size < runs:
            self._ready = np.zeros(runs, np.int64)
        step = self._step
        arrays = self._rows.order, self._rows.runs, self._ready, self._between, self._factors
        step.order, step.runs, step.ready, step.between, step.factors = (a.ctypes.data for a in arrays)
        step.tokens, step.run_count, step.adapters = tokens, runs, len(self._of)

    def rows(self, site: str) -> tuple[int, ...]:
        """Of each of the linears that lie one below the other there."""
        return self._sites[self._index[site]].rows

    def adapted(self, site: str, x: Array, y: Float32) -> Adapted:
        """What is added to y [rows, T] of x [inputs, T]. Both feature-major views."""
        assert self._narrow or x.dtype == np.float32, "activations are bfloat16 where the base is"
        index = self._index[site]
        found = self._sites[index]
        (x_step, x_token), (y_step, y_token) = ([stride // rows.itemsize for stride in rows.strides] for rows in (x, y))
        call = _Call(
            step=ctypes.addressof(self._step),
            x=x.ctypes.data,
            y=y.ctypes.data,
            x_narrow=x.dtype == np.uint16,
            x_round=self._narrow and x.dtype == np.float32,
            x_step=x_step,
            x_token=x_token,
            y_step=y_step,
            y_token=y_token,
            columns=x.shape[1],
            inputs=found.inputs,
            parts=len(found.modules),
            outputs=(_Int * PARTS)(*found.rows),
            slices=_slices(found.inputs),
            site=index,
            next_site=-1,
        )
        return Adapted(index, call, self._most, (x, y))

    def step(self, site: str, x: Array, y: Float32) -> Step:
        """One call of the kernel."""
        adapted, run, kernel = self.adapted(site, x, y), self._native.run, self._native.address("low_rank")

        def work() -> None:
            address = adapted.begun()
            if address:
                run(kernel, address)

        return work

    def _gather(self, epochs: tuple[int, ...]) -> None:
        self._factors = np.stack([self._held[epoch].factors for epoch in epochs], axis=1)
        self._of = epochs
        self._most[:] = -(-self._factors["ranks"].max(axis=1) // LANES) * LANES
        widths = (most * _slices(site.inputs) for most, site in zip(self._most.tolist(), self._sites, strict=True))
        self._widest = max(widths, default=0)


def _slices(inputs: int) -> int:
    return 4 * -(-inputs // _SLICED)


def _float32(view: Array) -> Float32:
    return (view.astype(np.uint32) << 16).view(np.float32) if view.dtype == np.uint16 else view

"""Before a device holds its first adapter, each kernel that adds adapters on it is compared with products in numpy.

Every instance of a product that adds adapters itself is among them, with as many rows as it takes and with fewer, of
several versions, of one, and of the base; of its outputs only as many as there is room for. Elements are compared, not
norms: one that is off by a twentieth of its row's size is found.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from worker.gpu.adapters import FACTORS, MOST_RANKS, SHARES, DeviceAdapters, listed, shape_of
from worker.gpu.changes import Changes, launch_product
from worker.gpu.driver import CudaError
from worker.gpu.products import SKINNY_ROWS, Skinny
from worker.gpu.reference import widened
from worker.gpu.weights import Tensor
from worker.models.packed_adapter import Site

if TYPE_CHECKING:
    from worker.engine.base import Float32, Int32

Array = npt.NDArray[Any]

_EPS = 1e-5
_RANKS = ((16, 16, 16), (5, 0, 3), (0, 40, 24))
"""Of the versions tried, by part; of a product of one or two parts the first of these that are some."""
_WEIGHTS = 1 << 20  # bytes of weights that a product is tried with, at most
_SOME = (
    Site("qkv", ("q", "k", "v"), 136, (64, 16, 24)),
    Site("o", ("o",), 72, (136,)),
    Site("gate_up", ("g", "u"), 136, (80, 80)),
)
"""For kernels that take any sizes."""
_FEW = 21  # rows of launches beside products
_OFF = 0.05


def require_right(held: DeviceAdapters) -> None:
    """Raises CudaError, with the kernel's name, where the device's numbers are not those of numpy. No version is held
    yet.
    """
    trial = _Trial(held)
    trial.converted()
    for kind, index in (("STORE", 0), ("ADD", 1), ("GATE", 2)):
        trial.beside(kind, index)
    for site in {(shape_of(site), site.rows): site for site in held.sites}.values():
        found = (held.product(shape_of(site), most) for most in SKINNY_ROWS)
        trial.products([kernel for kernel in found if kernel is not None], site)


class _Trial:
    """Made-up versions and rows, in the memory between A and B, behind what kernels need of it."""

    def __init__(self, held: DeviceAdapters) -> None:
        self._held, self._room, self._driver = held, held.room, held.driver
        self._base = held.room.between + 4 * SHARES * 64 * MOST_RANKS
        self._end = held.room.between + held.between_bytes
        self._at, self._rng = self._base, np.random.default_rng(0)
        self._steps = 0

    def converted(self) -> None:
        """A version is widened or rounded."""
        self._at, wide = self._base, self._numbers(203)
        came = _bits(wide) if self._held.fp32 else wide
        there, into = self._put(came), self._put(self._kept(np.zeros(203)))
        self._held.convert(there, into, came.size)
        expected = widened(came) if self._held.fp32 else widened(_bits(wide))
        self._compare("converted", into, self._kept(np.zeros(203)), expected.reshape(1, -1), 0.0)

    def beside(self, kind: str, index: int) -> None:
        """A x before a product and B (A x) behind it; gate and up become one there."""
        self._at, rows, site = self._base, _FEW, _SOME[index]
        places = np.resize([0, -1, 1, 0, 2], rows - 2).astype(np.int32)
        normed = kind != "ADD"
        source, h, norm = self._rows(rows, site.inputs, normed=normed)
        self._table(index)
        lists, added = self._lists(places, rows, index), self._added(places, index, h)
        step: Any = SimpleNamespace(rows=rows, adapters=self._put(lists), ranks=MOST_RANKS, fused=False)
        changes = Changes(self._held, _SOME, {}, self._held.own_stream, _EPS)
        x: Any = SimpleNamespace(address=source, width=site.inputs, norm=norm)
        changes.shrink(index, x, step)
        before = self._numbers((rows, sum(site.rows)))
        count = len(places)
        if kind == "GATE":
            bias = self._numbers(sum(site.rows))
            there, y = self._put(self._kept(before)), self._kept(np.zeros((rows, site.rows[0])))
            at = self._put(y)
            of_bias = Tensor(self._put(self._kept(bias)), bias.shape)
            changes.expand(kind, index, x, step, at, there, of_bias)
            expected = _gated(self._rounded(before) + self._rounded(bias) + added)
        else:
            y = before if kind == "ADD" else self._kept(before)
            at = self._put(y)
            changes.expand(kind, index, x, step, at)
            expected = widened(y) + added
        self._compare(f"shrink or expand_{kind}", at, y, expected, _OFF, count)

    def products(self, kernels: Sequence[Skinny], site: Site) -> None:
        """Products of few rows that add adapters themselves: a site's, for one number of rows each; the first of their
        outputs.
        """
        if not kernels:
            return
        self._at, shape, most = self._base, kernels[0].shape, max(kernel.most for kernel in kernels)
        beside = most * shape.k * 4 + 2 * shape.k * sum(map(sum, _RANKS)) + (1 << 20)
        fewer = max(1, math.ceil(2 * sum(site.rows) * shape.k / min(_WEIGHTS, self._end - self._base - beside)))
        parts = tuple(-(-n // fewer // 8) * 8 for n in site.rows)
        x, h, norm = self._rows(most, shape.k, normed=shape.normed)
        versions = [self._version(ranks, Site(site.name, site.modules, site.inputs, parts)) for ranks in _RANKS]
        w = self._numbers((sum(parts), shape.k)) / np.float32(np.sqrt(shape.k))
        weight, base = self._put(_bits(w)), h @ self._rounded(w).T
        n, later = parts[0] if shape.kind == "GATE" else sum(parts), self._at
        for kernel in kernels:
            for rows in {kernel.most, max(1, kernel.most * 3 // 4)}:
                for several in ((0, -1, 1, 0, 2), (0,)):
                    self._at, places = later, np.resize(several, rows)
                    lists = _listed(places, rows, [row for row, _ in versions])
                    self._steps += 1
                    lists[2] = self._steps
                    tiles = np.zeros(rows, FACTORS)
                    for number, place in enumerate(lists[4 : 4 + 3 * lists[0] : 3].tolist()):
                        if place >= 0:
                            tiles[number] = versions[place][0]
                    expected = base[:rows] + _sum_of(places, [v for _, v in versions], h[:rows], sum(parts))
                    add = shape.kind == "ADD"
                    y = self._numbers((rows, n)) if add else np.zeros((rows, n), np.uint16)
                    at = self._put(y)
                    launch_product(
                        self._held,
                        kernel,
                        self._held.own_stream,
                        weight=weight,
                        x=x,
                        norm=0 if norm is None else norm.address,
                        y=at,
                        n=n,
                        rows=rows,
                        eps=_EPS,
                        tiles=self._put(tiles),
                        site=0,
                        sites=1,
                        lists=self._put(lists),
                        parts=parts,
                    )
                    expected = _gated(expected) if shape.kind == "GATE" else expected + widened(y)
                    self._compare(kernel.name, at, y, expected, _OFF)

    def _rows(self, rows: int, columns: int, *, normed: bool) -> "tuple[int, Array, Tensor | None]":
        """Rows that a product reads: where they lie, what they are once normed, the norm's weight."""
        x = 3 * self._numbers((rows, columns))
        if not normed:
            return self._put(self._kept(x)), self._rounded(x), None
        weight = 1 + self._numbers(columns) / 10
        h = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + _EPS)
        norm = Tensor(self._put(self._kept(weight)), (columns,))
        return self._put(x), h * self._rounded(weight), norm

    def _version(self, ranks: Sequence[int], site: Site) -> "tuple[Array, list[tuple[Array, Array]]]":
        """A row of FACTORS, and (scaled B, A) of each part."""
        row = np.zeros((), FACTORS)
        numbers: list[tuple[Array, Array]] = []
        some = ranks[: len(site.rows)] if any(ranks[: len(site.rows)]) else ranks[1 : 1 + len(site.rows)]
        for part, (rank, outputs) in enumerate(zip(some, site.rows, strict=True)):
            if not rank:
                numbers.append((np.zeros((outputs, 0)), np.zeros((0, site.inputs))))
                continue
            a = self._numbers((rank, site.inputs)) / np.sqrt(site.inputs)
            b, scale = self._numbers((outputs, rank)), 2.0 / rank**0.5
            row["a"][part], row["b"][part] = self._put(self._kept(a)), self._put(self._kept(b))
            row["rank"][part], row["scale"][part] = rank, scale
            numbers.append((np.float32(scale) * self._rounded(b), self._rounded(a)))
        row["ranks"] = row["rank"].sum()
        return row, numbers

    def _table(self, *sites: int) -> None:
        """Versions of _SOME's products, in the first places of the device's table."""
        self._versions = {site: [self._version(ranks, _SOME[site]) for ranks in _RANKS] for site in sites}
        for place in range(len(_RANKS)):
            row = np.zeros(len(_SOME), FACTORS)
            for site, versions in self._versions.items():
                row[site] = versions[place][0]
            self._driver.to_device(self._room.table + place * row.nbytes, row, self._held.own_stream)
            self._driver.wait(self._held.own_stream)

    def _lists(self, places: "Int32", rows: int, *sites: int) -> "Int32":
        return _listed(places, rows, [row for site in sites for row, _ in self._versions[site]])

    def _added(self, places: "Int32", site: int, h: Array) -> Array:
        return _sum_of(places, [numbers for _, numbers in self._versions[site]], h, sum(_SOME[site].rows))

    def _numbers(self, shape: int | tuple[int, ...]) -> "Float32":
        return self._rng.standard_normal(shape, np.float32)

    def _kept(self, x: Array) -> Array:
        """In the dtype that is computed with."""
        return np.ascontiguousarray(x, np.float32) if self._held.fp32 else _bits(x)

    def _rounded(self, x: Array) -> Array:
        return widened(self._kept(x)).astype(np.float64)

    def _put(self, array: Array) -> int:
        at, nbytes = self._at, -(-array.nbytes // 256) * 256
        assert at + nbytes <= self._end, "what is tried is too large"
        self._driver.to_device(at, array, self._held.own_stream)
        self._driver.wait(self._held.own_stream)
        self._at += nbytes
        return at

    def _compare(self, what: str, at: int, like: Array, expected: Array, off: float, count: int | None = None) -> None:
        """The first `count` rows; those behind, which are nobody's, must be as they were, which is `like`."""
        found = np.empty_like(like)
        self._driver.to_host(found, at, self._held.own_stream)
        self._driver.wait(self._held.own_stream)
        rows = len(expected)
        nobodys = [array.reshape(rows, -1)[rows if count is None else count :] for array in (found, like)]
        got, expected = widened(found).reshape(expected.shape)[:count], expected[:count]
        size = np.sqrt((expected**2).mean(axis=1, keepdims=True))
        right = (np.abs(got - expected) <= off * (size + np.abs(expected))).all()
        if not right or not np.array_equal(nobodys[0], nobodys[1]):
            raise CudaError(f"{self._driver.name} computes wrong: {what}")


def _bits(x: Array) -> Array:
    """bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _gated(x: Array) -> Array:
    gate, up = np.split(x, 2, axis=1)
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


def _listed(places: "Int32", rows: int, factors: Sequence[Array]) -> "Int32":
    return listed(
        places, rows, max(int(row["ranks"]) for row in factors), max(int(row["rank"].max()) for row in factors)
    )


def _sum_of(places: "Int32", versions: Sequence[Any], h: Array, outputs: int) -> Array:
    """What adapters add to each row."""
    added = np.zeros((len(h), outputs))
    for t, place in enumerate(places.tolist()):
        start = 0
        for b, a in versions[place] if place >= 0 else ():
            if len(a):
                added[t, start : start + len(b)] = b @ (a @ h[t])
            start += len(b)
    return added

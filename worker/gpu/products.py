"""Which way a product is computed, by its shape and the number of rows: found by timing, and kept on disk.

Kinds, by what becomes of the result (the macros of kernels/one_row.cu): STORE a projection in the weights' dtype, ADD
onto the residual stream, GATE silu(gate) * up, WIDE float32 logits. Ways:

    one:G      own kernel for one row, G blocks; reads the residual stream and norms it on the way
    skinny     own kernel on tensor cores for up to 32 rows; norms the residual stream on the way, too
    lt:I       cuBLASLt's I-th proposal, between a norm and (GATE) the gating
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import xxhash

from worker.gpu.compiler import keep, kept
from worker.gpu.cublaslt import CublasLt
from worker.gpu.driver import CudaError, Driver, Timer

_ONE_WARPS = (1, 2, 4, 8)
_GOOD_LOADS, _MOST_LOADS = 4, 7  # of 16 bytes in flight a lane and weight row; more would spill
_SKINNY = {1: (1,), 8: (1,), 16: (1,), 32: (2, 3, 1)}
"""By the most rows of x: how many blocks share the columns, the best first."""
_SKINNY_WEIGHTS = 96 << 10  # bytes a block, at most
_SKINNY_SHARED = 227 << 10  # bytes that a block may have
SKINNY_ROWS = tuple(_SKINNY)
"""The most rows of x that there are kernels of skinny.cu for."""
_ROUNDS = 4


@dataclass(frozen=True)
class Shape:
    """y[T, n] from x[T, k]. kind: STORE | ADD | GATE | WIDE; n counts a GATE's gate rows alone."""

    kind: str
    n: int
    k: int
    normed: bool  # x is the residual stream, to be normed first


@dataclass(frozen=True)
class Skinny:
    """An instance of kernels/skinny.cu: `rows` weight rows and `part` columns a block, up to `most` rows of x."""

    shape: Shape
    rows: int
    part: int
    split: int
    most: int
    changed: bool = False  # adapters are added: kernels/low_rank.cu

    @property
    def name(self) -> str:
        """The kernel's."""
        normed, changed = "_normed" * self.shape.normed, "_changed" * self.changed
        return f"skinny_{self.shape.kind}_{self.shape.n}_{self.shape.k}{normed}_{self.split}_{self.most}{changed}"

    @property
    def shared(self) -> int:
        """Bytes of shared memory: operands, or sums where these were, and a number for each row."""
        sums = 8 // max(self._across, 1) * -(-self.most // 16) * 16 * (self.rows + (40 - self.rows % 32) % 32) * 4
        return max((self.rows + self.most) * self.part * 2, sums) + 4 * self.most

    @property
    def blocks(self) -> int:
        """Thread blocks of the grid."""
        return self.blocks_of(self.shape.n)

    def blocks_of(self, n: int) -> int:
        """Those of the first n outputs."""
        return -(-n // (self.rows // 2 if self.shape.kind == "GATE" else self.rows)) * self.split

    @property
    def line(self) -> str:
        """The line of source that instantiates the kernel."""
        sizes = f"{self.rows}, {self.part}, {self.split}, {self.most}"
        macro = "SKINNY_CHANGED" if self.changed else "SKINNY"
        return f"{macro}({self.name}, {sizes}, {self.shape.kind}, {str(self.shape.normed).lower()})"

    @property
    def fits(self) -> bool:
        """Whether the kernel takes these sizes: few enough sums for the registers, and room, with LowRank's beside."""
        beside = (
            self.most * (80 + 5 * 4) + max(4 * 16 * 17, self.most * (1 + (self.shape.kind == "GATE")) * 16) * 4 + 64
        )
        return self._across > 0 and self.shared + beside * self.changed <= _SKINNY_SHARED

    @property
    def _across(self) -> int:
        """Warps side by side, as the kernel has them; 0: there are too many sums."""
        tiles, eights = -(-self.most // 16), self.rows // 8
        at_most = 6 if tiles == 1 else 16 // tiles
        return next((n for n in (1, 2, 4, 8) if eights % n == 0 and eights // n <= at_most), 0)


def skinny(shape: Shape, tokens: int, multiprocessors: int, *, changed: bool = False) -> Skinny | None:
    """About one block a multiprocessor, or more where their weights would not fit; None: this is not its kind."""
    most = next((most for most in _SKINNY if most >= tokens), 0)
    for split in _SKINNY.get(most, ()):
        if shape.k % (64 * split) or shape.kind == "WIDE":
            continue
        part, unit = shape.k // split, 16 if shape.kind == "GATE" else 8
        wanted = -(-shape.n * (2 if shape.kind == "GATE" else 1) * split // multiprocessors)
        rows = max(unit, min(-(-wanted // unit), _SKINNY_WEIGHTS // (2 * part) // unit) * unit)
        for more in range(rows, rows + 8 * unit, unit):
            found = Skinny(shape, more, part, split, most, changed)
            if found.fits:
                return found
    return None


def instances(shapes: Sequence[Shape], multiprocessors: int) -> list[str]:
    """Lines that instantiate the own kernels which fit these shapes."""
    lines = set()
    for shape in shapes:
        if warps := _warps(shape):
            loads, normed = shape.k // 256 // warps, str(shape.normed).lower()
            lines.add(f"ONE_ROW({_one(shape)}, {loads}, {warps}, {shape.kind}, {normed})")
        lines.update(kernel.line for most in _SKINNY if (kernel := skinny(shape, most, multiprocessors)))
    return sorted(lines)


def one_row_threads(shape: Shape, multiprocessors: int) -> list[int]:
    """Numbers of thread blocks worth trying for one row."""
    warps = _warps(shape)
    if not warps:
        return []
    jobs = shape.n // 2 if shape.kind == "WIDE" else shape.n
    needed = -(-jobs // (8 // warps))
    return sorted({min(needed, multiprocessors * 8), min(needed, multiprocessors * 4), -(-needed // 2)})


class Choices:
    """Ways by (shape, rows), timed once for a device, its driver, its library and a model.

    model: what else matters; of few layers, caches hold all weights, and what is fastest then is not with many.
    """

    def __init__(self, driver: Driver, library: CublasLt, multiprocessors: int, model: object) -> None:
        self._library, self._multiprocessors = library, multiprocessors
        made_of = repr((driver.name, driver.version, library.version, model))
        self._name = f"products-{xxhash.xxh3_64_hexdigest(made_of.encode())}.json"
        self._ways: dict[str, str] = self._read()
        self._fresh = False

    def way(self, shape: Shape, tokens: int) -> str:
        """The way chosen, or the library's first proposal where nothing was timed. Gate and up that are not joined are
        the same product to the library as those that are.
        """
        way = self._ways.get(self._key(shape, tokens))
        if way is None and shape.kind == "STORE":
            joined = self._ways.get(self._key(replace(shape, kind="GATE", n=shape.n // 2), tokens), "")
            way = joined if joined.startswith("lt") else None
        return way or "lt:0"

    def choose(
        self, shape: Shape, tokens: int, timer: Timer, run: Callable[[str], None], *, own: bool
    ) -> dict[str, float]:
        """Time every way (`run` launches all of one) unless it is known; milliseconds by way. own: own kernels too."""
        key = self._key(shape, tokens)
        if key in self._ways:
            return {}
        times: dict[str, float] = {}
        for way in self._candidates(shape, tokens, own=own):
            try:
                run(way)
                times[way] = timer.best_of(_ROUNDS, lambda way=way: run(way))  # type: ignore[misc]
            except CudaError:
                if way.startswith("lt") and way != "lt:0":
                    continue  # a proposal that this device or shape does not take
                raise
        self._ways[key] = min(times, key=times.__getitem__)
        self._fresh = True
        return times

    def save(self) -> None:
        """Keep what was timed since the last time."""
        if self._fresh:
            keep(self._name, json.dumps({**self._read(), **self._ways}, indent=1).encode())
            self._fresh = False

    def _key(self, shape: Shape, tokens: int) -> str:
        return f"{shape.kind} {shape.n} {shape.k} {int(shape.normed)} {tokens}"

    def _candidates(self, shape: Shape, tokens: int, *, own: bool) -> list[str]:
        add, wide = shape.kind == "ADD", shape.kind in {"ADD", "WIDE"}
        n = 2 * shape.n if shape.kind == "GATE" else shape.n
        ways = [f"lt:{i}" for i in range(len(self._library.plans(n, shape.k, tokens, add=add, wide=wide)))]
        if own and tokens == 1:
            ways += [f"one:{blocks}" for blocks in one_row_threads(shape, self._multiprocessors)]
        if own and skinny(shape, tokens, self._multiprocessors):
            ways.append("skinny")
        return ways

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(kept(self._name) or b"")
        except ValueError:
            return {}
        return {str(key): str(way) for key, way in found.items()} if isinstance(found, dict) else {}


def one_row_kernel(shape: Shape) -> str:
    """The kernel of a way "one:..."."""
    return _one(shape)


def tokens_padded(tokens: int) -> int:
    """Rows that a step of so many tokens computes: fewer different shapes than numbers of tokens."""
    return tokens if tokens <= 16 else -(-tokens // 16) * 16 if tokens <= 256 else -(-tokens // 64) * 64


def _warps(shape: Shape) -> int:
    """Warps that share a weight row in the kernel for one row; 0 = it does not fit."""
    if shape.kind == "WIDE" and shape.n % 2:
        return 0
    for most in (_GOOD_LOADS,) if shape.normed else (_GOOD_LOADS, _MOST_LOADS):
        for warps in _ONE_WARPS:
            if shape.k % (256 * warps) == 0 and shape.k // 256 // warps <= most:
                return warps
    return 0


def _one(shape: Shape) -> str:
    return f"one_{shape.kind}_{shape.k}{'_normed' if shape.normed else ''}"

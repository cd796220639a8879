"""Which way a product is computed, by its shape and the number of rows: found by timing, and kept on disk.

Kinds, by what becomes of the result (the macros of kernels/products.cu): STORE a projection in the weights' dtype, ADD
onto the residual stream, GATE silu(gate) * up, WIDE float32 logits. Ways:

    one:G      own kernel for one row, G blocks; reads the residual stream and norms it on the way
    few:N      own kernel on tensor cores for up to 64 rows, N * 8 weight rows a block
    lt:I       cuBLASLt's I-th proposal, between a norm and (GATE) the gating
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from worker.gpu.compiler import cache_folder, keep
from worker.gpu.cublaslt import CublasLt
from worker.gpu.driver import CudaError, Driver, Timer

_ONE_WARPS = (1, 2, 4, 8)
_GOOD_LOADS, _MOST_LOADS = 4, 7  # of 16 bytes in flight a lane and weight row; more would spill
_MOST_STEPS = 16  # weight chunks a lane holds at once
_MOST_FEW = 64
_ROUNDS = 4


@dataclass(frozen=True)
class Shape:
    """y[T, n] from x[T, k]. kind: STORE | ADD | GATE | WIDE; n counts a GATE's gate rows alone."""

    kind: str
    n: int
    k: int
    normed: bool  # x is the residual stream, to be normed first


def instances(shapes: Sequence[Shape]) -> str:
    """Lines that instantiate the own kernels which fit these shapes."""
    lines = set()
    for shape in shapes:
        if warps := _warps(shape):
            loads, normed = shape.k // 256 // warps, str(shape.normed).lower()
            lines.add(f"ONE_ROW({_one(shape)}, {loads}, {warps}, {shape.kind}, {normed})")
        for across in _across(shape):
            for tiles in (1, 2, 4):
                lines.add(f"FEW_ROWS({_few(shape, across, tiles)}, {shape.k // 256}, {across}, {tiles}, {shape.kind})")
    return "\n".join(sorted(lines))


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
        self._path = cache_folder() / f"products-{xxhash.xxh3_64_hexdigest(made_of.encode())}.json"
        self._ways: dict[str, str] = self._read()
        self._fresh = False

    def way(self, shape: Shape, tokens: int) -> str:
        """The way chosen, or the library's first proposal where nothing was timed."""
        return self._ways.get(self._key(shape, tokens), "lt:0")

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
                run(way)  # loads what is loaded at first use
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
            keep(self._path, json.dumps({**self._read(), **self._ways}, indent=1).encode())
            self._fresh = False

    def _key(self, shape: Shape, tokens: int) -> str:
        return f"{shape.kind} {shape.n} {shape.k} {int(shape.normed)} {tokens}"

    def _candidates(self, shape: Shape, tokens: int, *, own: bool) -> list[str]:
        add, wide = shape.kind == "ADD", shape.kind in {"ADD", "WIDE"}
        n = 2 * shape.n if shape.kind == "GATE" else shape.n
        ways = [f"lt:{i}" for i in range(len(self._library.plans(n, shape.k, tokens, add=add, wide=wide)))]
        if own and tokens == 1:
            ways += [f"one:{blocks}" for blocks in one_row_threads(shape, self._multiprocessors)]
        if own and tokens <= _MOST_FEW:
            ways += [f"few:{across}" for across in _across(shape)]
        return ways

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return {str(key): str(way) for key, way in found.items()} if isinstance(found, dict) else {}


def one_row_kernel(shape: Shape) -> str:
    """The kernel of a way "one:..."."""
    return _one(shape)


def few_rows_kernel(shape: Shape, across: int, tokens: int) -> tuple[str, int]:
    """The kernel of a way "few:...", and its number of thread blocks."""
    tiles = 1 if tokens <= 16 else 2 if tokens <= 32 else 4
    return _few(shape, across, tiles), shape.n // 8 if shape.kind == "GATE" else shape.n // (8 * across)


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


def _across(shape: Shape) -> list[int]:
    if shape.k % 256 or shape.n % 16:
        return []
    steps = shape.k // 256
    return [n for n in ((2,) if shape.kind == "GATE" else (1, 2)) if steps * n <= _MOST_STEPS]


def _one(shape: Shape) -> str:
    return f"one_{shape.kind}_{shape.k}{'_normed' if shape.normed else ''}"


def _few(shape: Shape, across: int, tiles: int) -> str:
    return f"few_{shape.kind}_{shape.k}_{across}_{tiles}"

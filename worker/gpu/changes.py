"""The launches that add a step's adapters to its products.

In bfloat16 products of few rows add adapters themselves (`product`, kernels/low_rank.cu). Beside all others are two
launches: A x before (`shrink`), B (A x) behind (`expand`, kernels/adapters.cu).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from worker.gpu.adapters import MOST_RANKS, SHARES, TILE, DeviceAdapters
from worker.gpu.driver import U64, Float, Handle, Int
from worker.gpu.products import SKINNY_ROWS, Shape, Skinny
from worker.gpu.weights import Tensor
from worker.models.packed_adapter import PARTS, Site

if TYPE_CHECKING:
    from worker.gpu.inputs import StepInputs
    from worker.gpu.operations import Rows

OUTPUTS, THREADS, RANKS = 128, 128, 16  # of kernels/adapters.cu
_SHARE = 256  # columns that are worth a block
_GRAPH_TILES, _GRAPH_RANKS = 8, 6  # that a graph has blocks for beside full tiles; blocks of ranks: more take turns


class Changes:
    """Launches that add a step's adapters to its products.

    addresses: of every site's weight, in both slots -> the site's number.
    """

    def __init__(
        self, held: DeviceAdapters, sites: Sequence[Site], addresses: Mapping[int, int], stream: Handle, eps: float
    ) -> None:
        self._held, self._sites, self._addresses, self._stream, self._eps = held, sites, addresses, stream, eps

    def site(self, weight: Tensor) -> int | None:
        """The number of this weight's product, if anything held changes it."""
        site = self._addresses.get(weight.address)
        return site if site in self._held.touched else None

    def shrink(self, site: int, x: "Rows", step: "StepInputs") -> None:
        """A x, of the rows with an adapter that changes the site. In a graph it is computed beside the product, and
        `expand` waits for both.
        """
        room, shares, driver = self._held.room, self._shares(x.width, step), self._held.driver
        if step.fused:
            driver.record(room.begun, self._stream)
            driver.wait_event(room.beside, room.begun)
        self._launch(
            "shrink_rows" if x.norm is None else "shrink_normed",
            (_tiles(step), min(_GRAPH_RANKS, -(-step.ranks // RANKS)), shares),
            *(U64(x.address), U64(0 if x.norm is None else x.norm.address), *self._of(site, step)),
            *(U64(room.between), U64(room.squares), Int(step.rows), Int(step.ranks), Int(x.width)),
            stream=room.beside if step.fused else None,
        )
        if step.fused:
            driver.record(room.done, room.beside)

    def product(self, kind: str, site: int, weight: Tensor, x: "Rows", step: "StepInputs", y: int) -> bool:
        """The product itself and all that adapters add to it, of few rows; False: nothing was done."""
        held, (n, k) = self._held, weight.shape
        shape = Shape(kind, n // 2 if kind == "GATE" else n, k, x.norm is not None)
        kernel = held.product(shape, step.rows) if step.rows <= SKINNY_ROWS[-1] else None
        if kernel is None:
            return False
        launch_product(
            held,
            kernel,
            self._stream,
            weight=weight.address,
            x=x.address,
            norm=0 if x.norm is None else x.norm.address,
            y=y,
            n=shape.n,
            rows=step.rows,
            eps=self._eps,
            tiles=held.room.tiles,
            site=site,
            sites=len(self._sites),
            lists=step.adapters,
            parts=self._sites[site].rows,
        )
        return True

    def expand(
        self, kind: str, site: int, x: "Rows", step: "StepInputs", y: int, gate_up: int = 0, bias: Tensor | None = None
    ) -> None:
        """What follows from it, added to y; as GATE, y from gate_up and its bias. x: as `shrink` had it."""
        room, rows = self._held.room, (*self._sites[site].rows, 0, 0)[:PARTS]
        if step.fused:
            self._held.driver.wait_event(self._stream, room.done)
        blocks = rows[:1] if kind == "GATE" else rows
        self._launch(
            f"expand_{kind}",
            (_tiles(step), sum(-(-n // OUTPUTS) for n in blocks)),
            *(*self._of(site, step), U64(room.between), U64(0 if x.norm is None else room.squares)),
            *(Int(step.rows), Int(step.ranks), Int(self._shares(x.width, step)), Int(x.width), Float(self._eps)),
            *(U64(gate_up), U64(0 if bias is None else bias.address), U64(y), *(Int(n) for n in rows)),
        )

    def _shares(self, columns: int, step: "StepInputs") -> int:
        """Blocks that share the columns: each hides the waits of others, where there is room for the parts of sums."""
        fit = self._held.rows * MOST_RANKS // (step.rows * step.ranks)
        return max(1, min(SHARES, -(-columns // _SHARE), fit))

    def _of(self, site: int, step: "StepInputs") -> tuple[Any, ...]:
        return U64(self._held.room.table), Int(site), Int(len(self._sites)), U64(step.adapters)

    def _launch(self, name: str, grid: tuple[int, ...], *arguments: Any, stream: Handle | None = None) -> None:
        self._held.room.kernels.launch(name, grid, THREADS, stream or self._stream, arguments)


def launch_product(
    held: DeviceAdapters,
    kernel: Skinny,
    stream: Handle,
    *,
    weight: int,
    x: int,
    norm: int,
    y: int,
    n: int,
    rows: int,
    eps: float,
    tiles: int,
    site: int,
    sites: int,
    lists: int,
    parts: Sequence[int],
) -> None:
    """A product of `rows` rows and the first n of its outputs that adds adapters itself; addresses, as the kernel has
    them. parts: outputs of each linear.
    """
    blocks = kernel.blocks_of(n)
    makers = min(blocks, held.multiprocessors * 7 // 8) // kernel.split
    n0, n1 = (*parts, 0)[:2]
    arguments = (
        *(U64(weight), U64(x), U64(norm), U64(y), Int(n), Int(rows), Float(eps), U64(tiles), Int(site), Int(sites)),
        *(U64(lists), U64(held.room.handed), Int(n0), Int(n1), Int(makers)),
    )
    cluster = (kernel.split,) if kernel.split > 1 else ()
    held.room.kernels.launch(kernel.name, (blocks,), 256, stream, arguments, kernel.shared, cluster)


def _tiles(step: "StepInputs") -> int:
    return min(step.rows, _GRAPH_TILES + -(-step.rows // TILE))

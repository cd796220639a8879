"""LoRA adapters on a device: where their versions lie, and how a step adds them to its products.

A version is copied from the arena into memory of its own, hashed there, and compared with what the arena's slot holds:
a rank votes on what its device has. A row of one table then says where each product's A and B lie, so graphs hold the
table's address and go on as they were when versions come and go. Which rows of a step have which version is told with
the step's other numbers, as tiles of up to 16 rows of one version. Products of few rows in bfloat16 add what adapters
change themselves; beside others that any held version changes are two launches: A x before, B (A x) behind
(kernels/adapters.cu).

Kernels are compiled, and the table and what lies between A and B get memory, when the first adapter comes.

Ranks that share a model: getting memory or loading a kernel may wait for all that a device does, and so for sums that
wait for other ranks, and hold up those who watch over them. So these ranks do either only where no sum is under way on
their device: kernels at the start, memory in the loop's thread, once the stream is through (`get`, `drop`).
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from rollout_client.cuda_hash import SOURCE, TINY
from worker.engine.base import ForwardBatch, Int32
from worker.gpu.compiler import compiled, kernels
from worker.gpu.digests import hashed
from worker.gpu.driver import U64, CudaError, Driver, Float, Handle, Int, Module
from worker.gpu.memory import Region
from worker.gpu.products import SKINNY_ROWS, Shape, Skinny, skinny
from worker.gpu.weights import Tensor
from worker.models.packed_adapter import PARTS, Factors, Site

if TYPE_CHECKING:
    from worker.gpu.inputs import StepInputs
    from worker.gpu.operations import Rows

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

FACTORS = np.dtype(
    [
        ("a", np.uint64, PARTS),
        ("b", np.uint64, PARTS),
        ("rank", np.int32, PARTS),
        ("scale", np.float32, PARTS),
        ("ranks", np.int32),
        ("unused", np.int32),
    ]
)
"""`Factors` of kernels/adapters.cu; a part without rank adds nothing."""
MOST_VERSIONS = 256
_TILE, _OUTPUTS, _THREADS = 16, 128, 128  # of kernels/adapters.cu
MOST_RANKS = 256 * PARTS
"""Ranks of all parts of one product, at most."""
_SHARES = 4  # blocks that share the columns of x, at most
_SHARE = 256  # columns that are worth a block
_HANDED_BYTES = 8 * SKINNY_ROWS[-1] * 8 * MOST_RANKS  # 8: SHARES of kernels/adapters.cu, at most
_FEW_ROWS = 512  # for which there is room at the most ranks and shares
_GRAPH_TILES, _GRAPH_RANKS = 8, 6  # that a graph has blocks for beside full tiles; blocks of ranks: more take turns
_KERNELS = ("shrink_rows", "shrink_normed", "expand_STORE", "expand_ADD", "expand_GATE")
_HASHED, _PIECES = 1 << 17, 1024  # bytes hashed by one block, at least; blocks, at most


class _Plan(NamedTuple):
    """How versions lie that are alike. factors: [sites] of FACTORS, with elements from a version's start for addresses.
    touched: sites that they change. ranks: of all parts of one site, the most, in fours.
    """

    factors: Array
    touched: frozenset[int]
    ranks: int


class _Held(NamedTuple):
    """A version on the device. place: its row of the table. plan: its own."""

    memory: Region
    place: int
    plan: _Plan


@dataclass(frozen=True)
class _Room:
    """What is there from the first adapter on. table: [MOST_VERSIONS][sites] of FACTORS. between, squares: of
    kernels/adapters.cu, for `rows` rows. tiles, handed: of the products that add adapters themselves.
    beside: the stream of A x in graphs. begun, done: where it begins and ends.
    """

    kernels: Module
    hashes: Module
    table: int
    between: int
    squares: int
    tiles: int
    handed: int
    beside: Handle
    begun: Handle
    done: Handle


class DeviceAdapters:
    """The versions that one device holds (`LowRankMemory`), and what of them a step has.

    `plan` and `hold` run in one thread at a time, beside steps; `get`, `drop` and the rest in the loop's.
    touched: sites changed by the versions that steps have had, of those that are held. It follows from the batches
    alone, so all ranks' graphs have launches for the same ones, however long each took to hold a version.
    """

    def __init__(
        self,
        driver: Driver,
        sites: Sequence[Site],
        rows: int,
        *,
        fp32: bool,
        stream: Handle,
        settle: Callable[[], None],
        shared: bool = False,
    ) -> None:
        """rows: the most of a step. stream: the steps'. settle: waits until no step runs. shared: the model is, with
        other ranks.
        """
        self.gets = shared
        self._got: list[Region] = []  # memory for the next version, of ranks that share a model
        self._lacking = ""  # why there is none, or no room at all
        self.driver = self._driver = driver
        self._sites, self._fp32, self._stream, self._settle = sites, fp32, stream, settle
        self.rows, self.element = max(rows, _SHARES * _FEW_ROWS), 4 if fp32 else 2
        self._room: _Room | None = None
        self._parts: dict[str, Any] = {}  # of the room, as far as it has come
        self._held: dict[int, _Held] = {}
        self._listed: tuple[object, Int32] | None = None  # the last step's rows, and `lists` of them
        self._steps = 0  # that had adapters
        self._lock = threading.Lock()  # what is held, and what of it follows
        self._places = list(range(MOST_VERSIONS))
        self.multiprocessors = driver.attribute(16)
        # Blocks of a product that adds adapters wait for each other. Beside those of another process, which have some
        # multiprocessors and wait for the rest, they would wait for ever.
        self._add_themselves = not fp32 and not driver.beside_others
        self._spare: dict[int, list[Region]] = {}  # addresses without memory, by size
        self._had: set[int] = set()  # epochs that steps have had
        self.touched: frozenset[int] = frozenset()

    @property
    def room(self) -> _Room:
        """What the first adapter has brought."""
        assert self._room is not None, "no adapter was ever planned"
        return self._room

    def start(self) -> None:
        """Ranks that share a model, at their start: make the room that the first adapter needs."""
        if not self.gets:
            return
        try:
            self._make_room()
        except (CudaError, OSError) as error:
            self._lacking = str(error)
            log.warning("this device can hold no adapters: %s", error)

    def plan(self, changes: Mapping[str, Factors]) -> object:
        """See LowRankMemory. Raises ValueError where the device cannot."""
        if self.gets and self._room is None:
            raise ValueError(f"this device can hold no adapters: {self._lacking}")
        try:
            self._make_room()
        except (CudaError, OSError) as error:
            raise ValueError(f"this device can hold no adapters: {error}") from error
        factors, touched = np.zeros(len(self._sites), FACTORS), set()
        for index, site in enumerate(self._sites):
            for part, module in enumerate(site.modules):
                if module in changes:
                    change, row = changes[module], factors[index]
                    row["a"][part], row["b"][part] = change.a.start, change.b.start
                    row["rank"][part], row["scale"][part] = change.a.shape[0], change.scale
                    touched.add(index)
        factors["ranks"] = factors["rank"].sum(axis=1)
        return _Plan(factors, frozenset(touched), -(-int(factors["ranks"].max()) // 4) * 4)

    def get(self, elements: int, itemsize: int) -> None:
        """Between steps: the memory of a version of so many elements, for `hold`, which says it if there is none."""
        self._driver.enter()
        self._settle()
        self._give_back_got()
        try:
            self._got.append(self._memory(elements * self.element))
            if itemsize != self.element:
                self._got.append(self._memory(elements * itemsize))
        except CudaError as error:
            self._lacking = str(error)

    def hold(self, epoch: int, plan: Any, flat: Array) -> None:
        """Copy a version, in the dtype that is computed with, and prove the copy. Raises ValueError where there is no
        room, or the device does not hold what was copied.
        """
        assert isinstance(plan, _Plan)
        self._driver.enter()
        if not self._places:
            raise ValueError(f"{MOST_VERSIONS} versions of adapters are held here, which is the most")
        try:
            memory = self._copied(flat)
        except CudaError as error:
            raise ValueError(str(error)) from error
        factors, place = plan.factors.copy(), self._places.pop()
        for name in ("a", "b"):
            factors[name] = factors[name] * np.uint64(self.element) + np.uint64(memory.address)
        try:
            self._driver.to_device(self.room.table + place * factors.nbytes, factors, self._own_stream)
            self._driver.wait(self._own_stream)
        except CudaError as error:
            self._places.append(place)
            self._let_go(memory)
            raise ValueError(str(error)) from error
        with self._lock:
            self._held[epoch] = _Held(memory, place, plan)

    def drop(self, epoch: int) -> None:
        """Give a version's memory back, once no step runs."""
        with self._lock:
            held = self._held.pop(epoch, None)
            self._had.discard(epoch)
            self._touch()
        if held is None and not self._got:
            return
        self._driver.enter()
        self._settle()
        self._give_back_got()
        if held is not None:
            self._give_back(held.memory)
            self._places.append(held.place)

    def lists(self, batch: ForwardBatch, rows: int) -> Int32 | None:
        """Which rows of a step of `rows` rows have which version, as kernels/adapters.cu reads it; None: none has any.

        Raises KeyError for a version that is not held.
        """
        if not batch.adapters.any():
            return None
        key = rows, batch.adapters.tobytes(), batch.query_lens.tobytes()
        listed = self._listed
        if listed is None or listed[0] != key:
            listed = key, self._list(batch, rows)
            with self._lock:
                if new := set(batch.adapters.tolist()) - self._had - {0}:
                    self._had |= new
                    self._touch()
                self._listed = listed
        self._steps += 1
        if (self._steps + 1) * len(self._sites) >= 1 << 32:  # tags have 32 bits: none of before may come again
            self._steps = 0
            self._clear_handed(self._stream)
        listed[1][2] = self._steps
        return listed[1]

    def _list(self, batch: ForwardBatch, rows: int) -> Int32:
        places = np.array([self._held[epoch].place if epoch else -1 for epoch in batch.adapters.tolist()], np.int32)
        of_tokens = np.repeat(places, batch.query_lens)
        order = np.argsort(of_tokens, kind="stable")
        _, firsts, counts = np.unique(of_tokens[order], return_index=True, return_counts=True)
        tiles = [
            (int(of_tokens[order[first]]), start, min(_TILE, first + count - start))
            for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)
            for start in range(first, first + count, _TILE)
        ]
        found: Int32 = np.zeros(words(rows), np.int32)
        found[0] = len(tiles)
        plans = [self._held[epoch].plan for epoch in set(batch.adapters.tolist()) if epoch]
        found[1] = max(plan.ranks for plan in plans)
        found[3] = max(int(plan.factors["rank"].max()) for plan in plans)
        found[4 : 4 + 3 * len(tiles)] = np.array(tiles, np.int32).reshape(-1)
        orders, of_rows = found[words(rows) - 2 * rows :][:rows], found[words(rows) - rows :]
        orders[: len(order)] = order
        of_rows[:] = -1
        for number, (_, start, count) in enumerate(tiles):
            of_rows[order[start : start + count]] = number
        self._tell_tiles([place for place, _, _ in tiles], rows)
        return found

    def _tell_tiles(self, places: Sequence[int], rows: int) -> None:
        """Where products of few rows find the factors of each tile's version, at all sites."""
        if not self._add_themselves or rows > SKINNY_ROWS[-1]:
            return
        room, nbytes = self.room, len(self._sites) * FACTORS.itemsize
        for number, place in enumerate(places):
            there = room.tiles + number * nbytes
            if place < 0:
                self._driver.fill(there, nbytes, 0, self._stream)
            else:
                self._driver.copy(there, room.table + place * nbytes, nbytes, self._stream)

    def _touch(self) -> None:
        self._listed = None
        self.touched = frozenset().union(*(self._held[epoch].plan.touched for epoch in self._had))

    def _copied(self, flat: Array) -> Region:
        """A version in memory of its own, proved."""
        memory = self._taken(flat.size * self.element)
        came = memory
        try:
            came = memory if flat.itemsize == self.element else self._taken(flat.nbytes)
            self._driver.to_device(came.address, flat, self._own_stream)
            self._prove(came.address, flat)
            if came is not memory:
                arguments = [U64(came.address), U64(memory.address), U64(flat.size)]
                blocks = min(-(-flat.size // 2048), 1024)
                self.room.kernels.launch("converted", (blocks,), 256, self._own_stream, arguments)
                self._driver.wait(self._own_stream)
        except BaseException:
            self._let_go(memory)
            raise
        finally:
            if came is not memory:
                self._let_go(came)
        return memory

    def _prove(self, address: int, flat: Array) -> None:
        """Raises ValueError unless the device has these bytes, by xxh3 of pieces."""
        piece = max(_HASHED, -(-flat.nbytes // _PIECES // 8) * 8)
        starts = np.arange(0, max(flat.nbytes - TINY, 1), piece)  # of more than TINY bytes each, or one of all
        ends = np.append(starts[1:], flat.nbytes)
        self._driver.wait(self._own_stream)
        count = len(starts)
        table, out, tiny = self._table[:count], self._out[:count], self._tiny[:count]
        table[:, 0], table[:, 1] = starts + address, ends - starts
        small = [0] if flat.nbytes <= TINY else []
        found = hashed(self._driver, self.room.hashes, self._own_stream, table, out, tiny, small)
        there = flat.view(np.uint8).data
        for start, end, digest in zip(starts.tolist(), ends.tolist(), found, strict=True):
            if xxhash.xxh3_64_intdigest(there[start:end]) != digest:
                raise ValueError(f"{self._driver.name} does not hold what was copied to it")

    def _taken(self, nbytes: int) -> Region:
        """Memory for `hold`: what `get` has got, where ranks share a model. Raises CudaError where there is none."""
        if not self.gets:
            return self._memory(nbytes)
        size = self._whole(nbytes)
        fits = [memory for memory in self._got if memory.nbytes == size]
        if not fits:
            raise CudaError(self._lacking or "no memory was got for this version of an adapter")
        self._got.remove(fits[0])
        return fits[0]

    def _let_go(self, memory: Region) -> None:
        """`hold` needs it no more."""
        if self.gets:
            self._got.append(memory)
        else:
            self._give_back(memory)

    def _give_back_got(self) -> None:
        self._lacking = ""
        while self._got:
            self._give_back(self._got.pop())

    def _whole(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // self._driver.page) * self._driver.page

    def _memory(self, nbytes: int) -> Region:
        size = self._whole(nbytes)
        spare = self._spare.setdefault(size, [])
        memory = spare.pop() if spare else Region(self._driver, size, "a version of an adapter")
        try:
            memory.fill()
        except CudaError:
            spare.append(memory)
            raise
        return memory

    def _give_back(self, memory: Region) -> None:
        memory.empty()
        self._spare[memory.nbytes].append(memory)

    def _make_room(self) -> None:
        if self._room is not None:
            return
        driver = self._driver
        driver.enter()
        once = self._once
        self._own_stream = once("stream", driver.stream)
        self._table = once("pieces", lambda: driver.pinned((_PIECES, 2), np.uint64))
        self._out = once("hashes", lambda: driver.pinned(_PIECES, np.uint64))
        self._tiny = once("tiny", lambda: driver.pinned((_PIECES, TINY), np.uint8))
        capability, products = driver.capability, self._products()
        text = "\n".join([kernels("base", "one_row", "skinny", "adapters"), *(kernel.line for kernel in products)])
        fp32 = {"FP32": int(self._fp32)}
        room = _Room(
            kernels=once("kernels", lambda: Module(driver, compiled(text, fp32, capability))),
            hashes=once("hash", lambda: Module(driver, compiled(SOURCE, {}, capability))),
            table=once("table", lambda: self._allocate(MOST_VERSIONS * len(self._sites) * FACTORS.itemsize)),
            between=once("between", lambda: self._allocate(4 * self.rows * MOST_RANKS)),
            squares=once("squares", lambda: self._allocate(4 * self.rows * _SHARES)),
            tiles=once("tiles", lambda: self._allocate(SKINNY_ROWS[-1] * len(self._sites) * FACTORS.itemsize)),
            handed=once("handed", lambda: self._allocate(_HANDED_BYTES)),
            beside=once("beside", lambda: driver.stream(urgent=True)),
            begun=once("begun", driver.event),
            done=once("done", driver.event),
        )
        for name in (*_KERNELS, "converted", *(kernel.name for kernel in products)):
            room.kernels.load(name)
        room.hashes.load("xxh3")
        self._require_right(room)
        self._room = room
        self._clear_handed(self._own_stream)
        driver.wait(self._own_stream)

    def _allocate(self, nbytes: int) -> int:
        return self._driver.allocate(nbytes, "adapters")

    def _clear_handed(self, stream: Handle) -> None:
        """Tags begin with 1."""
        self._driver.fill(self.room.handed, _HANDED_BYTES, 0, stream)

    def _once(self, what: str, make: Callable[[], Any]) -> Any:
        """A part of the room: they live as long as the process, so another try takes those that there are."""
        if what not in self._parts:
            self._parts[what] = make()
        return self._parts[what]

    def _require_right(self, room: _Room) -> None:
        """Raises CudaError where whole numbers, of which no sum is rounded, do not come out as they must."""
        rng = np.random.default_rng(0)
        x, a, b, y = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((16, 64), (8, 64), (64, 8), (16, 64)))
        lists = np.zeros(words(16), np.int32)
        lists[0], lists[4:7], lists[-32:-16] = 1, (0, 0, 16), np.arange(15, -1, -1)
        narrow = [v if self._fp32 else (v.view(np.uint32) >> 16).astype(np.uint16) for v in (x, a, b)]
        at, there = room.between + 4 * 16 * MOST_RANKS, []
        for array in (*narrow, y, lists):
            self._driver.to_device(at, array, self._own_stream)
            there.append(at)
            at += -(-array.nbytes // 256) * 256
        row = np.zeros(1, FACTORS)
        row["a"][0, 0], row["b"][0, 0], row["rank"][0, 0], row["scale"][0, 0], row["ranks"] = *there[1:3], 8, 2.0, 8
        self._driver.to_device(room.table, row, self._own_stream)
        of = U64(room.table), Int(0), Int(1), U64(there[4])
        sizes, none = (Int(16), Int(MOST_RANKS)), U64(0)
        shrink = U64(there[0]), none, *of, U64(room.between), U64(room.squares), *sizes, Int(64)
        expand = *of, U64(room.between), none, *sizes, Int(1), Int(64), Float(0.0), none, none, U64(there[3])
        room.kernels.launch("shrink_rows", (1, 1, 1), _THREADS, self._own_stream, shrink)
        room.kernels.launch("expand_ADD", (1, 1), _THREADS, self._own_stream, (*expand, Int(64), Int(0), Int(0)))
        found = self._table.reshape(-1).view(np.float32)[: y.size].reshape(y.shape)  # pinned, and free now
        self._driver.to_host(found, there[3], self._own_stream)
        self._driver.wait(self._own_stream)
        if not np.array_equal(found, y + 2 * (x @ a.T) @ b.T):
            raise CudaError(f"{self._driver.name} computes wrong")

    def _products(self) -> list[Skinny]:
        """Products of few rows that add adapters themselves, of every site."""
        found = (self.product(shape, rows) for shape in set(map(_shape, self._sites)) for rows in SKINNY_ROWS)
        return sorted({kernel for kernel in found if kernel is not None}, key=lambda kernel: kernel.name)

    def product(self, shape: Shape, rows: int) -> Skinny | None:
        """The kernel of such a product; None: A x and B (A x) are launches of their own."""
        return skinny(shape, rows, self.multiprocessors, changed=True) if self._add_themselves else None


def _shape(site: Site) -> Shape:
    """Of this site's product. Shared experts read what was normed for the others, too."""
    kind, parts = {1: ("ADD", 1), 2: ("GATE", 2), 3: ("STORE", 1)}[len(site.rows)]
    return Shape(kind, sum(site.rows) // parts, site.inputs, normed=kind != "ADD" and "shared_expert" not in site.name)


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
            (_tiles(step), _GRAPH_RANKS, shares),
            *(U64(x.address), U64(0 if x.norm is None else x.norm.address), *self._of(site, step)),
            *(U64(room.between), U64(room.squares), Int(step.rows), Int(step.ranks), Int(x.width)),
            stream=room.beside if step.fused else None,
        )
        if step.fused:
            driver.record(room.done, room.beside)

    def product(self, kind: str, site: int, weight: Tensor, x: "Rows", step: "StepInputs", y: int) -> bool:
        """The product itself and all that adapters add to it, of few rows; False: nothing was done."""
        held, (n, k), (n0, n1) = self._held, weight.shape, (*self._sites[site].rows, 0)[:2]
        shape = Shape(kind, n // 2 if kind == "GATE" else n, k, x.norm is not None)
        kernel = held.product(shape, step.rows) if step.rows <= SKINNY_ROWS[-1] else None
        if kernel is None:
            return False
        norm = U64(0 if x.norm is None else x.norm.address)
        makers = min(kernel.blocks, held.multiprocessors * 7 // 8) // kernel.split
        arguments = (
            *(U64(weight.address), U64(x.address), norm, U64(y), Int(shape.n), Int(step.rows), Float(self._eps)),
            *(U64(held.room.tiles), Int(site), Int(len(self._sites)), U64(step.adapters)),
            *(U64(held.room.handed), Int(n0), Int(n1), Int(makers)),
        )
        cluster = (kernel.split,) if kernel.split > 1 else ()
        held.room.kernels.launch(kernel.name, (kernel.blocks,), 256, self._stream, arguments, kernel.shared, cluster)
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
            (_tiles(step), sum(-(-n // _OUTPUTS) for n in blocks)),
            *(*self._of(site, step), U64(room.between), U64(0 if x.norm is None else room.squares)),
            *(Int(step.rows), Int(step.ranks), Int(self._shares(x.width, step)), Int(x.width), Float(self._eps)),
            *(U64(gate_up), U64(0 if bias is None else bias.address), U64(y), *(Int(n) for n in rows)),
        )

    def _shares(self, columns: int, step: "StepInputs") -> int:
        """Blocks that share the columns: each hides the waits of others, where there is room for the parts of sums."""
        fit = self._held.rows * MOST_RANKS // (step.rows * step.ranks)
        return max(1, min(_SHARES, -(-columns // _SHARE), fit))

    def _of(self, site: int, step: "StepInputs") -> tuple[Any, ...]:
        return U64(self._held.room.table), Int(site), Int(len(self._sites)), U64(step.adapters)

    def _launch(self, name: str, grid: tuple[int, ...], *arguments: Any, stream: Handle | None = None) -> None:
        self._held.room.kernels.launch(name, grid, _THREADS, stream or self._stream, arguments)


def words(rows: int) -> int:
    """Words of `DeviceAdapters.lists` for a step of so many rows."""
    return 4 + -(-3 * rows // 4) * 4 + 2 * rows


def _tiles(step: "StepInputs") -> int:
    return min(step.rows, _GRAPH_TILES + -(-step.rows // _TILE))

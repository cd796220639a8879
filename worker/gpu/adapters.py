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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from rollout_client.cuda_hash import SOURCE, TINY
from worker.engine.base import ForwardBatch, Int32
from worker.gpu.compiler import compiled, compiled_apart, kernels, spread
from worker.gpu.digests import hashed
from worker.gpu.driver import U64, CudaError, Driver, Handle, Module
from worker.gpu.memory import Region
from worker.gpu.products import SKINNY_ROWS, Shape, Skinny, skinny
from worker.models.packed_adapter import PARTS, Factors, Site

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
TILE = 16  # of kernels/adapters.cu
MOST_RANKS = 256 * PARTS
"""Ranks of all parts of one product, at most."""
SHARES = 4  # blocks that share the columns of x, at most
_HANDED_BYTES = 8 * SKINNY_ROWS[-1] * 8 * MOST_RANKS  # 8: SHARES of kernels/adapters.cu, at most
_FEW_ROWS = 512  # for which there is room at the most ranks and shares
_KERNELS = ("shrink_rows", "shrink_normed", "expand_STORE", "expand_ADD", "expand_GATE", "converted")
_PRODUCTS = ("follow", "base", "one_row", "skinny", "adapters", "low_rank")
"""Files of kernels/, in their order; instances of products follow."""
SOURCES = (*_PRODUCTS, "beside")
"""The same, and what is launched beside products."""
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
        check: "Callable[[DeviceAdapters], None]",
        shared: bool = False,
    ) -> None:
        """rows: the most of a step. stream: the steps'. settle: waits until no step runs. check: raises CudaError where
        the kernels do not compute what they must. shared: the model is, with other ranks.
        """
        self.gets = shared
        self._got: list[Region] = []  # memory for the next version, of ranks that share a model
        self._lacking = ""  # why there is none, or no room at all
        self.driver = self._driver = driver
        self.sites, self.fp32, self._stream, self._settle = sites, fp32, stream, settle
        self.rows, self.element = max(rows, SHARES * _FEW_ROWS), 4 if fp32 else 2
        self._check = check
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
    def between_bytes(self) -> int:
        """Room between A and B."""
        return 4 * self.rows * MOST_RANKS

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
        factors, touched = np.zeros(len(self.sites), FACTORS), set()
        for index, site in enumerate(self.sites):
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
            self._driver.to_device(self.room.table + place * factors.nbytes, factors, self.own_stream)
            self._driver.wait(self.own_stream)
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
        if (self._steps + 1) * len(self.sites) >= 1 << 32:  # tags have 32 bits: none of before may come again
            self._steps = 0
            self._clear_handed(self._stream)
        listed[1][2] = self._steps
        return listed[1]

    def _list(self, batch: ForwardBatch, rows: int) -> Int32:
        places = np.array([self._held[epoch].place if epoch else -1 for epoch in batch.adapters.tolist()], np.int32)
        plans = [self._held[epoch].plan for epoch in set(batch.adapters.tolist()) if epoch]
        found = listed(
            np.repeat(places, batch.query_lens),
            rows,
            max(plan.ranks for plan in plans),
            max(int(plan.factors["rank"].max()) for plan in plans),
        )
        self._tell_tiles(found[4 : 4 + 3 * found[0] : 3].tolist(), rows)
        return found

    def _tell_tiles(self, places: Sequence[int], rows: int) -> None:
        """Where products of few rows find the factors of each tile's version, at all sites."""
        if not self._add_themselves or rows > SKINNY_ROWS[-1]:
            return
        room, nbytes = self.room, len(self.sites) * FACTORS.itemsize
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
            self._driver.to_device(came.address, flat, self.own_stream)
            self._prove(came.address, flat)
            if came is not memory:
                self.convert(came.address, memory.address, flat.size)
                self._driver.wait(self.own_stream)
        except BaseException:
            self._let_go(memory)
            raise
        finally:
            if came is not memory:
                self._let_go(came)
        return memory

    def convert(self, came: int, into: int, elements: int) -> None:
        """Numbers of the dtype that is not computed with, in the one that is."""
        blocks = min(-(-elements // 2048), 1024)
        self.room.kernels.launch("converted", (blocks,), 256, self.own_stream, [U64(came), U64(into), U64(elements)])

    def _prove(self, address: int, flat: Array) -> None:
        """Raises ValueError unless the device has these bytes, by xxh3 of pieces."""
        piece = max(_HASHED, -(-flat.nbytes // _PIECES // 8) * 8)
        starts = np.arange(0, max(flat.nbytes - TINY, 1), piece)  # of more than TINY bytes each, or one of all
        ends = np.append(starts[1:], flat.nbytes)
        self._driver.wait(self.own_stream)
        count = len(starts)
        table, out, tiny = self._table[:count], self._out[:count], self._tiny[:count]
        table[:, 0], table[:, 1] = starts + address, ends - starts
        small = [0] if flat.nbytes <= TINY else []
        found = hashed(self._driver, self.room.hashes, self.own_stream, table, out, tiny, small)
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
        self.own_stream = once("stream", driver.stream)
        self._table = once("pieces", lambda: driver.pinned((_PIECES, 2), np.uint64))
        self._out = once("hashes", lambda: driver.pinned(_PIECES, np.uint64))
        self._tiny = once("tiny", lambda: driver.pinned((_PIECES, TINY), np.uint8))
        capability, products = driver.capability, self._products()
        texts = [kernels(*SOURCES), *spread(kernels(*_PRODUCTS), [kernel.line for kernel in products])]
        fp32 = {"FP32": int(self.fp32)}
        room = _Room(
            kernels=once("kernels", lambda: Module(driver, *compiled_apart(texts, fp32, capability))),
            hashes=once("hash", lambda: Module(driver, compiled(SOURCE, {}, capability))),
            table=once("table", lambda: self._allocate(MOST_VERSIONS * len(self.sites) * FACTORS.itemsize)),
            between=once("between", lambda: self._allocate(self.between_bytes)),
            squares=once("squares", lambda: self._allocate(4 * self.rows * SHARES)),
            tiles=once("tiles", lambda: self._allocate(SKINNY_ROWS[-1] * len(self.sites) * FACTORS.itemsize)),
            handed=once("handed", lambda: self._allocate(_HANDED_BYTES)),
            beside=once("beside", lambda: driver.stream(urgent=True)),
            begun=once("begun", driver.event),
            done=once("done", driver.event),
        )
        for name in (*_KERNELS, *(kernel.name for kernel in products)):
            room.kernels.load(name)
        room.hashes.load("xxh3")
        self._room = room
        try:
            self._clear_handed(self.own_stream)
            self._check(self)
            self._clear_handed(self.own_stream)
            driver.wait(self.own_stream)
        except BaseException:
            self._room = None
            raise

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

    def _products(self) -> list[Skinny]:
        """Products of few rows that add adapters themselves, of every site."""
        found = (self.product(shape, rows) for shape in set(map(shape_of, self.sites)) for rows in SKINNY_ROWS)
        return sorted({kernel for kernel in found if kernel is not None}, key=lambda kernel: kernel.name)

    def product(self, shape: Shape, rows: int) -> Skinny | None:
        """The kernel of such a product; None: A x and B (A x) are launches of their own."""
        return skinny(shape, rows, self.multiprocessors, changed=True) if self._add_themselves else None


def shape_of(site: Site) -> Shape:
    """Of this site's product. Shared experts read what was normed for the others, too."""
    kind, parts = {1: ("ADD", 1), 2: ("GATE", 2), 3: ("STORE", 1)}[len(site.rows)]
    return Shape(kind, sum(site.rows) // parts, site.inputs, normed=kind != "ADD" and "shared_expert" not in site.name)


def listed(places: Int32, rows: int, ranks: int, most: int) -> Int32:
    """`lists` of kernels/adapters.cu for a step of `rows` rows. places: of each row that is somebody's. ranks: of a
    version in one product, the most; most: of one linear.
    """
    order = np.argsort(places, kind="stable")
    _, firsts, counts = np.unique(places[order], return_index=True, return_counts=True)
    tiles = [
        (int(places[order[first]]), start, min(TILE, first + count - start))
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)
        for start in range(first, first + count, TILE)
    ]
    found: Int32 = np.zeros(words(rows), np.int32)
    found[0], found[1], found[3] = len(tiles), ranks, most
    found[4 : 4 + 3 * len(tiles)] = np.array(tiles, np.int32).reshape(-1)
    orders, of_rows = found[words(rows) - 2 * rows :][:rows], found[words(rows) - rows :]
    orders[: len(order)] = order
    of_rows[:] = -1
    for number, (_, start, count) in enumerate(tiles):
        of_rows[order[start : start + count]] = number
    return found


def words(rows: int) -> int:
    """Words of `DeviceAdapters.lists` for a step of so many rows."""
    return 4 + -(-3 * rows // 4) * 4 + 2 * rows

"""Adapters on a device: their memory, the numbers of a step, and the kernels, which run here as the host's C++.

The driver is a stand-in with the host's memory. The kernels are worker/gpu/kernels/adapters.cu and skinny.cu, over
host_cuda.h in place of base.cu: what the tensor cores and the shuffles of a warp do is written there in words of C.
"""

import ctypes
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from rollout_client.cuda_hash import TINY
from tests.engine_cases import in_one_array, to_bits
from weight_manager.adapters.plan import AdapterModule
from worker.adapters import AdapterTable
from worker.engine.base import ForwardBatch
from worker.gpu import adapters
from worker.gpu import products as products_
from worker.gpu.adapter_check import require_right
from worker.gpu.adapters import MOST_RANKS, DeviceAdapters, words
from worker.gpu.changes import Changes
from worker.gpu.compiler import kernels
from worker.gpu.driver import CudaError, DeviceMemoryError
from worker.gpu.operations import Rows
from worker.gpu.reference import widened
from worker.gpu.weights import Tensor
from worker.models.packed_adapter import Site

pytestmark = pytest.mark.timeout(240)
"""Compilers run within it, and threads by the thousand are fibers of one, beside whatever else runs."""
HERE = __file__.rsplit("/", 1)[0]
SITES = (
    Site("qkv", ("q", "k", "v"), 520, (64, 16, 16)),
    Site("o", ("o",), 64, (72,)),
    Site("gate_up", ("gate", "up"), 72, (264, 264)),
    Site("down", ("down",), 1032, (72,)),
)
EVEN = (
    Site("qkv", ("q", "k", "v"), 192, (56, 24, 16)),
    Site("o", ("o",), 64, (72,)),
    Site("gate_up", ("gate", "up"), 576, (136, 136)),
    Site("down", ("down",), 1088, (72,)),
)
"""Of columns that the products of few rows take."""
NORMED = {"qkv", "gate_up"}
EPS = 1e-5
_Int, _Pointer = ctypes.c_int, ctypes.c_void_p


class HostDriver:
    """Device memory is the host's; `free` bytes of it are there."""

    capability, page, name, beside_others = (9, 0), 4096, "a device", False

    def attribute(self, which):
        return self.multiprocessors

    def __init__(self):
        self.multiprocessors = 132
        self.memory, self.mapped, self.spoiled, self.free = {}, {}, None, 1 << 40

    def enter(self): ...
    def stream(self, *, urgent=False): ...
    def event(self): ...
    def record(self, event, stream): ...
    def wait_event(self, stream, event): ...
    def wait(self, stream): ...

    def pinned(self, shape, dtype):
        return np.full(shape, 0xAA, dtype)

    def allocate(self, nbytes, what):
        return self.reserve(nbytes)

    def reserve(self, nbytes):
        memory = np.full(nbytes + 256, 0xFF, np.uint8)  # no numbers
        address = -(-memory.ctypes.data // 256) * 256
        self.memory[address] = memory
        return address

    def fill(self, address, nbytes, byte, stream):
        ctypes.memset(address, byte, nbytes)

    def copy(self, address, source, nbytes, stream):
        ctypes.memmove(address, source, nbytes)

    def create(self, nbytes, *, shared=False):
        if nbytes > self.free:
            raise DeviceMemoryError("no room")
        return nbytes

    def no_room(self, nbytes, what):
        return DeviceMemoryError(f"no room for {what}")

    def map(self, address, nbytes, handle):
        self.mapped[address] = nbytes

    def unmap(self, address, nbytes, handle):
        del self.mapped[address]

    def to_host(self, target, address, stream):
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def to_device(self, address, source, stream, nbytes=None):
        ctypes.memmove(address, source.ctypes.data, source.nbytes)
        if self.spoiled is not None and source.nbytes > 1 << 12:
            (ctypes.c_ubyte * source.nbytes).from_address(address)[self.spoiled] ^= 1


class HostModule:
    """Stands for compiled kernels: those of adapters.cu by g++, the hash by the host's."""

    library = None  # what g++ made

    def __init__(self, driver, image):
        self.hashes = image == b"hashes"

    def load(self, name): ...

    def launch(self, name, grid, threads, stream, arguments, shared=0, cluster=()):
        grid, together = (_Int * 3)(*(*grid, 1, 1)[:3]), _Int(cluster[0] if cluster else 1)
        if self.hashes:
            self._hash(grid[0], *(argument.value for argument in arguments))
        elif name.startswith("shrink"):
            self.library.run_shrink(grid, threads, _Int(name == "shrink_normed"), *arguments)
        elif name.startswith("expand"):
            self.library.run_expand(grid, threads, _Int(["STORE", "ADD", "GATE"].index(name[7:])), *arguments)
        elif name.startswith("skinny"):
            size = ctypes.c_uint64(4 * arguments[4].value * arguments[5].value)
            self.library.run_product(
                grid, threads, together, size, _Pointer.in_dll(self.library, name + "_at"), *arguments
            )
        else:
            self.library.run_converted(grid, threads, *arguments)

    @staticmethod
    def _hash(count, table, out, tiny):
        rows = np.frombuffer((ctypes.c_ubyte * (16 * count)).from_address(table), np.uint64).reshape(-1, 2).tolist()
        found = np.frombuffer((ctypes.c_ubyte * (8 * count)).from_address(out), np.uint64)
        for row, (address, nbytes) in enumerate(rows):
            if nbytes > TINY:
                found[row] = xxhash.xxh3_64_intdigest((ctypes.c_ubyte * nbytes).from_address(address))
            else:
                ctypes.memmove(tiny + row * TINY, address, nbytes)


def _library(folder, name, text, fp32):
    (folder / f"{name}.cpp").write_text(f'#include "{HERE}/host_cuda.h"\n{text}\n#include "{HERE}/host_adapters.h"\n')
    options = ["-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w", f"-DFP32={int(fp32)}"]
    subprocess.run(["g++", *options, str(folder / f"{name}.cpp"), "-o", str(folder / f"{name}.so")], check=True)
    return ctypes.CDLL(str(folder / f"{name}.so"))


def _text(products=()):
    """Of the kernels. A launch's shared memory is the stand-in's own."""
    text = kernels("skinny", "adapters", "low_rank", "beside").replace(
        "extern __shared__ __align__(128) uint4 operands[];", ""
    )
    some = "SKINNY_CHANGED(a_product, 8, 64, 1, 1, ADD, false)"
    addresses = [f'extern "C" void *const {kernel.name}_at = (void *){kernel.name};' for kernel in products]
    return "\n".join([text, "#if !FP32", some, "#endif", *(kernel.line for kernel in products), *addresses])


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The kernels for bfloat16 and for float32."""
    folder = tmp_path_factory.mktemp("kernels")
    held = DeviceAdapters(HostDriver(), SITES, 64, fp32=False, stream=None, settle=lambda: None, check=unchecked)
    assert held._products()
    return [_library(folder, "0", _text(held._products()), fp32=False), _library(folder, "1", _text(), fp32=True)]


@pytest.fixture
def device(monkeypatch, libraries):
    """(driver, adapters) of a dtype."""
    monkeypatch.setattr(adapters, "Module", HostModule)
    monkeypatch.setattr(adapters, "compiled", lambda *_: b"hashes")
    monkeypatch.setattr(adapters, "compiled_apart", lambda *_: [b"kernels"])

    def make(dtype, settle=lambda: None, check=unchecked):
        monkeypatch.setattr(HostModule, "library", libraries[dtype == "float32"])
        driver = HostDriver()
        return driver, DeviceAdapters(
            driver, SITES, 64, fp32=dtype == "float32", stream=None, settle=settle, check=check
        )

    return make


def unchecked(held):
    """In the place of `require_right`, which takes seconds here."""


class Version:
    """An adapter of these modules. numbers: its A, B and scale, as they come, in float32."""

    def __init__(self, seed, ranks, dtype, sites=SITES):
        rng = np.random.default_rng(seed)
        self.dtype, self.numbers, views, self.modules = dtype, {}, {}, []
        for site in sites:
            for module, rows in zip(site.modules, site.rows, strict=True):
                if module not in ranks:
                    continue
                rank, scale = ranks[module], float(rng.uniform(0.5, 2))
                a = rng.standard_normal((rank, site.inputs), np.float32) / np.float32(np.sqrt(site.inputs))
                b = rng.standard_normal((rows, rank), np.float32)
                a, b = (x if dtype == "float32" else to_bits(x) for x in (a, b))
                views |= {f"{module}.lora_A": a, f"{module}.lora_B": b}
                self.numbers[module] = widened(a), widened(b), scale
                self.modules.append(AdapterModule(module, rank, scale))
        self.extents, self.flat = in_one_array(views)

    def into(self, held, epoch, sites=SITES):
        table = AdapterTable(sites, held)
        table.hold(epoch, table.plan("a", self.extents, self.modules, self.dtype), self.flat)


def _batch(epochs, lengths):
    tokens, none = sum(lengths), np.zeros(0, np.int32)
    return ForwardBatch(
        *(np.zeros(tokens, np.int32) for _ in range(3)),
        np.array(lengths, np.int32),
        np.array(lengths, np.int32),
        np.zeros((len(lengths), 1), np.int32),
        none,
        np.zeros((0, 2), np.int32),
        adapters=np.array(epochs, np.int32),
    )


def _bits(x, dtype):
    return np.ascontiguousarray(x, np.float32) if dtype == "float32" else to_bits(np.ascontiguousarray(x, np.float32))


def _changed(held, site, x, norm, lists, rows, y, gate_up=None, bias=None, ranks=0):
    """What `Changes` makes of y at one site; all arrays are the device's, so the host's."""
    at = [s.name for s in SITES].index(site.name)
    changes = Changes(held, SITES, {4096: at}, None, EPS)
    assert changes.site(Tensor(4096, (1, 1))) == at
    weight = None if norm is None else Tensor(norm.ctypes.data, norm.shape)
    source, step = (
        Rows(x.ctypes.data, x.shape[1], weight),
        SimpleNamespace(rows=rows, adapters=lists.ctypes.data, ranks=ranks or int(lists[1]), fused=bool(ranks)),
    )
    changes.shrink(at, source, step)
    kind = {"qkv": "STORE", "gate_up": "GATE"}.get(site.name, "ADD")
    into = () if gate_up is None else (gate_up.ctypes.data, Tensor(bias.ctypes.data, bias.shape))
    changes.expand(kind, at, source, step, y.ctypes.data, *into)


RANKS = {"q": 5, "k": 16, "v": 3, "o": 20, "gate": 8, "up": 33, "down": 256}


@pytest.mark.parametrize("ranks", [0, MOST_RANKS], ids=["launched", "graph"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_every_product_of_a_mixed_step(device, dtype, site, ranks):
    """Ranks that fill no tile; versions that change some of the parts, or not this product at all; rows of the base."""
    _, held = device(dtype)
    wide = dtype == "float32"
    versions = {
        3: Version(3, RANKS, dtype),
        4: Version(4, {"q": 1, "up": 2, "down": 7}, "bfloat16" if wide else "float32"),
        9: Version(9, {"v": 17, "o": 1}, dtype),
    }
    for epoch, version in versions.items():
        version.into(held, epoch)
    epochs, lengths, rows = [4, 0, 3, 9, 3, 0], [1, 2, 18, 1, 3, 1], 32
    of_rows, count = np.repeat(epochs, lengths), sum(lengths)
    lists = held.lists(_batch(epochs, lengths), rows)
    rng = np.random.default_rng(0)
    x = _bits(3 * rng.standard_normal((rows, site.inputs)), "float32" if site.name in NORMED else dtype)
    norm = _bits(1 + 0.1 * rng.standard_normal(site.inputs), dtype) if site.name in NORMED else None
    h = widened(x).astype(np.float64)
    if norm is not None:
        h = h / np.sqrt((h**2).mean(axis=1, keepdims=True) + EPS) * widened(norm)
    added = np.zeros((rows, sum(site.rows)))
    for t, epoch in enumerate(of_rows):
        start = 0
        for module, n in zip(site.modules, site.rows, strict=True):
            if epoch and module in versions[epoch].numbers:
                a, b, scale = versions[epoch].numbers[module]
                if not wide:
                    a, b = widened(to_bits(a)), widened(to_bits(b))
                added[t, start : start + n] = scale * (b @ (a @ h[t]))
            start += n
    before = rng.standard_normal((rows, sum(site.rows)))
    close = 1e-5 if wide else 0.02
    if site.name == "gate_up":
        bias = _bits(rng.standard_normal(2 * site.rows[0]), dtype)
        there = _bits(before, dtype)
        y = _bits(np.full((rows, site.rows[0]), 7.0), dtype)
        _changed(held, site, x, norm, lists, rows, y, there, bias, ranks=ranks)
        gate, up = np.split(widened(there).astype(np.float64) + widened(bias) + added, 2, axis=1)
        expected = gate / (1 + np.exp(-gate)) * up
        assert (widened(y)[count:] == 7).all(), "rows that are nobody's"
    else:
        y = _bits(before, dtype if site.name == "qkv" else "float32")
        expected = widened(y).astype(np.float64) + added
        was = y.copy()
        _changed(held, site, x, norm, lists, rows, y, ranks=ranks)
        same = np.ones(rows, np.bool_)
        same[:count] = [not epoch or not set(versions[epoch].numbers) & set(site.modules) for epoch in of_rows]
        assert 5 <= same.sum() < rows - 15
        np.testing.assert_array_equal(y[same], was[same])
    found = widened(y)[:count]
    error = np.linalg.norm(found - expected[:count], axis=1) / np.linalg.norm(expected[:count], axis=1)
    assert error.max() < close, error
    assert np.linalg.norm(added[:count], axis=1).max() > 1


DEVICES = {"many": (132, (1,)), "few": (2, (1,)), "clusters": (18, (3, 1))}
"""Multiprocessors, and by how many blocks products' columns are shared where they can be: about one output a block, so
that many make a part of A x each; many; and clusters, with outputs of two linears in a block.
"""


def _as_device(patch, name):
    multiprocessors, splits = DEVICES[name]
    patch.setattr(products_, "_SKINNY", dict.fromkeys((1, 16, 32), splits))
    patch.setattr(products_, "SKINNY_ROWS", (1, 16, 32))
    patch.setattr(adapters, "SKINNY_ROWS", (1, 16, 32))
    return multiprocessors


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """By device: the kernels of products that add adapters."""
    found = {}
    for name in DEVICES:
        driver = HostDriver()
        with pytest.MonkeyPatch.context() as patch:
            driver.multiprocessors = _as_device(patch, name)
            held = DeviceAdapters(driver, EVEN, 64, fp32=False, stream=None, settle=lambda: None, check=unchecked)
            kernels_ = held._products()
        assert len(kernels_) == 12
        assert any(kernel.split > 1 for kernel in kernels_) == (name == "clusters")
        found[name] = _library(tmp_path_factory.mktemp("products"), name, _text(kernels_), fp32=False)
    return found


ROWS = {
    "one row": [3],
    "many ranks": [4, 0, 3, 9, 3, 0, 4],
    "two": [3] * 9 + [0] + [9] * 4,
    "sixteen": list(range(3, 19)),
    "one adapter": [0, 6, 6, 0, *[6] * 7],
    "one adapter, two tiles": [6] * 20 + [0] * 3,
    "one adapter, one row": [6],
}
"""Versions of a step's rows."""


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("site", EVEN, ids=lambda site: site.name)
@pytest.mark.parametrize("case", ROWS)
def test_products_of_few_rows_add_adapters_themselves(device, products, monkeypatch, case, site, name):
    """One block makes all of A x, or many a part each; blocks with outputs of two parts; ranks that fill no tile."""
    _, held = device("bfloat16")
    epochs = ROWS[case]
    monkeypatch.setattr(HostModule, "library", products[name])
    held.sites, held.multiprocessors = EVEN, _as_device(monkeypatch, name)
    ranks = {
        3: RANKS,
        4: {"q": 1, "up": 2, "down": 7},
        6: {"q": 5, "v": 16, "o": 16, "gate": 3, "up": 8, "down": 8},
        9: {"v": 17, "o": 1},
    }
    versions = {
        epoch: Version(epoch, ranks.get(epoch, dict.fromkeys(RANKS, 8)), "bfloat16", EVEN) for epoch in {*epochs} - {0}
    }
    for epoch, version in versions.items():
        version.into(held, epoch, EVEN)
    rng, rows = np.random.default_rng(0), len(epochs) + (len(epochs) == 14)  # 14: and one that is nobody's
    kind, normed = {"qkv": "STORE", "gate_up": "GATE"}.get(site.name, "ADD"), site.name in NORMED
    x = _bits(3 * rng.standard_normal((rows, site.inputs)), "float32" if normed else "bfloat16")
    norm = _bits(1 + 0.1 * rng.standard_normal(site.inputs), "bfloat16") if normed else None
    weight = to_bits(rng.standard_normal((sum(site.rows), site.inputs), np.float32) / np.float32(np.sqrt(site.inputs)))
    h = widened(x).astype(np.float64)
    if normed:
        h = h / np.sqrt((h**2).mean(axis=1, keepdims=True) + EPS) * widened(norm)
    expected = h @ widened(weight).T
    for t, epoch in enumerate(epochs):
        start = 0
        for module, n in zip(site.modules, site.rows, strict=True):
            if epoch and module in versions[epoch].numbers:
                a, b, scale = versions[epoch].numbers[module]
                expected[t, start : start + n] += scale * (b @ (a @ h[t]))
            start += n
    if kind == "GATE":
        gate, up = np.split(expected, 2, axis=1)
        expected = gate / (1 + np.exp(-gate)) * up
    y = _bits(rng.standard_normal(expected.shape), "float32" if kind == "ADD" else "bfloat16")
    expected += widened(y) if kind == "ADD" else 0
    at = EVEN.index(site)
    changes = Changes(held, EVEN, {4096: at}, None, EPS)
    source = Rows(x.ctypes.data, x.shape[1], None if norm is None else Tensor(norm.ctypes.data, norm.shape))
    lists = held.lists(_batch(epochs, [1] * len(epochs)), rows)
    step = SimpleNamespace(rows=rows, adapters=lists.ctypes.data, ranks=MOST_RANKS)
    assert changes.product(kind, at, Tensor(weight.ctypes.data, weight.shape), source, step, y.ctypes.data)
    error = np.linalg.norm(widened(y) - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() < 0.01, error


def test_blocks_do_not_wait_for_each_other_where_another_process_may_have_their_places(monkeypatch):
    monkeypatch.setattr(HostDriver, "beside_others", True)
    held = DeviceAdapters(HostDriver(), EVEN, 64, fp32=False, stream=None, settle=lambda: None, check=unchecked)
    assert held._products() == []
    step, source = SimpleNamespace(rows=4), Rows(0, 64)
    assert not Changes(held, EVEN, {}, None, EPS).product("ADD", 1, Tensor(0, (72, 64)), source, step, 0)


def test_no_step_hands_over_under_a_tag_that_was_there_before(device):
    """A tag has 32 bits and names a step and a site: before numbers come again, all that was handed over is cleared."""
    _, held = device("bfloat16")
    Version(1, {"o": 1}, "bfloat16").into(held, 1)
    there = (ctypes.c_ubyte * 4096).from_address(held.room.handed)
    sites, seen = len(held.sites), []
    held._steps = (1 << 32) // sites - 4
    for _ in range(6):
        there[:] = b"\xff" * len(there)
        step = int(held.lists(_batch([1], [1]), 1)[2])
        seen.append((step, bytes(there).count(0)))
        assert step * sites + sites < 1 << 32
    numbers, cleared = zip(*seen, strict=True)
    assert numbers == (*range(numbers[0], numbers[0] + 2), 0, 1, 2, 3)
    assert cleared == (0, 0, len(there), 0, 0, 0)


def test_more_tiles_than_a_launch_has_blocks_for(device):
    _, held = device("bfloat16")
    versions = [Version(seed, {"o": 16}, "bfloat16") for seed in range(20)]
    for epoch, version in enumerate(versions, 1):
        version.into(held, epoch)
    rows, site = 24, SITES[1]
    epochs = [1 + i % 20 for i in range(rows)]
    lists = held.lists(_batch(epochs, [1] * rows), rows)
    assert lists[0] == 20
    rng = np.random.default_rng(0)
    x, y = to_bits(rng.standard_normal((rows, 64), np.float32)), np.zeros((rows, 72), np.float32)
    _changed(held, site, x, None, lists, rows, y)
    for t, epoch in enumerate(epochs):
        a, b, scale = versions[epoch - 1].numbers["o"]
        expected = scale * (b @ (a @ widened(x)[t]))
        np.testing.assert_allclose(y[t], expected, atol=1e-3, rtol=1e-3)


def test_a_step_without_adapters_is_none_and_one_with_a_version_that_is_not_held_is_an_error(device):
    _, held = device("bfloat16")
    assert held.lists(_batch([], [1, 2]), 4) is None
    assert held.lists(_batch([0, 0], [1, 2]), 4) is None
    with pytest.raises(KeyError):
        held.lists(_batch([0, 8], [1, 2]), 4)


def test_rows_are_sorted_into_tiles_of_one_version(device):
    _, held = device("bfloat16")
    for epoch in (5, 6):
        Version(epoch, {"o": 1}, "bfloat16").into(held, epoch)
    lists = held.lists(_batch([6, 0, 5, 6], [1, 1, 20, 2]), 32)
    assert len(lists) == words(32)
    first, second = (held._held[epoch].place for epoch in (5, 6))
    tiles = lists[4 : 4 + 3 * lists[0]].reshape(-1, 3).tolist()
    parts = {-1: [1], first: list(range(2, 22)), second: [0, 22, 23]}
    order, expected, at = lists[4 + 96 : 4 + 96 + 32].tolist(), [], 0
    for place in sorted(parts):
        assert order[at : at + len(parts[place])] == parts[place]
        starts = range(0, len(parts[place]), 16)
        expected += [[place, at + start, min(16, len(parts[place]) - start)] for start in starts]
        at += len(parts[place])
    assert tiles == expected
    tiles_of_rows = [-1] * 32
    for number, (_, start, count) in enumerate(tiles):
        for row in order[start : start + count]:
            tiles_of_rows[row] = number
    assert lists[4 + 96 + 32 :].tolist() == tiles_of_rows
    assert lists[1] == 4
    assert lists[3] == 1


def test_rows_are_looked_at_anew_when_they_or_what_is_held_are_others(device):
    _, held = device("bfloat16")
    for epoch in (5, 6):
        Version(epoch, {"o": epoch}, "bfloat16").into(held, epoch)
    first = held.lists(_batch([5, 6], [1, 1]), 4)
    count = int(first[2])
    assert held.lists(_batch([5, 6], [1, 1]), 4) is first
    assert first[2] == count + 1, "no two steps have the same tag"
    for batch, rows in ((_batch([6, 5], [1, 1]), 4), (_batch([5, 6], [1, 2]), 4), (_batch([5, 6], [1, 1]), 8)):
        other = held.lists(batch, rows)
        assert other is not first
        assert not np.array_equal(other[: len(first)], first)
    held.lists(_batch([5, 6], [1, 1]), 4)
    held.drop(6)
    with pytest.raises(KeyError):
        held.lists(_batch([5, 6], [1, 1]), 4)
    Version(7, {"o": 7}, "bfloat16").into(held, 6)  # in its place
    assert held.lists(_batch([5, 6], [1, 1]), 4)[1] == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_given_back_once_no_step_runs(device, dtype):
    waits = []
    driver, held = device("bfloat16", lambda: waits.append(len(driver.mapped)))
    version = Version(1, RANKS, dtype)
    for epoch in range(1, 4):
        version.into(held, epoch)
    assert len(driver.mapped) == 3, "and what was only on its way is gone"
    addresses = set(driver.mapped)
    held.drop(2)
    held.drop(2)
    assert waits == [3], "before it goes"
    assert len(driver.mapped) == 2
    version.into(held, 4)
    assert set(driver.mapped) == addresses
    assert not held.touched, "no step has had one"
    held.lists(_batch([0, 4], [1, 1]), 4)
    assert held.touched == {0, 1, 2, 3}
    for epoch in (1, 3, 4):
        held.drop(epoch)
    assert not driver.mapped
    assert not held.touched
    assert len(held._places) == adapters.MOST_VERSIONS


def test_a_copy_that_did_not_arrive_is_refused_and_leaves_nothing(device):
    driver, held = device("bfloat16")
    version = Version(1, RANKS, "float32")
    for at in (0, 5000, version.flat.nbytes - 1):
        driver.spoiled = at
        with pytest.raises(ValueError, match="a device does not hold what was copied to it"):
            version.into(held, 1)
        assert not driver.mapped
    driver.spoiled = None
    version.into(held, 1)


def test_no_room_is_said_in_words(device, monkeypatch):
    driver, held = device("bfloat16")
    version = Version(1, RANKS, "bfloat16")
    driver.free = 1 << 12
    with pytest.raises(ValueError, match="no room for a version of an adapter"):
        version.into(held, 1)
    addresses = set(driver.memory)
    with pytest.raises(ValueError, match="no room"):
        version.into(held, 1)
    assert set(driver.memory) == addresses, "they are used again"
    driver.free = 1 << 40
    version.into(held, 1)
    held._places.clear()
    with pytest.raises(ValueError, match="256 versions of adapters are held here, which is the most"):
        version.into(held, 2)

    def no_compiler(*_):
        raise CudaError("NVRTC: gone")

    _, other = device("bfloat16")
    monkeypatch.setattr(adapters, "compiled_apart", no_compiler)
    with pytest.raises(ValueError, match="this device can hold no adapters: NVRTC: gone"):
        version.into(other, 1)


def test_room_that_cannot_be_made_is_not_taken_again_at_each_try(device, monkeypatch):
    """What is live is tried again every two seconds, and none of this is ever freed."""
    driver, held = device("bfloat16")
    made, full = [], True

    def counted(make):
        def call(*args, **named):
            if full and len(made) == most:
                raise DeviceMemoryError("no room")
            made.append(make)
            return make(*args, **named)

        return call

    for name in ("stream", "pinned", "allocate"):
        setattr(driver, name, counted(getattr(driver, name)))
    monkeypatch.setattr(adapters, "Module", counted(HostModule))
    for most in range(12):  # two streams, three pinned arrays, two modules, five pieces of the device
        for _ in range(2):
            with pytest.raises(ValueError, match="this device can hold no adapters: no room"):
                Version(1, RANKS, "bfloat16").into(held, 1)
            assert len(made) == most
    full = False
    Version(1, RANKS, "bfloat16").into(held, 1)
    assert len(made) == 12


def test_a_version_whose_row_does_not_arrive_leaves_nothing(device, monkeypatch):
    driver, held = device("bfloat16")
    Version(1, RANKS, "bfloat16").into(held, 1)
    copy, there = driver.to_device, set(driver.mapped)

    def to_device(address, source, *args):
        if source.dtype == adapters.FACTORS:
            raise CudaError("cuMemcpyHtoDAsync_v2: gone")
        copy(address, source, *args)

    with monkeypatch.context() as broken:
        broken.setattr(driver, "to_device", to_device)
        for _ in range(2):
            with pytest.raises(ValueError, match="cuMemcpyHtoDAsync_v2: gone"):
                Version(2, RANKS, "bfloat16").into(held, 2)
    assert set(driver.mapped) == there
    assert len(held._places) == adapters.MOST_VERSIONS - 1


@pytest.mark.parametrize(
    ("rows", "ranks", "columns", "shares"),
    [
        *((16, MOST_RANKS, 72, 1), (16, MOST_RANKS, 1024, 4), (512, MOST_RANKS, 3072, 4), (8192, 48, 3072, 4)),
        *((1024, MOST_RANKS, 3072, 2), (4096, MOST_RANKS, 3072, 1), (8192, MOST_RANKS, 3072, 1)),
    ],
)
def test_blocks_share_columns_as_far_as_their_sums_have_room(device, rows, ranks, columns, shares):
    _, held = device("bfloat16")
    held.rows = max(rows, held.rows)
    found = Changes(held, SITES, {}, None, EPS)._shares(columns, SimpleNamespace(rows=rows, ranks=ranks))
    assert found == shares
    assert found * rows * ranks <= held.rows * MOST_RANKS


KERNELS = ["shrink_rows", "shrink_normed", "expand_STORE", "expand_ADD", "expand_GATE", "converted"]
OF_BFLOAT16 = [*(f"skinny_ADD_72_64_1_{most}_changed" for most in (1, 8, 16, 32))]


@pytest.mark.parametrize(
    ("dtype", "kernel"), [*(("float32", k) for k in KERNELS), *(("bfloat16", k) for k in [*KERNELS, *OF_BFLOAT16])]
)
def test_a_device_one_of_whose_kernels_does_nothing_holds_no_adapters(device, monkeypatch, dtype, kernel):
    _, held = device(dtype, check=require_right)
    held.sites = SITES[1:2]
    launch = HostModule.launch
    monkeypatch.setattr(
        HostModule, "launch", lambda self, name, *a, **b: None if name == kernel else launch(self, name, *a, **b)
    )
    said = kernel if kernel in OF_BFLOAT16 or "shrink" not in kernel else "shrink or expand"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"this device can hold no adapters: a device computes wrong: .*{said}"):
            Version(1, {"o": 4}, "bfloat16", SITES[1:2]).into(held, 1, SITES[1:2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_device_that_computes_right_holds_adapters(device, dtype):
    _, held = device(dtype, check=require_right)
    held.sites = SITES[1:2]
    Version(1, {"o": 4}, "bfloat16", SITES[1:2]).into(held, 1, SITES[1:2])
    there = (ctypes.c_ubyte * 4096).from_address(held.room.handed)
    assert not any(there), "no tag of a trial is left"


def test_a_product_that_nothing_held_changes_has_no_launches(device):
    _, held = device("bfloat16")
    Version(1, {"q": 2}, "bfloat16").into(held, 1)
    changes = Changes(held, SITES, {4096: 0, 8192: 1}, None, EPS)
    assert changes.site(Tensor(4096, (1, 1))) is None, "no step has had it"
    held.lists(_batch([1], [1]), 1)
    assert changes.site(Tensor(4096, (1, 1))) == 0
    assert changes.site(Tensor(8192, (1, 1))) is None
    assert changes.site(Tensor(5000, (1, 1))) is None

"""Device memory filled from a torch trainer's, a process of its own; its digest, computed where it lies."""

import json
import mmap
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, rank_views, region_digests, version_digest
from weight_manager.messages import Live
from worker.gpu.digests import DeviceDigests
from worker.gpu.filling import Filling
from worker.gpu.trainer_memory import Puller
from worker.gpu.weights import DeviceSlots, placement

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],  # biases of a few bytes, some of them on no word's boundary
    "hidden_size": 40,
    "intermediate_size": 1000,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 320_000,  # over a piece of a digest
}


class Version:
    def __init__(self, layout, number):
        self.bytes = np.frombuffer(mmap.mmap(-1, layout.slot_bytes), np.uint8)
        self.bytes[:] = np.random.default_rng(number).integers(0, 256, layout.slot_bytes, np.uint8)
        self.views = rank_views(layout, 0, self.bytes)
        self.live = Live("r", number, number, 0, version_digest(layout, region_digests(layout, self.bytes)), number)


@pytest.fixture(params=["float32", "bfloat16"])
def layout(request):
    return make_layout(manifest_for(CONFIG, request.param), 1)


@pytest.fixture
def rank(driver, layout, tmp_path):
    where = placement(layout, 0)
    slots = DeviceSlots(driver, where)
    filling = Filling(slots, DeviceDigests(driver, layout, where), Puller(driver))
    filling.listen(tmp_path / "device-0.sock")
    first = Version(layout, 1)
    slots.bind(filling.stage(first.live, first.views))  # which compares the digests
    yield filling
    slots.bind(None)
    slots.pinned.let_go()


TRAINER = """
import ctypes, json, os, sys
import numpy as np
import torch
from rollout_client.offers import Offers
from rollout_client.own_memory import OwnMemory, Run
torch.cuda.set_device(int(os.environ.get("TRAINER_GPU", "0")))
if more := int(os.environ.get("SAYS_MORE", "0")):  # bytes of an allocation than there are
    find = OwnMemory._find
    OwnMemory._find = lambda self, address: (true := find(self, address))._replace(nbytes=true.nbytes + more)
offers, held = Offers(ctypes.CDLL("libcuda.so.1")), {}
torch.zeros(1, device="cuda")
for line in sys.stdin:
    order = json.loads(line)
    answer = None
    if order["do"] == "make":  # of a version: tensors as torch cuts them, small ones from one allocation
        held.clear()
        if order.get("anew"):
            torch.cuda.empty_cache()
        random = np.random.default_rng(order["version"]).integers(0, 256, order["bytes"], np.uint8)
        for start, nbytes in order["regions"]:
            held[start] = torch.from_numpy(random[start : start + nbytes].copy()).cuda()
        torch.cuda.synchronize()
        answer = [tensor.data_ptr() for tensor in held.values()]
    if order["do"] == "push":
        offers.begin([order["path"]], 0, order["epoch"])
        offers.take([Run(start, tensor.data_ptr(), tensor.numel()) for start, tensor in held.items()], last=True)
        answer = offers.taken()
        offers.end()
    if order["do"] == "begin":  # and do not wait
        offers.begin([order["path"]], 0, order["epoch"])
        offers.take([Run(start, tensor.data_ptr(), tensor.numel()) for start, tensor in held.items()], last=True)
    if order["do"] == "free":
        held.clear()
        torch.cuda.empty_cache()
    print(json.dumps(answer), flush=True)
"""


class Trainer:
    def __init__(self, layout, path, **environment):
        self._size = 4 if layout.manifest.dtype == "float32" else 2
        self._layout, self._path = layout, str(path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", TRAINER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def ask(self, do, **order):
        self._process.stdin.write(json.dumps({"do": do} | order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the trainer has ended: {self._process.poll()}"
        return json.loads(line)

    def make(self, number, **how):
        regions = [(region.offset, int(np.prod(region.shape)) * self._size) for region in self._layout.regions]
        return self.ask("make", version=number, bytes=self._layout.slot_bytes, regions=regions, **how)

    def push(self, version, do="push"):
        return self.ask(do, path=self._path, epoch=version.live.write_epoch)

    def kill(self):
        self._process.kill()
        self._process.wait(30)
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def trainer(rank, layout, tmp_path):
    pytest.importorskip("torch")
    made = []

    def start(**environment):
        made.append(Trainer(layout, tmp_path / "device-0.sock", **environment))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def _devices():
    torch = pytest.importorskip("torch")
    return torch.cuda.device_count()


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_wrong_byte_anywhere_changes_the_digest(driver, rank, layout):
    version = Version(layout, 2)
    staged = rank.stage(version.live, version.views)
    address = rank._slots.regions[staged.slot].address
    stream = driver.stream()
    for region in layout.regions:
        last = region.offset + int(np.prod(region.shape)) * (4 if layout.manifest.dtype == "float32" else 2) - 1
        byte = int(version.bytes[last])
        driver.fill(address + last, 1, byte ^ 1, stream)
        driver.wait(stream)
        assert rank._digests.version(address) != version.live.digest, region.name
        driver.fill(address + last, 1, byte, stream)
        driver.wait(stream)
    assert rank._digests.version(address) == version.live.digest


@pytest.mark.parametrize("gpu", [0, 1], ids=["same GPU", "another GPU"])
@pytest.mark.parametrize("how", [{}, EXPANDABLE], ids=["cudaMalloc", "expandable segments"])
def test_what_a_trainer_has_is_taken(rank, layout, trainer, monkeypatch, gpu, how):
    if gpu >= _devices():
        pytest.skip("needs two GPUs")
    one = trainer(TRAINER_GPU=str(gpu), **how)
    stage = DeviceSlots.stage
    monkeypatch.setattr(DeviceSlots, "stage", None)
    for number in 2, 3, 4:
        version = Version(layout, number)
        one.make(number)
        assert one.push(version) == 1
        staged = rank.stage(version.live, version.views)
        rank._slots.bind(staged)
        del staged
    monkeypatch.setattr(DeviceSlots, "stage", stage)
    rank._slots.bind(rank.stage(version.live, version.views))


@pytest.mark.parametrize("how", [{}, EXPANDABLE], ids=["cudaMalloc", "expandable segments"])
def test_other_memory_at_an_address_is_not_taken_for_what_was_there(rank, layout, trainer, how, monkeypatch):
    """torch gives memory back, and gets other memory: often at the same address."""
    one, places = trainer(**how), []
    monkeypatch.setattr(DeviceSlots, "stage", None)
    for number in 2, 3, 4, 5:
        version = Version(layout, number)
        places.append(one.make(number, anew=True))
        assert one.push(version) == 1
        staged = rank.stage(version.live, version.views)
        rank._slots.bind(staged)
        del staged
    print(f"at the same addresses: {[now == places[0] for now in places]}")


@pytest.mark.parametrize("how", [{}, EXPANDABLE], ids=["cudaMalloc", "expandable segments"])
def test_memory_of_a_trainer_that_frees_it_or_is_killed_can_be_copied_still(driver, rank, layout, trainer, how):
    """What a rank has mapped is read whatever becomes of its trainer: a fault there would cost it its own memory."""
    one, version = trainer(**how), Version(layout, 2)
    one.make(2)
    assert one.push(version) == 1
    (known,) = rank._trainers
    pieces = known.memory.pieces(0)
    one.ask("free")
    address = rank._slots.regions[rank._slots.spare].address
    rank._puller.start(pieces, address, rank._slots.stream)
    driver.wait(rank._slots.stream)
    with rank._lock:  # its connection's end unmaps nothing meanwhile
        one.kill()
        for _ in range(20):
            rank._puller.start(pieces, address, rank._slots.stream)
            driver.wait(rank._slots.stream)
    rank.stage(version.live, version.views)


def test_a_trainer_that_is_killed_while_a_rank_copies_costs_nothing(driver, rank, layout, trainer):
    version = Version(layout, 2)
    for _ in range(2):
        one = trainer()
        one.make(2)
        one.push(version, "begin")
        one.kill()
        assert rank._digests.version(rank._slots.regions[rank._slots.bound].address) == Version(layout, 1).live.digest
        rank.stage(version.live, version.views)


@pytest.mark.parametrize("how", [{}, EXPANDABLE], ids=["cudaMalloc", "expandable segments"])
def test_memory_of_which_there_is_less_than_its_trainer_says_is_not_read(rank, layout, trainer, how):
    one, version = trainer(SAYS_MORE=str(64 << 20), **how), Version(layout, 2)
    one.make(2)
    assert one.push(version) == 0
    rank.stage(version.live, version.views)


def test_memory_that_a_trainer_frees_is_free_once_the_next_push_does_not_name_it(driver, rank, layout, trainer):
    one = trainer()
    one.make(2)
    assert one.push(Version(layout, 2)) == 1
    before = driver.memory()[0]
    one.ask("free")
    freed = driver.memory()[0]
    one.make(3, anew=True)
    assert one.push(Version(layout, 3)) == 1
    after = driver.memory()[0]
    one.kill()
    end = time.monotonic() + 30
    while rank._trainers:
        assert time.monotonic() < end
        time.sleep(0.01)
    print(
        f"free: {before} mapped, {freed} freed by the trainer, {after} after the next push, {driver.memory()[0]} dead"
    )


@pytest.mark.parametrize("changes", [False, True], ids=["as it was", "changed after it was copied"])
def test_a_version_is_copied_while_it_arrives(driver, rank, layout, changes):
    version, size = Version(layout, 2), 4 if layout.manifest.dtype == "float32" else 2
    spans = [(region.offset, int(np.prod(region.shape)) * size) for region in layout.regions]
    key = version.live.slot, version.live.write_epoch
    for at in range(1, len(spans), 3):
        rank.copy_ahead(key, memoryview(version.bytes), spans[at : at + 3])
    end = time.monotonic() + 30
    while not (rank._arriving and rank._arriving.ahead.missing(spans[1:]) == []):
        assert time.monotonic() < end
        time.sleep(0.001)
    if changes:
        rank._slots.settle()
        version.bytes[:] = Version(layout, 3).bytes
        version.live = Live("r", 2, 2, 0, Version(layout, 3).live.digest, 2)
    staged = rank.stage(version.live, version.views)
    assert rank._digests.version(rank._slots.regions[staged.slot].address) == version.live.digest

"""Device memory lent by a rank and filled by a torch trainer; its digest, computed where it lies."""

import mmap
import time

import numpy as np
import pytest

from rollout_client.device_slots import LentSlot, NotLent
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, rank_views, region_digests, version_digest
from weight_manager.messages import Live
from worker.gpu.digests import DeviceDigests
from worker.gpu.lending import Lending
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
    lending = Lending(slots, DeviceDigests(driver, layout, where))
    lending.listen(tmp_path / "device-0.sock")
    first = Version(layout, 1)
    slots.bind(lending.stage(first.live, first.views))  # which compares the digests
    yield lending
    slots.bind(None)
    slots.pinned.let_go()


@pytest.fixture
def trainer(rank, layout, tmp_path):
    torch = pytest.importorskip("torch")
    import ctypes

    made = []

    class Trainer:
        def open(self, version):
            torch.cuda.current_stream()
            self.tensor = torch.from_numpy(version.bytes).cuda()
            made.append(LentSlot(str(tmp_path / "device-0.sock"), ctypes.CDLL("libcuda.so.1")))
            made[-1].open(0, version.live.write_epoch)
            return made[-1]

        def write(self, lent):
            for region in layout.regions:
                nbytes = int(np.prod(region.shape)) * (4 if layout.manifest.dtype == "float32" else 2)
                lent.send(self.tensor.data_ptr() + region.offset, region.offset, nbytes, 0)
            torch.cuda.synchronize()

    yield Trainer()
    for lent in made:
        lent.close()


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


def test_what_a_trainer_filled_is_used(rank, layout, trainer, monkeypatch):
    version = Version(layout, 2)
    lent = trainer.open(version)
    trainer.write(lent)
    lent.filled()
    monkeypatch.setattr(DeviceSlots, "stage", None)
    rank.stage(version.live, version.views)


def test_late_writes_go_nowhere(rank, layout, trainer):
    two, three = Version(layout, 2), Version(layout, 3)
    lent = trainer.open(two)
    staged = rank.stage(three.live, three.views)
    trainer.write(lent)
    assert rank._digests.version(rank._slots.regions[staged.slot].address) == three.live.digest
    with pytest.raises(NotLent, match="taken back"):
        lent.filled()


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

"""Ranks that share a model, each of which copies its part of a version from a trainer's memory. Device memory is memfds
(tests/memfd_device.py)."""

import contextlib
import ctypes
import mmap
import socket
import threading
import time

import numpy as np
import pytest

from rollout_client.device_slots import Keep, No, decode_answer, encode, socket_of
from rollout_client.offers import Offers
from rollout_client.own_memory import Run
from tests.memfd_device import MemfdCuda, MemfdDriver, MemfdPuller
from weight_manager.families import manifest_for
from weight_manager.layout import EVERY_RANK, make_layout, rank_views, region_digests, version_digest
from weight_manager.messages import Live
from worker.gpu.filling import Filling
from worker.gpu.trainer_memory import TrainerMemory
from worker.gpu.weights import DeviceSlots, placement
from worker.orders import GroupDead

from .test_weights import CONFIG

TP = 2
LAYOUT = make_layout(manifest_for(CONFIG, "bfloat16"), TP)


class Version:
    """As the arena's slot has it, and its trainer."""

    def __init__(self, number):
        self.bytes = np.frombuffer(mmap.mmap(-1, LAYOUT.slot_bytes), np.uint8)
        self.bytes[:] = np.random.default_rng(number).integers(0, 256, LAYOUT.slot_bytes, np.uint8)
        self.regions = region_digests(LAYOUT, self.bytes)
        self.live = Live("r", number, number, 0, version_digest(LAYOUT, self.regions), number)


class Digests:
    """The kernel's stand-in, of what one rank has."""

    def __init__(self, where, rank):
        self._where = where
        self._own = [at for at, region in enumerate(LAYOUT.regions) if region.rank in (rank, EVERY_RANK)]

    def begin(self, address): ...
    def read_ahead(self, early, spans, copying, *, last=False): ...
    def settle(self): ...

    def holds(self, address, live, regions, early=None):
        slot = bytearray(LAYOUT.slot_bytes)
        for run in self._where.runs:
            slot[run.source : run.source + run.nbytes] = ctypes.string_at(address + run.target, run.nbytes)
        found = region_digests(LAYOUT, slot)
        return [found[at] for at in self._own] == [regions[at] for at in self._own]


class Quiet:
    """Stands for `NcclGroups.quiet`."""

    def __init__(self):
        self.here, self.entered, self.dead = False, 0, False

    @contextlib.contextmanager
    def __call__(self):
        if self.dead:
            raise GroupDead("the process of rank 1 is gone")
        self.here, self.entered = True, self.entered + 1
        try:
            yield
        finally:
            self.here = False


class QuietDriver(MemfdDriver):
    """Maps and unmaps a trainer's memory only where it is quiet."""

    def __init__(self, quiet):
        super().__init__()
        self._quiet = quiet

    def open_handle(self, handle):
        assert self._quiet.here
        return super().open_handle(handle)

    def close_handle(self, address):
        assert self._quiet.here
        super().close_handle(address)

    def adopt(self, fd):
        assert self._quiet.here
        return super().adopt(fd)

    def unreserve(self, address, nbytes):
        assert self._quiet.here
        super().unreserve(address, nbytes)


class QuietPuller(MemfdPuller):
    def __init__(self, driver, quiet):
        super().__init__(driver)
        self._of, self._quiet = driver, quiet

    def memory(self, runs):
        return TrainerMemory(self._of, runs, self._quiet)


class Rank:
    def __init__(self, run_dir, rank):
        self.rank, self.path = rank, socket_of(run_dir, 0, rank)
        self.quiet = Quiet()
        self.driver = QuietDriver(self.quiet)
        where = placement(LAYOUT, rank)
        self.slots = DeviceSlots(self.driver, where)
        self.puller = QuietPuller(self.driver, self.quiet)
        self.filling = Filling(self.slots, Digests(where, rank), self.puller, whole=False)
        self.filling.listen(self.path)

    def stage(self, version):
        return self.filling.stage(version.live, rank_views(LAYOUT, self.rank, version.bytes), version.regions)

    def serve(self, version):
        self.slots.bind(self.stage(version))
        return self

    def has(self, staged, version):
        """Every tensor of it, as this rank reads it."""
        views = rank_views(LAYOUT, self.rank, version.bytes)
        return all(self.slots.read(staged, name, 2).tobytes() == view.tobytes() for name, view in views.items())


class Trainer:
    """A version's tensors in two allocations."""

    def __init__(self, *ranks, has_handles=True):
        self._paths = [str(rank.path) for rank in ranks]
        self.cuda = MemfdCuda(has_handles=has_handles)
        self.offers = Offers(self.cuda)
        self.bases = [self.cuda.allocate(LAYOUT.slot_bytes) for _ in range(2)]

    def push(self, version):
        """How many ranks have taken it."""
        for base in self.bases:
            ctypes.memmove(base, version.bytes.ctypes.data, LAYOUT.slot_bytes)
        runs = [
            Run(start, self.bases[number % 2] + start, nbytes) for number, (start, nbytes) in enumerate(LAYOUT.ranges)
        ]
        self.offers.begin(self._paths, version.live.slot, version.live.write_epoch)
        self.offers.take(runs, last=True)
        taken = self.offers.taken()
        self.offers.end()
        return taken


@pytest.fixture
def ranks(tmp_path):
    return [Rank(tmp_path, rank).serve(Version(1)) for rank in range(TP)]


@pytest.fixture
def trainer(ranks):
    made = []

    def start(**options):
        made.append(Trainer(*ranks, **options))
        return made[-1]

    yield start
    for one in made:
        one.offers.close()


@pytest.mark.parametrize("has_handles", [True, False], ids=["handles", "descriptors"])
def test_each_rank_takes_its_part_and_nothing_from_the_arena(ranks, trainer, has_handles):
    pusher = trainer(has_handles=has_handles)
    for number in range(2, 6):
        version, before = Version(number), [rank.driver.copied for rank in ranks]
        pulled = [rank.puller.pulled for rank in ranks]
        assert pusher.push(version) == TP
        for rank, copied, former in zip(ranks, before, pulled, strict=True):
            staged = rank.stage(version)
            assert rank.has(staged, version)
            assert rank.driver.copied == copied
            own = sum(nbytes for region, (_, nbytes) in zip(LAYOUT.regions, LAYOUT.ranges, strict=True)
                      if region.rank in (rank.rank, EVERY_RANK))  # fmt: skip
            assert rank.puller.pulled - former == own, "another rank's part stays where it is"
            rank.slots.bind(staged)
            del staged


@pytest.mark.parametrize("has_handles", [True, False], ids=["handles", "descriptors"])
def test_memory_is_mapped_and_unmapped_where_it_is_quiet_and_only_when_there_is_something_new(
    ranks, trainer, has_handles
):
    pusher = trainer(has_handles=has_handles)
    for number in range(2, 5):
        assert pusher.push(Version(number)) == TP
    assert [rank.quiet.entered for rank in ranks] == [1] * TP
    pusher.offers.close()
    _until(lambda: [rank.quiet.entered for rank in ranks] == [2] * TP)
    _until(lambda: not any(rank.driver.opened for rank in ranks))


def test_a_rank_whose_part_is_not_the_versions_copies_the_arenas(ranks, trainer):
    two, first, second = Version(2), *ranks
    pusher = trainer()
    two.bytes[:], right = Version(3).bytes, two.bytes.copy()
    assert pusher.push(two) == TP
    two.bytes[:] = right
    before = first.driver.copied
    assert first.has(first.stage(two), two)
    assert first.driver.copied > before
    assert second.has(second.stage(two), two)


def test_one_that_was_left_out_copies_the_arenas_and_the_other_does_not(ranks, trainer, caplog):
    two, first, second = Version(2), *ranks
    second.quiet.dead = True  # it cannot map anything
    assert trainer().push(two) == 1
    assert f"{second.path} does not copy from here" in caplog.text
    before = first.driver.copied
    assert first.has(first.stage(two), two)
    assert first.driver.copied == before
    assert second.has(second.stage(two), two)
    assert second.driver.copied > 0


def test_a_rank_whose_group_is_dead_leaves_no_thread_in_ruins(ranks, trainer, monkeypatch):
    failures = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    pusher = trainer()
    assert pusher.push(Version(2)) == TP
    for rank in ranks:
        rank.quiet.dead = True
    pusher.offers.close()
    _until(lambda: not any(rank.filling._trainers for rank in ranks))
    assert failures == []


def test_what_such_a_rank_has_is_nothing_that_a_store_could_serve_from(ranks):
    (first, _), two = ranks, Version(2)
    first.serve(two)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as store:
        store.settimeout(30)
        store.connect(str(first.path))
        store.send(encode(Keep(two.live.slot, two.live.write_epoch)))
        answer = decode_answer(store.recv(4096))
    assert isinstance(answer, No)
    assert "a part of the model" in answer.why


def _until(true):
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)

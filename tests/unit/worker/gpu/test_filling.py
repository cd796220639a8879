"""Device slots filled from a trainer's memory over a real socket, or while a version still arrives. Device memory is
memfds, mapped by whoever was shown it: what outlives whom and whose writes arrive where is the kernel's doing, as it is
the driver's on a GPU."""

import ctypes
import errno
import logging
import mmap
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from rollout_client import offers
from rollout_client.device_slots import Grant, Keep, No, Rows, Segment, Show, Take, decode_answer, encode
from rollout_client.offers import Offers
from rollout_client.own_memory import OwnMemory, Run
from tests.memfd_device import HostDigests, MemfdCuda, MemfdDriver, MemfdPuller
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, rank_views, region_digests, version_digest
from weight_manager.messages import Live
from worker.gpu import filling
from worker.gpu.driver import CudaError, DeviceMemoryError
from worker.gpu.filling import Filling
from worker.gpu.trainer_memory import TrainerMemory
from worker.gpu.weights import DeviceSlots, placement

from .test_weights import CONFIG

LAYOUT = make_layout(manifest_for(CONFIG, "bfloat16"), 1)


class Version:
    """A version in the arena's slot, and as its trainer has it."""

    def __init__(self, number: int, slot: int = 0):
        self.bytes = np.frombuffer(mmap.mmap(-1, LAYOUT.slot_bytes), np.uint8)
        self.bytes[:] = np.random.default_rng(number).integers(0, 256, LAYOUT.slot_bytes, np.uint8)
        self.views = rank_views(LAYOUT, 0, self.bytes)
        self.live = Live("r", number, number, slot, version_digest(LAYOUT, region_digests(LAYOUT, self.bytes)), number)


class Rank:
    def __init__(self, path):
        self.path = path
        self.driver = MemfdDriver()
        self.slots = DeviceSlots(self.driver, placement(LAYOUT, 0))
        self.digests = HostDigests(LAYOUT)
        self.puller = MemfdPuller(self.driver)
        self.filling = Filling(self.slots, self.digests, self.puller)
        self.filling.listen(path)

    def serve(self, version):
        """Bound, and the version before it forgotten."""
        self.slots.bind(self.filling.stage(version.live, version.views))
        return self

    def content(self, slot):
        return (ctypes.c_ubyte * LAYOUT.slot_bytes).from_address(self.slots.regions[slot].address)

    def holds(self, staged, version):
        return HostDigests(LAYOUT).version(self.slots.regions[staged.slot].address) == version.live.digest


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path / "device-0.sock").serve(Version(1))


class Trainer:
    """A process with a GPU's memory: one allocation for each half of a version's tensors."""

    def __init__(self, *paths, cuda=None):
        self.paths = [str(path) for path in paths]
        self.cuda = cuda or MemfdCuda()
        self.offers = Offers(self.cuda)
        self.bases = [self.cuda.allocate(LAYOUT.slot_bytes) for _ in range(2)]

    def runs(self, regions=LAYOUT.regions):
        """Of these; every other one lies in the second allocation."""
        return [
            Run(region.offset, self.bases[number % 2] + region.offset, 2 * int(np.prod(region.shape)))
            for number, region in enumerate(LAYOUT.regions)
            if region in regions
        ]

    def has(self, version):
        for base in self.bases:
            ctypes.memmove(base, version.bytes.ctypes.data, LAYOUT.slot_bytes)
        return version

    def push(self, version, regions=LAYOUT.regions, *, through=True):
        """How many ranks have taken it."""
        self.has(version)
        self.offers.begin(self.paths, version.live.slot, version.live.write_epoch)
        self.offers.take(self.runs(regions), last=True, through=through)
        taken = self.offers.taken()
        self.offers.end()
        return taken


@pytest.fixture
def trainer(rank):
    made = []

    def start(**options):
        made.append(Trainer(rank.path, **options))
        return made[-1]

    yield start
    for one in made:
        one.offers.close()


def test_a_trainer_knows_that_ranks_copy_once_all_have_said_so(rank, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "device-1.sock"))
        silent.listen()
        for paths, copy in ((rank.path,), True), ((rank.path, tmp_path / "device-1.sock"), False):
            trainer = Trainer(*paths)
            version = trainer.has(Version(2))
            trainer.offers.begin(trainer.paths, version.live.slot, version.live.write_epoch)
            trainer.offers.take(trainer.runs(), last=True, through=False)
            answered = trainer.offers._good[0]
            _wait_until(lambda answered=answered, trainer=trainer: trainer.offers.copied_from() or not answered._owed)
            assert trainer.offers.copied_from() is copy
            trainer.offers.close()


def test_a_rank_that_says_no_is_found_without_waiting(rank):
    trainer = Trainer(rank.path)
    trainer.offers.begin(trainer.paths, 1, 1)
    trainer.offers.take(trainer.runs(), last=True, through=False)
    refused = trainer.offers._good[0]
    refused._heard = lambda: No("there is no room")
    _wait_until(refused._speaks)
    assert not trainer.offers.copied_from()
    assert trainer.offers.taken() == 0
    trainer.offers.close()


def test_a_rank_that_takes_nothing_says_why(tmp_path, caplog):
    driver = MemfdDriver()
    slots = DeviceSlots(driver, placement(LAYOUT, 0))
    filling = Filling(slots, HostDigests(LAYOUT), MemfdPuller(driver))
    filling.listen(tmp_path / "device-0.sock")
    trainer = Trainer(tmp_path / "device-0.sock")
    assert trainer.push(Version(2)) == 0
    assert "nothing is served yet" in caplog.text
    trainer.offers.close()


def _wait_until(true):
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_rank_that_cannot_take_a_connection_for_a_moment_takes_the_next(tmp_path, monkeypatch):
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def accept_or_fail(self):
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
    rank = Rank(tmp_path / "device-0.sock").serve(Version(1))
    trainer = Trainer(rank.path)
    assert trainer.push(Version(2)) == 1
    assert not failures
    trainer.offers.close()


@pytest.fixture
def no_thread(monkeypatch):
    """The system has none more for a moment: not the next one of this name."""
    start, refused = threading.Thread.start, []

    def refuse(name):
        def start_or_not(thread):
            if thread.name == name and not refused:
                refused.append(name)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_not)
        return refused

    return refuse


def test_a_trainer_for_whom_there_is_no_thread_is_hung_up_on_and_the_next_is_served(rank, trainer, no_thread, caplog):
    refused = no_thread("trainer")
    assert trainer().push(Version(2)) == 0
    assert refused
    assert "can't start new thread" in caplog.text
    assert trainer().push(Version(3)) == 1


def test_where_there_is_no_thread_that_copies_ahead_the_version_is_copied_at_last(rank, no_thread, caplog):
    two = Version(2)
    key, memory = (two.live.slot, two.live.write_epoch), memoryview(two.bytes)
    rank.slots.pinned.let_go()
    refused = no_thread("copying")
    rank.filling.copy_ahead(key, memory, _spans())
    assert refused
    assert "can't start new thread" in caplog.text
    rank.filling.copy_ahead(key, memory, _spans())
    _wait_until(lambda: rank.filling._arriving is not None)
    assert rank.holds(rank.filling.stage(two.live, two.views), two)


@pytest.mark.parametrize("has_handles", [True, False], ids=["handles", "descriptors"])
def test_what_a_trainer_has_is_taken_and_nothing_is_copied_from_the_arena(rank, trainer, has_handles):
    pusher, before = trainer(cuda=MemfdCuda(has_handles=has_handles)), rank.driver.copied
    for number in range(2, 6):  # into both slots, and again
        version = Version(number)
        assert pusher.push(version) == 1
        staged = rank.filling.stage(version.live, version.views)
        assert rank.driver.copied == before
        assert rank.holds(staged, version)
        for name, view in version.views.items():
            assert rank.slots.read(staged, name, 2).tobytes() == view.tobytes()
        assert staged.slot != rank.slots.bound
        rank.slots.bind(staged)
        del staged


@pytest.mark.parametrize("has_handles", [True, False], ids=["handles", "descriptors"])
def test_memory_is_shown_and_mapped_once_for_all_pushes(rank, trainer, monkeypatch, has_handles):
    pusher, opened = trainer(cuda=MemfdCuda(has_handles=has_handles)), []
    name = "open_handle" if has_handles else "adopt"
    open_one = getattr(rank.driver, name)
    monkeypatch.setattr(rank.driver, name, lambda what: opened.append(what) or open_one(what))
    said, decode = [], filling.decode_request
    monkeypatch.setattr(filling, "decode_request", lambda raw: said.append(decode(raw)) or said[-1])
    for number in range(2, 5):
        assert pusher.push(Version(number)) == 1
    assert len(opened) == 2
    assert [type(message).__name__ for message in said] == ["Show", "Rows", "Take", "Take", "Take"]


def test_a_served_byte_is_in_no_memory_of_the_trainers(rank, trainer):
    two, pusher = Version(2), trainer()
    pusher.push(two)
    rank.slots.bind(rank.filling.stage(two.live, two.views))
    pusher.has(Version(9))  # a stray write, to all that the trainer can reach
    assert HostDigests(LAYOUT).version(rank.slots.regions[rank.slots.bound].address) == two.live.digest


def test_other_memory_at_the_same_address_is_not_taken_for_what_was_there(rank, trainer):
    two, three, pusher = Version(2), Version(3), trainer()
    pusher.push(two)
    rank.slots.bind(rank.filling.stage(two.live, two.views))
    base = pusher.bases[0]
    pusher.cuda.free(base)
    assert pusher.cuda.allocate(LAYOUT.slot_bytes, at=base) == base
    assert pusher.push(three) == 1
    before = rank.driver.copied
    assert rank.holds(rank.filling.stage(three.live, three.views), three)
    assert rank.driver.copied == before
    _wait_until(lambda: len(rank.driver.opened) == 2)  # what was freed is not kept


def test_the_rank_s_own_check_finds_memory_that_is_not_what_it_was(rank, trainer, monkeypatch, caplog):
    """As if the driver gave the same number twice."""
    two, three, pusher = Version(2), Version(3), trainer()
    pusher.push(two)
    rank.slots.bind(rank.filling.stage(two.live, two.views))
    monkeypatch.setattr(type(pusher.offers._memory), "look_again", lambda self: None)
    base = pusher.bases[0]
    pusher.cuda.free(base)
    pusher.cuda.allocate(LAYOUT.slot_bytes, at=base)
    assert pusher.push(three) == 1
    assert rank.holds(rank.filling.stage(three.live, three.views), three)
    assert "is not itself" in caplog.text


def test_what_a_push_does_not_name_is_unmapped_after_it(rank, trainer):
    pusher = trainer()
    pusher.push(Version(2))
    assert len(rank.driver.opened) == 2
    pusher.push(Version(3), LAYOUT.regions[::2])
    _wait_until(lambda: len(rank.driver.opened) == 1)
    assert pusher.push(Version(4)) == 1
    assert len(rank.driver.opened) == 2


def test_a_trainer_that_has_gone_is_unmapped(rank, trainer):
    pusher = trainer()
    pusher.push(Version(2))
    pusher.offers.close()  # as the kernel does for one that died
    _wait_until(lambda: not rank.driver.opened)
    assert pusher.push(Version(3)) == 1


def test_a_trainer_that_wants_its_memory_back_has_it(rank, trainer, monkeypatch):
    pusher, close = trainer(), rank.driver.close_handle
    pusher.push(Version(2))
    monkeypatch.setattr(rank.driver, "close_handle", lambda address: time.sleep(0.1) or close(address))
    pusher.offers.close(wait=True)
    assert not rank.driver.opened
    assert pusher.push(Version(3)) == 1


def test_a_trainer_whose_memory_a_rank_does_not_let_go_in_time_is_told(rank, trainer, monkeypatch, caplog):
    monkeypatch.setattr(offers, "PATIENCE_S", 0.05)
    pusher, close, goes_on = trainer(), rank.driver.close_handle, threading.Event()
    pusher.push(Version(2))
    _wait_until(lambda: len(rank.driver.opened) == 2)
    monkeypatch.setattr(rank.driver, "close_handle", lambda address: goes_on.wait(30) and close(address))
    pusher.offers.close(wait=True)
    assert "still has this trainer's memory mapped" in caplog.text
    goes_on.set()
    _wait_until(lambda: not rank.driver.opened)


def test_memory_of_a_trainer_that_died_is_copied_and_found_to_be_what_it_is(rank, trainer):
    """What is mapped stays: of a process that is gone there is what it had."""
    two, pusher = Version(2), trainer()
    pusher.has(two)
    pusher.offers.begin(pusher.paths, 0, two.live.write_epoch)
    pusher.offers.take(pusher.runs(LAYOUT.regions[:3]), last=False)
    pusher.offers.taken()
    pusher.offers.close()
    _wait_until(lambda: rank.filling._taken is None)
    before = rank.driver.copied
    staged = rank.filling.stage(two.live, two.views)
    assert rank.holds(staged, two)
    assert rank.driver.copied > before


def test_a_version_that_is_made_for_the_push_comes_in_several_parts(rank, trainer):
    two, pusher = Version(2), trainer()
    for _ in range(2):
        pusher.has(two)
        pusher.offers.begin(pusher.paths, 0, two.live.write_epoch)
        for at in range(0, len(LAYOUT.regions), 2):
            last = at + 2 >= len(LAYOUT.regions)
            pusher.offers.take(pusher.runs(LAYOUT.regions[at : at + 2]), last=last)
            assert pusher.offers.taken() == 1
            for base in pusher.bases:
                ctypes.memset(base, 0, LAYOUT.slot_bytes) if last else None  # the memory may be used again
        pusher.offers.end()
        before = rank.driver.copied
        assert rank.holds(rank.filling.stage(two.live, two.views), two)
        assert rank.driver.copied == before
    assert len(rank.driver.opened) == 2


def test_an_answer_is_waited_for_once(rank, trainer, monkeypatch):
    monkeypatch.setattr(offers, "PATIENCE_S", 30.0)
    two, pusher = Version(2), trainer()
    pusher.push(two)
    began = time.monotonic()
    assert pusher.offers.taken() == 1, "as it was"
    assert time.monotonic() - began < 20.0
    assert pusher.push(two) == 1


def test_another_push_between_two_parts_ends_the_first(rank, trainer, caplog):
    two, three, first = Version(2), Version(3, slot=1), trainer()
    first.has(two)
    first.offers.begin(first.paths, 0, two.live.write_epoch)
    first.offers.take(first.runs(LAYOUT.regions[:2]), last=False)
    assert first.offers.taken() == 1
    assert trainer().push(three) == 1
    first.offers.take(first.runs(LAYOUT.regions[2:]), last=True)
    assert first.offers.taken() == 0
    assert "another push has begun since" in caplog.text
    before = rank.driver.copied
    assert rank.holds(rank.filling.stage(three.live, three.views), three)
    assert rank.driver.copied == before


def test_a_trainer_that_was_stopped_changes_nothing_when_it_wakes(rank, trainer):
    two, three, pusher = Version(2), Version(3, slot=1), trainer()
    pusher.push(two)
    staged = rank.filling.stage(three.live, three.views)
    rank.slots.bind(staged)
    pusher.push(two)
    assert rank.holds(staged, three)


def test_wrong_bytes_are_found_and_copied_again(rank, trainer, caplog):
    two, pusher = Version(2), trainer()
    assert pusher.push(two, LAYOUT.regions[:-1]) == 1
    before = rank.driver.copied
    staged = rank.filling.stage(two.live, two.views)
    assert rank.holds(staged, two)
    assert rank.driver.copied > before
    assert "is not itself" in caplog.text


def test_bytes_that_the_trainer_changes_while_they_are_copied_are_found(rank, trainer, monkeypatch):
    two, pusher = Version(2), trainer()
    start = rank.puller.start

    def changes(pieces, slot, stream):
        pusher.has(Version(9))
        start(pieces, slot, stream)

    monkeypatch.setattr(rank.puller, "start", changes)
    pusher.push(two)
    before = rank.driver.copied
    assert rank.holds(rank.filling.stage(two.live, two.views), two)
    assert rank.driver.copied > before


def test_what_was_taken_for_one_push_is_not_for_another(rank, trainer, caplog):
    two, three, pusher = Version(2), Version(3), trainer()
    pusher.push(two)
    before = rank.digests.computed
    staged = rank.filling.stage(three.live, three.views)
    assert rank.holds(staged, three)
    assert rank.digests.computed == before + 1, "of what was copied: what was taken is not even looked at"
    assert pusher.push(two) == 0
    assert "may still go back" in caplog.text
    del staged
    before = rank.driver.copied
    rank.filling.stage(two.live, two.views)
    assert rank.driver.copied > before


def test_a_slot_that_the_last_steps_of_the_version_before_read_is_waited_for(rank, trainer, monkeypatch):
    """Its trainer may hear that a version is live, and push the next, while they are computed."""
    asked, look = [], filling._LOOK_FOR_SPARE_S
    monkeypatch.setattr(filling, "_SPARE_S", 30.0)
    rank.filling._asked = lambda: asked.append(True)
    two, pusher, held = Version(2, slot=1), trainer(), [rank.filling.stage(Version(3).live, Version(3).views)]
    threading.Timer(20 * look, held.clear).start()
    assert pusher.push(two) == 1
    assert not held
    assert asked
    assert rank.holds(rank.filling.stage(two.live, two.views), two)


def test_a_rank_that_maps_for_longer_than_a_push_waits_is_asked_again_once_it_has(rank, trainer, monkeypatch, caplog):
    monkeypatch.setattr(offers, "PATIENCE_S", 0.2)
    two, pusher, go_on = Version(2), trainer(), threading.Event()
    opened, open_one = [], rank.driver.open_handle
    rank.driver.open_handle = lambda handle: opened.append(go_on.wait(30)) or open_one(handle)
    assert pusher.push(two) == 0
    assert "no answer within" in caplog.text
    assert pusher.push(two) == 0
    assert "has not answered the push before yet" in caplog.text
    assert rank.holds(rank.filling.stage(two.live, two.views), two)
    go_on.set()
    _wait_until(pusher.offers._connections[str(rank.path)].ready)
    three = Version(3)
    assert pusher.push(three) == 1
    assert opened == [True, True], "once"
    before = rank.driver.copied
    assert rank.holds(rank.filling.stage(three.live, three.views), three)
    assert rank.driver.copied == before


def test_memory_that_cannot_be_mapped_is_said_and_the_arena_taken(rank, trainer, caplog):
    two, pusher = Version(2), trainer()

    def refuses(handle):
        raise CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_DEVICE")

    rank.driver.open_handle = refuses
    assert pusher.push(two) == 0
    assert "CUDA_ERROR_INVALID_DEVICE" in caplog.text
    assert rank.holds(rank.filling.stage(two.live, two.views), two)


@pytest.mark.parametrize("has_handles", [True, False], ids=["handles", "descriptors"])
def test_memory_of_which_there_is_less_than_its_trainer_says_is_not_read(
    rank, trainer, monkeypatch, caplog, has_handles
):
    """Beyond its end there is nothing, or another's: on a GPU the read would lose the rank's own memory, too."""
    find = OwnMemory._find
    monkeypatch.setattr(OwnMemory, "_find", lambda *where: (true := find(*where))._replace(nbytes=true.nbytes + 4096))
    two, pusher = Version(2), trainer(cuda=MemfdCuda(has_handles=has_handles))
    assert pusher.push(two) == 0
    assert ("bytes, and not" if has_handles else "CUDA_ERROR_INVALID_VALUE") in caplog.text
    assert rank.driver.opened == {}, "nor is it kept"
    assert rank.holds(rank.filling.stage(two.live, two.views), two)


def test_memory_that_nobody_else_can_map_is_said_and_the_arena_taken(rank, trainer, caplog):
    pusher = trainer()
    pusher.cuda.cuIpcGetMemHandle = lambda *_: 801
    for number in 2, 3:
        assert pusher.push(Version(number)) == 0
    assert caplog.text.count("no other process can map this trainer's memory") == 1


def test_a_copy_that_does_not_end_is_not_waited_for_and_its_slot_not_used(rank, trainer, monkeypatch, caplog):
    monkeypatch.setattr(filling, "_LONGEST_COPY_S", 0.05)
    two, pusher = Version(2), trainer()
    rank.driver.busy = True
    assert pusher.push(two) == 0, "it was to be through"
    assert "did not end within" in caplog.text
    with pytest.raises(ValueError, match="did not end"):
        rank.filling.stage(two.live, two.views)
    assert pusher.push(two) == 0
    with pytest.raises(ValueError, match="did not end"):
        rank.filling.withdraw()
    copied = rank.driver.copied
    rank.filling.copy_ahead((0, 2), memoryview(two.bytes), _spans())
    assert rank.driver.copied == copied
    rank.driver.busy = False
    assert rank.holds(rank.filling.stage(two.live, two.views), two)


def test_a_copy_that_was_only_begun_is_waited_for_where_its_slot_is_used(rank, trainer, monkeypatch):
    monkeypatch.setattr(filling, "_LONGEST_COPY_S", 0.05)
    two, pusher = Version(2), trainer()
    rank.driver.busy = True
    assert pusher.push(two, through=False) == 1
    assert len(rank.driver.opened) == 2
    pusher.offers.close()
    with pytest.raises(ValueError, match="did not end"):
        rank.filling.stage(two.live, two.views)
    _wait_until(lambda: not rank.filling._trainers)
    assert len(rank.driver.opened) == 2, "what is read stays mapped, though its trainer is gone"
    rank.driver.busy = False
    assert rank.holds(rank.filling.stage(two.live, two.views), two)
    assert not rank.driver.opened, "and goes once nothing reads it"


def test_a_rank_gives_its_weights_up_and_nothing_is_copied_between(rank, trainer, monkeypatch):
    """A trainer asks, and a rank that has let go of its lock has its slots still: they are emptied under the copy."""
    two, pusher, asked, goes = Version(2), trainer(), threading.Event(), threading.Event()
    pieces, bind = TrainerMemory.pieces, rank.slots.bind

    def late(memory, table):
        found = pieces(memory, table)
        asked.set()
        assert goes.wait(30)
        return found

    def bind_late(staged):
        goes.set()
        wait([push], 0.3)
        bind(staged)

    monkeypatch.setattr(TrainerMemory, "pieces", late)
    monkeypatch.setattr(rank.slots, "bind", bind_late)
    with ThreadPoolExecutor(1) as pool:
        push = pool.submit(pusher.push, two)
        assert asked.wait(30)
        rank.filling.withdraw()
        assert push.result(30) == 0
    assert rank.puller.pulled == 0


def test_a_part_is_not_begun_while_another_is_read_from_the_table(rank, trainer, monkeypatch):
    monkeypatch.setattr(filling, "_LONGEST_COPY_S", 0.05)
    two, pusher = Version(2), trainer()
    pusher.offers.begin(pusher.paths, 0, two.live.write_epoch)
    rank.driver.busy = True
    pusher.offers.take(pusher.runs(LAYOUT.regions[:2]), last=False, through=False)
    assert pusher.offers.taken() == 1
    pulled = rank.puller.pulled
    pusher.offers.take(pusher.runs(LAYOUT.regions[2:]), last=True, through=False)
    assert pusher.offers.taken() == 0
    assert rank.puller.pulled == pulled
    rank.driver.busy = False


def test_a_copy_that_did_not_arrive_is_refused(rank):
    two = Version(2)
    good = two.live
    rank.driver.from_address = lambda *_: None
    with pytest.raises(ValueError, match="does not hold version 2"):
        rank.filling.stage(good, two.views)


def test_a_rank_that_gives_its_weights_up_has_nothing_of_a_trainer_s_mapped(rank, trainer):
    two, pusher = Version(2), trainer()
    pusher.push(two)
    rank.filling.withdraw()
    _wait_until(lambda: not rank.driver.opened)
    assert pusher.push(two) == 0
    rank.slots.bind(rank.filling.stage(two.live, two.views))  # it wakes
    assert pusher.push(Version(3)) == 1


def test_a_slot_that_got_new_memory_is_pinned_again(rank):
    two, three = Version(2), Version(3, slot=1)
    rank.slots.bind(rank.filling.stage(two.live, two.views))
    rank.driver.stale[two.bytes.ctypes.data] = two.bytes.copy()
    two.bytes[:] = three.bytes
    live = Live("r", 3, 3, 0, three.live.digest, 4)
    assert rank.holds(rank.filling.stage(live, two.views), three)
    assert not rank.driver.stale


def test_nothing_is_taken_while_nothing_is_served(rank, trainer, caplog):
    two, pusher = Version(2), trainer()
    pusher.push(two)
    rank.filling.withdraw()
    assert pusher.push(two) == 0
    assert "nothing is served yet" in caplog.text
    assert rank.holds(rank.filling.stage(two.live, two.views), two)  # woken, from the arena
    assert rank.driver.copied


def test_a_rank_that_wakes_has_both_slots_again_or_neither(rank):
    two = Version(2)
    rank.filling.withdraw()
    create, left = rank.driver.create, [1]

    def one_only(nbytes, **how):
        if not left:
            raise DeviceMemoryError("full")
        left.pop()
        return create(nbytes, **how)

    rank.driver.create = one_only
    rank.driver.no_room = lambda nbytes, what: DeviceMemoryError(f"no room for {what}")
    with pytest.raises(DeviceMemoryError, match="no room for weights"):
        rank.filling.stage(two.live, two.views)
    assert [region.filled for region in rank.slots.regions] == [False, False]
    rank.driver.create = create
    assert rank.holds(rank.filling.stage(two.live, two.views), two)
    assert [region.filled for region in rank.slots.regions] == [True, True]


def test_ranks_that_cannot_copy_are_left_out_and_told_of(rank, tmp_path, caplog):
    two, pusher = Version(2), Trainer(tmp_path / "gone.sock", rank.path)
    assert pusher.push(two) == 1
    assert not pusher.offers.whole
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "gone.sock does not copy from here" in record.getMessage()
    assert rank.holds(rank.filling.stage(two.live, two.views), two)
    pusher.offers.close()


def test_a_rank_that_cannot_copy_is_told_of_once_and_again_when_it_could_meanwhile(rank, tmp_path, caplog):
    pusher = Trainer(tmp_path / "gone.sock", rank.path)
    for number in 2, 3:
        assert pusher.push(Version(number)) == 1
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    pusher.paths = [str(rank.path), str(rank.path.with_name("late.sock"))]
    rank.path.with_name("late.sock").symlink_to(rank.path)
    assert pusher.push(Version(4)) == 2
    rank.path.with_name("late.sock").unlink()
    pusher.offers._connections.pop(pusher.paths[1]).close()
    for number in 5, 6:
        assert pusher.push(Version(number)) == 1
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 2
    pusher.offers.close()


def test_what_a_push_left_unheard_is_not_the_answer_to_the_next(rank, trainer):
    two, pusher = Version(2), trainer()
    pusher.has(two)
    pusher.offers.begin(pusher.paths, 0, two.live.write_epoch)
    pusher.offers.take(pusher.runs(LAYOUT.regions[:2]), last=True)
    pusher.offers.end()  # the push has failed
    _wait_until(pusher.offers._connections[str(rank.path)].ready)
    three = Version(3)
    assert pusher.push(three) == 1
    before = rank.driver.copied
    assert rank.holds(rank.filling.stage(three.live, three.views), three)
    assert rank.driver.copied == before


WRONG = {
    "a segment that was not shown": [Rows(0, np.array([0, 64, 7, 0], "<i8").tobytes())],
    "bytes beyond a segment": [Show([Segment(1, 64, b"h")]), Rows(0, np.array([0, 64, 1, 8], "<i8").tobytes())],
    "a negative offset": [Show([Segment(1, 64, b"h")]), Rows(0, np.array([0, 64, 1, -8], "<i8").tobytes())],
    "half an element": [Show([Segment(1, 64, b"h")]), Rows(0, np.array([0, 8, 1, 1], "<i8").tobytes())],
    "half a row": [Rows(0, b"1234")],
    "rows that are not all there": [Rows(0, b"", more=True)],
    "a table that was not told of": [],
}


@pytest.mark.parametrize("said", WRONG.values(), ids=WRONG.keys())
def test_what_contradicts_itself_is_refused(rank, said, monkeypatch):
    monkeypatch.setattr(rank.driver, "open_handle", lambda handle: 1 << 40)
    monkeypatch.setattr(rank.driver, "room_at", lambda address: 64)
    monkeypatch.setattr(rank.driver, "close_handle", lambda address: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(30)
        stranger.connect(str(rank.path))
        for message in [*said, Take(0, 2, 0, first=True, last=True)]:
            stranger.send(encode(message))
        assert isinstance(decode_answer(stranger.recv(1 << 16)), No)
    _wait_until(lambda: not rank.filling._trainers)
    assert rank.puller.pulled == 0


@pytest.mark.parametrize(
    "raw", [b"\xc1", encode(Keep(0, 2)) + b"x", b"\x81\xa1t\xa4nope", encode(Show([Segment(1, 64)]))]
)
def test_nonsense_ends_the_connection_and_no_other(rank, trainer, raw):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(30)
        stranger.connect(str(rank.path))
        stranger.send(raw)
        assert stranger.recv(100) == b""
    two = Version(2)
    assert trainer().push(two) == 1
    assert rank.holds(rank.filling.stage(two.live, two.views), two)


def _spans(regions=LAYOUT.regions):
    return [(region.offset, 2 * int(np.prod(region.shape))) for region in regions]


def _arrive(rank, version, regions=LAYOUT.regions):
    """The store says that these are in their place; (bytes copied, bytes told of)."""
    spans = _spans(regions)
    return _tell(rank, version, spans), sum(size for _, size in spans)


def _tell(rank, version, spans):
    """The same, of these bytes; once what can be copied of them is copied."""
    before, filling = rank.driver.copied, rank.filling
    filling.copy_ahead((version.live.slot, version.live.write_epoch), memoryview(version.bytes), spans)
    if filling._copying is not None:
        done = threading.Event()
        filling._parts.put(_Last(done))
        assert done.wait(30)
    return rank.driver.copied - before


class _Last:
    """A part that is no part: the copying thread has come to it."""

    def __init__(self, done):
        self._done = done

    @property
    def turn(self):
        self._done.set()
        return -1


def test_what_has_arrived_is_copied_while_the_rest_is_awaited(rank):
    two = Version(2)
    copied, told = _arrive(rank, two, LAYOUT.regions[3:])
    assert told <= copied <= told + 64 * len(LAYOUT.regions), "and padding between its regions"
    before = rank.driver.copied
    staged = rank.filling.stage(two.live, two.views)
    assert rank.holds(staged, two)
    rest = sum(size for _, size in _spans(LAYOUT.regions[:3]))
    assert rest <= rank.driver.copied - before <= rest + 64 * 3, "the rest, and padding between its regions"


def test_what_can_begin_at_once_is_begun_by_whoever_is_told(rank):
    two = Version(2)
    key, memory = (two.live.slot, two.live.write_epoch), memoryview(two.bytes)
    first, second, *_ = _spans()
    rank.slots.pinned.let_go()
    rank.filling.copy_ahead(key, memory, [first])  # to be pinned first, which takes a tenth of a second: a thread's
    assert rank.filling._copying is not None
    _wait_until(lambda: rank.slots.pinned.holds(two.bytes.ctypes.data) and rank.filling._arriving is not None)
    with rank.filling._lock:
        before = rank.driver.copied
    rank.filling.copy_ahead(key, memory, [second])
    assert rank.driver.copied == before + second[1]
    assert rank.holds(rank.filling.stage(two.live, two.views), two)


def test_where_nothing_can_be_pinned_a_thread_copies(rank):
    """Such a copy keeps its caller until it is through."""
    two, callers = Version(2), set()
    rank.slots.pinned.let_go()
    rank.slots.pinned._refused = True
    copy = rank.driver.from_address
    rank.driver.from_address = lambda *rest: (callers.add(threading.current_thread().name), copy(*rest))
    _arrive(rank, two)
    assert callers == {"copying"}


def test_who_tells_of_bytes_does_not_wait_for_a_version_that_is_being_staged(rank):
    two, three = Version(2), Version(3, slot=1)
    rank.serve(two)
    before = rank.driver.copied
    with rank.filling._lock:
        rank.filling.copy_ahead((1, three.live.write_epoch), memoryview(three.bytes), _spans())  # returns
        assert rank.driver.copied == before
    _wait_until(lambda: rank.driver.copied > before)
    assert rank.holds(rank.filling.stage(three.live, three.views), three)


def test_a_version_that_has_all_been_copied_is_only_proved(rank):
    two = Version(2)
    for at in range(0, len(LAYOUT.regions), 2):
        _arrive(rank, two, LAYOUT.regions[at : at + 2])
    before, proved = rank.driver.copied, rank.digests.computed
    assert rank.holds(rank.filling.stage(two.live, two.views), two)
    assert rank.driver.copied == before
    assert rank.digests.computed == proved + 1


def test_a_tensor_that_was_told_of_in_parts_is_not_copied_again_when_it_is_whole(rank):
    two = Version(2)
    start, size = max(_spans(), key=lambda span: span[1])
    parts = [(start + size // 2, size // 4), (start, size // 4)]
    assert sum(_tell(rank, two, [part]) for part in parts) == 2 * (size // 4)
    rest = sum(size for _, size in _spans()) - 2 * (size // 4)
    assert rest <= _tell(rank, two, _spans()) <= rest + 64 * len(LAYOUT.regions), "and padding between regions"
    assert _tell(rank, two, parts) == 0
    before = rank.driver.copied
    assert rank.holds(rank.filling.stage(two.live, two.views), two)
    assert rank.driver.copied == before


def test_what_was_copied_for_a_push_that_ended_is_not_taken_for_the_next(rank):
    two, three = Version(2), Version(3)  # in the same slot of the arena: another write epoch
    _arrive(rank, two)
    before = rank.driver.copied
    assert rank.holds(rank.filling.stage(three.live, three.views), three)
    assert rank.driver.copied - before >= sum(size for _, size in _spans())
    assert rank.digests.computed == 2, "of what was copied now: no proof of the other was even tried"


@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "nothing can be pinned"])
def test_bytes_that_change_after_they_were_copied_are_copied_again(rank, pins):
    two, late = Version(2), Version(3)
    rank.slots.pinned.let_go()
    rank.slots.pinned._refused = not pins
    good = two.bytes.copy()
    two.bytes[:] = late.bytes
    _arrive(rank, two)
    two.bytes[:] = good
    assert rank.holds(rank.filling.stage(two.live, two.views), two)


def test_nothing_is_copied_over_a_version_that_a_rollback_may_go_back_to(rank):
    one, two, three = rank.slots.bound, Version(2), Version(3, slot=1)
    held = rank.filling.stage(two.live, two.views)
    before = bytes(rank.content(1 - one))
    assert _arrive(rank, three)[0] == 0, "prepared, not flipped"
    first = rank.slots.hold(one)  # as the weight manager keeps what was live until the commit is final
    rank.slots.bind(held)
    assert _arrive(rank, three)[0] == 0, "flipped, not final"
    rank.slots.bind(first)
    assert bytes(rank.content(1 - one)) == before
    assert rank.holds(held, two)
    del held, first
    assert _arrive(rank, three)[0] > 0


def test_what_comes_from_a_trainer_is_not_copied_from_the_arena(rank, trainer):
    two, pusher = Version(2), trainer()
    assert pusher.push(two) == 1
    assert _arrive(rank, two)[0] == 0
    before = rank.driver.copied
    assert rank.holds(rank.filling.stage(two.live, two.views), two)
    assert rank.driver.copied == before


def test_a_trainer_may_have_the_slot_that_copying_ahead_has_begun_to_fill(rank, trainer):
    two = Version(2)
    _arrive(rank, two, LAYOUT.regions[:2])
    assert trainer().push(two) == 1
    before = rank.driver.copied
    assert rank.holds(rank.filling.stage(two.live, two.views), two)
    assert rank.driver.copied == before


def test_a_rank_that_gives_its_weights_up_does_not_copy_what_it_was_told_of_before(rank):
    two, filling = Version(2), rank.filling
    rank.slots.pinned.let_go()
    filling._copying = threading.current_thread()  # one that does not come to it
    filling.copy_ahead((two.live.slot, two.live.write_epoch), memoryview(two.bytes), _spans())
    filling.withdraw()
    filling._copying = None
    rank.serve(Version(3, slot=1))  # it wakes
    served = rank.driver.copied
    copied, told = _arrive(rank, two, LAYOUT.regions[:1])
    assert copied == told
    assert rank.driver.copied - served == told


@pytest.mark.parametrize("meanwhile", ["nothing", "a trainer's is taken", "a launch fails"])
def test_memory_is_not_given_back_while_what_arrived_is_still_hashed(rank, trainer, meanwhile):
    two, unmap, launch = Version(2), rank.driver.unmap, rank.digests.read_ahead
    unmapped = []

    def watched(*region):
        unmapped.append(rank.digests.reading)
        unmap(*region)

    def failing(*told):
        launch(*told)
        raise CudaError("cuLaunchKernelEx: CUDA_ERROR_OUT_OF_MEMORY")

    rank.driver.unmap = watched
    _arrive(rank, two, LAYOUT.regions[:2])
    assert rank.digests.reading, "behind the copies, on a stream of its own"
    if meanwhile == "a trainer's is taken":
        assert trainer().push(two) == 1
        assert rank.digests.reading
    if meanwhile == "a launch fails":
        rank.digests.read_ahead = failing
        _arrive(rank, two, LAYOUT.regions[2:])
    rank.filling.withdraw()
    assert unmapped == [False, False]


@pytest.fixture
def keep(rank):
    """What a rank answers to a store that wants to hold a version's memory."""

    def ask(version, patience_s=0.0):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as store:
            store.connect(str(rank.path))
            store.send(encode(Keep(version.live.slot, version.live.write_epoch, patience_s)))
            raw, fds, _, _ = socket.recv_fds(store, 1 << 20, 1)
            return decode_answer(raw), fds

    return ask


def test_what_was_proved_can_be_held_and_stays_when_the_rank_lets_go_of_it(rank, keep):
    two = Version(2)
    staged = rank.filling.stage(two.live, two.views)
    grant, (fd,) = keep(two)
    rank.slots.bind(staged)
    del staged
    assert isinstance(keep(two)[0], Grant)
    rank.filling.withdraw()
    assert isinstance(keep(two)[0], No)
    with mmap.mmap(fd, grant.nbytes) as memory:
        for start, at, nbytes in grant.runs:
            assert memory[at : at + nbytes] == two.bytes[start : start + nbytes].tobytes()
    os.close(fd)


def test_the_store_may_ask_before_the_version_is_proved(rank, keep):
    one, two = Version(1), Version(2, slot=1)
    with ThreadPoolExecutor(1) as store:
        answer = store.submit(keep, two, 60.0)
        rank.slots.bind(rank.filling.stage(one.live, one.views))  # a proof, of another version
        assert not answer.done()
        staged = rank.filling.stage(two.live, two.views)
        grant, (fd,) = answer.result(30.0)
    assert isinstance(grant, Grant)
    with mmap.mmap(fd, grant.nbytes) as memory:
        for start, at, nbytes in grant.runs:
            assert memory[at : at + nbytes] == two.bytes[start : start + nbytes].tobytes()
    os.close(fd)
    del staged


def test_a_store_that_does_not_take_its_answer_keeps_nobody_waiting(rank, monkeypatch):
    sends, taken, send = threading.Event(), threading.Event(), socket.send_fds

    def full(*answer):
        sends.set()
        assert taken.wait(30)
        return send(*answer)

    monkeypatch.setattr(socket, "send_fds", full)
    two, three = Version(2), Version(3, slot=1)
    staged = rank.filling.stage(two.live, two.views)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as store:
        store.connect(str(rank.path))
        store.send(encode(Keep(0, two.live.write_epoch)))
        assert sends.wait(30)
        rank.slots.bind(staged)
        with ThreadPoolExecutor(1) as work:
            staging = work.submit(rank.filling.stage, three.live, three.views)
            wait([staging], 20)
            done = staging.done()
            taken.set()
        raw, (fd,), _, _ = socket.recv_fds(store, 1 << 20, 1)
    os.close(fd)
    assert isinstance(decode_answer(raw), Grant)
    assert done


def test_a_proof_that_does_not_come_is_waited_for_no_longer_than_the_store_says(rank, keep):
    began = time.monotonic()
    assert isinstance(keep(Version(2), 0.05)[0], No)
    assert time.monotonic() - began >= 0.05


def test_nothing_else_can_be_held(rank, keep, trainer):
    two, three = Version(2), Version(3)
    assert isinstance(keep(two)[0], No)
    trainer().push(two)
    assert isinstance(keep(two)[0], No)  # it is there, and not proved
    staged = rank.filling.stage(two.live, two.views)
    assert isinstance(keep(two)[0], Grant)
    del staged  # the commit is undone: the next push may write there
    assert isinstance(keep(two)[0], No)
    rank.serve(three)
    assert isinstance(keep(three)[0], Grant)


def test_where_memory_cannot_be_shared_the_store_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(MemfdDriver, "can_share", False)
    rank, two = Rank(tmp_path / "device-0.sock").serve(Version(1)), Version(2)
    rank.slots.bind(rank.filling.stage(two.live, two.views))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as store:
        store.connect(str(rank.path))
        store.send(encode(Keep(two.live.slot, two.live.write_epoch)))
        assert "no weights" in decode_answer(store.recv(1 << 16)).why

"""Device slots lent to a trainer over a real socket, or filled while a version still arrives. Device memory is memfds,
mapped by both sides: what is lent, what is taken back and whose writes arrive where is the kernel's doing, as it is the
driver's on a GPU."""

import ctypes
import errno
import logging
import mmap
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rollout_client.device_slots import Ask, Grant, Keep, LentSlot, LentSlots, No, NotLent, decode_answer, encode
from tests.memfd_device import HostDigests, MemfdCuda, MemfdDriver
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, rank_views, region_digests, version_digest
from weight_manager.messages import Live
from worker.gpu.driver import CudaError, DeviceMemoryError
from worker.gpu.lending import Lending
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

    def copy_to(self, lent, regions=LAYOUT.regions):
        for region in regions:
            nbytes = 2 * int(np.prod(region.shape))
            lent.send(self.bytes.ctypes.data + region.offset, region.offset, nbytes, 0)


class Rank:
    def __init__(self, path):
        self.path = path
        self.driver = MemfdDriver()
        self.slots = DeviceSlots(self.driver, placement(LAYOUT, 0))
        self.digests = HostDigests(LAYOUT)
        self.lending = Lending(self.slots, self.digests)
        self.lending.listen(path)

    def serve(self, version):
        """Bound, and the version before it forgotten."""
        self.slots.bind(self.lending.stage(version.live, version.views))
        return self

    def content(self, slot):
        return (ctypes.c_ubyte * LAYOUT.slot_bytes).from_address(self.slots.regions[slot].address)

    def holds(self, staged, version):
        return HostDigests(LAYOUT).version(self.slots.regions[staged.slot].address) == version.live.digest


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path / "device-0.sock").serve(Version(1))


@pytest.fixture
def lent(rank):
    made = []

    def ask(version):
        one = LentSlot(str(rank.path), MemfdCuda())
        made.append(one)
        one.open(version.live.slot, version.live.write_epoch)
        return one

    yield ask
    for one in made:
        one.close()


def test_a_rank_that_lends_nothing_says_why(tmp_path):
    slots = DeviceSlots(MemfdDriver(), placement(LAYOUT, 0))
    lending = Lending(slots, HostDigests(LAYOUT), "it has a part of a model")
    lending.listen(tmp_path / "device-0.sock")
    one = Version(1)
    slots.bind(lending.stage(one.live, one.views))
    trainer = LentSlot(str(tmp_path / "device-0.sock"), MemfdCuda())
    with pytest.raises(NotLent, match="a part of a model"):
        trainer.open(0, 2)
    trainer.close()


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
    rank, two = Rank(tmp_path / "device-0.sock").serve(Version(1)), Version(2)
    trainer = LentSlot(str(rank.path), MemfdCuda())
    trainer.open(two.live.slot, two.live.write_epoch)
    assert not failures
    trainer.close()


def test_what_a_trainer_filled_is_used_and_nothing_is_copied(rank, lent):
    two = Version(2)
    slot = lent(two)
    two.copy_to(slot)
    slot.filled()
    before = rank.driver.copied
    staged = rank.lending.stage(two.live, two.views)
    assert rank.driver.copied == before
    assert rank.holds(staged, two)
    for name, view in two.views.items():
        assert rank.slots.read(staged, name, 2).tobytes() == view.tobytes()
    assert staged.slot != rank.slots.bound
    rank.slots.bind(staged)
    del staged
    three = Version(3)
    slot = lent(three)  # into the other
    three.copy_to(slot)
    slot.filled()
    assert rank.holds(rank.lending.stage(three.live, three.views), three)
    assert rank.driver.copied == before


def test_a_trainer_that_dies_halfway_writes_into_memory_that_is_nobodys(rank, lent):
    two = Version(2)
    slot = lent(two)
    two.copy_to(slot, LAYOUT.regions[:3])
    slot._socket.close()  # as the kernel does; its copies may still be under way
    _wait_until(lambda: rank.lending._loan is None)
    staged = rank.lending.stage(two.live, two.views)
    Version(9).copy_to(slot)
    assert rank.holds(staged, two)


def test_a_trainer_that_was_stopped_cannot_write_into_the_version_after(rank, lent):
    two, three = Version(2), Version(3, slot=1)
    slot = lent(two)
    staged = rank.lending.stage(three.live, three.views)
    rank.slots.bind(staged)
    two.copy_to(slot)
    assert rank.holds(staged, three)
    with pytest.raises(NotLent, match="taken back"):
        slot.filled()


def test_a_second_trainer_takes_the_slot_from_the_first(rank, lent):
    two, three = Version(2), Version(3, slot=1)
    first = lent(two)
    second = lent(three)
    three.copy_to(second)
    two.copy_to(first)
    second.filled()
    with pytest.raises(NotLent):
        first.filled()
    assert rank.holds(rank.lending.stage(three.live, three.views), three)


def test_wrong_bytes_on_the_device_are_found_and_copied_again(rank, lent, caplog):
    two = Version(2)
    slot = lent(two)
    two.copy_to(slot, LAYOUT.regions[:-1])
    slot.filled()
    before = rank.driver.copied
    staged = rank.lending.stage(two.live, two.views)
    assert rank.holds(staged, two)
    assert rank.driver.copied > before
    assert "is not itself" in caplog.text


def test_what_was_filled_for_one_push_is_not_taken_for_another(rank, lent):
    two, three = Version(2), Version(3)
    slot = lent(two)
    two.copy_to(slot)
    slot.filled()
    before = rank.digests.computed
    staged = rank.lending.stage(three.live, three.views)
    assert rank.holds(staged, three)
    assert rank.digests.computed == before + 1, "of what was copied: what was filled is not even looked at"
    with pytest.raises(NotLent, match="may still go back"):
        lent(two)  # three is staged, and one is served
    del staged
    before = rank.driver.copied
    rank.lending.stage(two.live, two.views)
    assert rank.driver.copied > before


def test_a_copy_that_did_not_arrive_is_refused(rank):
    two = Version(2)
    good = two.live
    rank.driver.from_address = lambda *_: None
    with pytest.raises(ValueError, match="does not hold version 2"):
        rank.lending.stage(good, two.views)


def test_a_rank_that_gives_its_weights_up_takes_what_it_lent_back(rank, lent):
    two = Version(2)
    slot = lent(two)
    two.copy_to(slot)
    rank.lending.withdraw()
    with pytest.raises(NotLent, match="taken back"):
        slot.filled()
    assert not rank.slots.regions[1 - rank.slots.bound].filled


def test_a_slot_that_got_new_memory_is_pinned_again(rank):
    two, three = Version(2), Version(3, slot=1)
    rank.slots.bind(rank.lending.stage(two.live, two.views))
    rank.driver.stale[two.bytes.ctypes.data] = two.bytes.copy()
    two.bytes[:] = three.bytes
    live = Live("r", 3, 3, 0, three.live.digest, 4)
    assert rank.holds(rank.lending.stage(live, two.views), three)
    assert not rank.driver.stale


def test_nothing_is_lent_while_nothing_is_served(rank, lent):
    two = Version(2)
    slot = lent(two)
    two.copy_to(slot)
    slot.filled()
    rank.lending.withdraw()
    rank.slots.bind(None)
    with pytest.raises(NotLent, match="nothing is served yet"):
        lent(two)
    assert rank.holds(rank.lending.stage(two.live, two.views), two)  # woken, from the arena
    assert rank.driver.copied


def test_a_rank_that_wakes_has_both_slots_again_or_neither(rank):
    two = Version(2)
    rank.lending.withdraw()
    rank.slots.bind(None)
    create, left = rank.driver.create, [1]

    def one_only(nbytes, **how):
        if not left:
            raise DeviceMemoryError("full")
        left.pop()
        return create(nbytes, **how)

    rank.driver.create = one_only
    rank.driver.no_room = lambda nbytes, what: DeviceMemoryError(f"no room for {what}")
    with pytest.raises(DeviceMemoryError, match="no room for weights"):
        rank.lending.stage(two.live, two.views)
    assert [region.filled for region in rank.slots.regions] == [False, False]
    rank.driver.create = create
    assert rank.holds(rank.lending.stage(two.live, two.views), two)
    assert [region.filled for region in rank.slots.regions] == [True, True]


def test_ranks_that_cannot_be_filled_are_left_out_and_told_of(rank, tmp_path, caplog):
    two = Version(2)
    lent = LentSlots([str(tmp_path / "gone.sock"), str(rank.path)], 0, 2)
    lent.open(MemfdCuda())
    two.copy_to(lent)
    assert lent.filled() == 1
    lent.close()
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "gone.sock is not filled from here" in record.getMessage()
    assert rank.holds(rank.lending.stage(two.live, two.views), two)


def test_where_memory_cannot_be_shared_versions_come_by_the_arena(tmp_path, monkeypatch):
    monkeypatch.setattr(MemfdDriver, "can_share", False)
    rank = Rank(tmp_path / "device-0.sock").serve(Version(1))
    lent = LentSlot(str(rank.path), MemfdCuda())
    with pytest.raises(NotLent, match="no weights"):
        lent.open(0, 2)
    lent.close()
    two = Version(2)
    assert rank.holds(rank.lending.stage(two.live, two.views), two)


@pytest.mark.parametrize("raw", [b"\xc1", encode(Ask(0, 2)) + b"x", b"\x81\xa1t\xa4nope"])
def test_nonsense_ends_the_connection_and_no_other(rank, lent, raw):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(30)
        stranger.connect(str(rank.path))
        stranger.send(raw)
        assert stranger.recv(100) == b""
    two = Version(2)
    slot = lent(two)
    two.copy_to(slot)
    slot.filled()
    assert rank.holds(rank.lending.stage(two.live, two.views), two)


def _spans(regions=LAYOUT.regions):
    return [(region.offset, 2 * int(np.prod(region.shape))) for region in regions]


def _arrive(rank, version, regions=LAYOUT.regions):
    """The store says that these are in their place; (bytes copied, bytes told of)."""
    spans = _spans(regions)
    return _tell(rank, version, spans), sum(size for _, size in spans)


def _tell(rank, version, spans):
    """The same, of these bytes; once what can be copied of them is copied."""
    before, lending = rank.driver.copied, rank.lending
    lending.copy_ahead((version.live.slot, version.live.write_epoch), memoryview(version.bytes), spans)
    if lending._copying is not None:
        done = threading.Event()
        lending._parts.put(_Last(done))
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
    staged = rank.lending.stage(two.live, two.views)
    assert rank.holds(staged, two)
    rest = sum(size for _, size in _spans(LAYOUT.regions[:3]))
    assert rest <= rank.driver.copied - before <= rest + 64 * 3, "the rest, and padding between its regions"


def test_what_can_begin_at_once_is_begun_by_whoever_is_told(rank):
    two = Version(2)
    key, memory = (two.live.slot, two.live.write_epoch), memoryview(two.bytes)
    first, second, *_ = _spans()
    rank.slots.pinned.let_go()
    rank.lending.copy_ahead(key, memory, [first])  # to be pinned first, which takes a tenth of a second: a thread's
    assert rank.lending._copying is not None
    _wait_until(lambda: rank.slots.pinned.holds(two.bytes.ctypes.data) and rank.lending._arriving is not None)
    with rank.lending._lock:
        before = rank.driver.copied
    rank.lending.copy_ahead(key, memory, [second])
    assert rank.driver.copied == before + second[1]
    assert rank.holds(rank.lending.stage(two.live, two.views), two)


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
    with rank.lending._lock:
        rank.lending.copy_ahead((1, three.live.write_epoch), memoryview(three.bytes), _spans())  # returns
        assert rank.driver.copied == before
    _wait_until(lambda: rank.driver.copied > before)
    assert rank.holds(rank.lending.stage(three.live, three.views), three)


def test_a_version_that_has_all_been_copied_is_only_proved(rank):
    two = Version(2)
    for at in range(0, len(LAYOUT.regions), 2):
        _arrive(rank, two, LAYOUT.regions[at : at + 2])
    before, proved = rank.driver.copied, rank.digests.computed
    assert rank.holds(rank.lending.stage(two.live, two.views), two)
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
    assert rank.holds(rank.lending.stage(two.live, two.views), two)
    assert rank.driver.copied == before


def test_what_was_copied_for_a_push_that_ended_is_not_taken_for_the_next(rank):
    two, three = Version(2), Version(3)  # in the same slot of the arena: another write epoch
    _arrive(rank, two)
    before = rank.driver.copied
    assert rank.holds(rank.lending.stage(three.live, three.views), three)
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
    assert rank.holds(rank.lending.stage(two.live, two.views), two)


def test_nothing_is_copied_over_a_version_that_a_rollback_may_go_back_to(rank):
    one, two, three = rank.slots.bound, Version(2), Version(3, slot=1)
    held = rank.lending.stage(two.live, two.views)
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


def test_a_slot_that_a_trainer_writes_into_is_left_to_it(rank, lent):
    two = Version(2)
    slot = lent(two)
    assert _arrive(rank, two)[0] == 0
    two.copy_to(slot)
    slot.filled()
    assert _arrive(rank, two)[0] == 0
    before = rank.driver.copied
    assert rank.holds(rank.lending.stage(two.live, two.views), two)
    assert rank.driver.copied == before


def test_a_trainer_may_have_the_slot_that_copying_ahead_has_begun_to_fill(rank, lent):
    two = Version(2)
    _arrive(rank, two, LAYOUT.regions[:2])
    slot = lent(two)
    two.copy_to(slot)
    slot.filled()
    before = rank.driver.copied
    assert rank.holds(rank.lending.stage(two.live, two.views), two)
    assert rank.driver.copied == before


def test_a_rank_that_gives_its_weights_up_does_not_copy_what_it_was_told_of_before(rank):
    two, lending = Version(2), rank.lending
    before = rank.driver.copied
    rank.slots.pinned.let_go()
    lending._copying = threading.current_thread()  # one that does not come to it
    lending.copy_ahead((two.live.slot, two.live.write_epoch), memoryview(two.bytes), _spans())
    lending.withdraw()
    lending._copying = None
    copied, told = _arrive(rank, two, LAYOUT.regions[:1])
    assert copied == told
    assert rank.driver.copied - before == told


@pytest.mark.parametrize("meanwhile", ["nothing", "it is lent and taken back", "a launch fails"])
def test_memory_is_not_given_back_while_what_arrived_is_still_hashed(rank, lent, meanwhile):
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
    if meanwhile == "it is lent and taken back":
        lent(two)
    if meanwhile == "a launch fails":
        rank.digests.read_ahead = failing
        _arrive(rank, two, LAYOUT.regions[2:])
    rank.lending.withdraw()
    rank.slots.bind(None)
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
    staged = rank.lending.stage(two.live, two.views)
    grant, (fd,) = keep(two)
    rank.slots.bind(staged)
    del staged
    assert isinstance(keep(two)[0], Grant)
    rank.lending.withdraw()
    rank.slots.bind(None)
    assert isinstance(keep(two)[0], No)
    with mmap.mmap(fd, grant.nbytes) as memory:
        for start, at, nbytes in grant.runs:
            assert memory[at : at + nbytes] == two.bytes[start : start + nbytes].tobytes()
    os.close(fd)


def test_the_store_may_ask_before_the_version_is_proved(rank, keep):
    one, two = Version(1), Version(2, slot=1)
    with ThreadPoolExecutor(1) as store:
        answer = store.submit(keep, two, 60.0)
        rank.slots.bind(rank.lending.stage(one.live, one.views))  # a proof, of another version
        assert not answer.done()
        staged = rank.lending.stage(two.live, two.views)
        grant, (fd,) = answer.result(30.0)
    assert isinstance(grant, Grant)
    with mmap.mmap(fd, grant.nbytes) as memory:
        for start, at, nbytes in grant.runs:
            assert memory[at : at + nbytes] == two.bytes[start : start + nbytes].tobytes()
    os.close(fd)
    del staged


def test_a_proof_that_does_not_come_is_waited_for_no_longer_than_the_store_says(rank, keep):
    began = time.monotonic()
    assert isinstance(keep(Version(2), 0.05)[0], No)
    assert time.monotonic() - began >= 0.05


def test_nothing_else_can_be_held(rank, keep, lent):
    two, three = Version(2), Version(3)
    assert isinstance(keep(two)[0], No)
    slot = lent(two)
    two.copy_to(slot)
    slot.filled()
    assert isinstance(keep(two)[0], No)  # filled, and not proved
    staged = rank.lending.stage(two.live, two.views)
    assert isinstance(keep(two)[0], Grant)
    del staged  # the commit is undone: the next push may write there
    assert isinstance(keep(two)[0], No)
    rank.serve(three)
    assert isinstance(keep(three)[0], Grant)

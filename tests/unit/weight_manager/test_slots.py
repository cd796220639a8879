import os
import threading
import time

import pytest

from rollout_client import slot_lock
from rollout_client.errors import ArenaError
from weight_manager.arena import Arena
from weight_manager.background import Background
from weight_manager.errors import PushRefused
from weight_manager.slots import Slots


@pytest.fixture
def arena(tmp_path):
    arena = Arena.create(tmp_path, "t", 8192)
    yield arena
    arena.close(unlink=True)


@pytest.fixture
def background():
    background = Background(1, "t")
    yield background
    background.close()


@pytest.fixture
def slots(arena, background):
    return Slots(arena, background)


@pytest.fixture
def take(slots, background):
    """As a push takes a slot that may come again; what is given up is noted down in `take.forgotten`."""

    def take(live, seconds=5.0):
        deadline = time.monotonic() + seconds
        while True:
            background.deliver()
            try:
                return slots.take(live, take.forgotten.append)
            except PushRefused as refused:
                if "getting its memory" not in refused.message or time.monotonic() > deadline:
                    raise
                time.sleep(0.002)

    take.forgotten = []
    return take


@pytest.fixture
def writer(arena):
    """A trainer's open file. Locks belong to the open file, so one in this process counts as another's."""
    fd = os.open(arena.path, os.O_RDWR)
    yield fd
    os.close(fd)


def hold(writer, arena, slot):
    assert slot_lock.lock_shared(writer, arena.slot_offset(slot), arena.slot_bytes)


def let_go(writer, arena, slot):
    slot_lock.unlock(writer, arena.slot_offset(slot), arena.slot_bytes)


def until(condition, background):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        background.deliver()
        time.sleep(0.002)


def test_the_live_slot_is_never_given_away(arena, take):
    live = None
    for _ in range(6):
        slot, epoch = take(live)
        assert slot != live
        assert epoch == arena.write_epoch(slot)
        live = slot


def test_every_taking_moves_the_write_epoch_and_forgets_what_was_there(take):
    assert [take(1) for _ in range(3)] == [(0, 1), (0, 2), (0, 3)]
    assert take.forgotten == [0, 0, 0]


def test_a_slot_that_a_trainer_holds_is_stood_in_for_by_the_spare(arena, take, writer, background):
    hold(writer, arena, 1)
    assert not arena.backed(2)
    assert take(0)[0] == 2
    assert arena.backed(2)
    assert take(2)[0] == 0, "still held"
    let_go(writer, arena, 1)
    before = arena.write_epoch(2)
    assert take(0)[0] == 1
    until(lambda: not arena.backed(2), background)  # the spare's memory is given back
    assert arena.write_epoch(2) > before, "whoever still reads it finds out"


def test_a_slot_whose_memory_is_given_back_is_forgotten(arena, take, writer, background):
    """It may be what a rollback goes back to."""
    hold(writer, arena, 1)
    assert take(0)[0] == 2
    let_go(writer, arena, 1)
    take.forgotten.clear()
    assert take(0)[0] == 1
    assert sorted(take.forgotten) == [1, 2]


def test_the_loop_waits_neither_for_memory_nor_for_its_return(arena, slots, background, writer, monkeypatch):
    """Five gigabytes take longer than a lease; what is moved counts as written, and nobody is given it meanwhile."""
    go = threading.Event()
    for what in ("back", "release"):
        real = getattr(Arena, what)
        monkeypatch.setattr(Arena, what, lambda self, slot, real=real: go.wait(30) and real(self, slot))
    hold(writer, arena, 1)
    began = time.monotonic()
    for _ in range(2):
        assert not slots.prepare(0)
        with pytest.raises(PushRefused, match="getting its memory") as refused:
            slots.take(0, lambda slot: None)
        assert (refused.value.code, refused.value.retryable) == ("busy", True)
    assert time.monotonic() - began < 1
    go.set()
    until(lambda: slots.prepare(0), background)
    assert slots.take(0, lambda slot: None)[0] == 2
    let_go(writer, arena, 1)
    go.clear()
    assert slots.take(0, lambda slot: None)[0] == 1
    slots.enter(1)
    assert time.monotonic() - began < 2
    assert arena.backed(2)
    with pytest.raises(PushRefused, match="may still be written"):
        slots.take(0, lambda slot: None)
    go.set()
    until(lambda: not arena.backed(2), background)


def test_without_memory_for_the_spare_the_push_is_told_once_and_the_next_tries_again(arena, take, writer, monkeypatch):
    hold(writer, arena, 1)

    def full(self, slot):
        raise ArenaError("the weight arena needs 8 KiB")

    with monkeypatch.context() as patched:
        patched.setattr(Arena, "back", full)
        with pytest.raises(PushRefused, match="needs 8 KiB") as refused:
            take(0)
    assert refused.value.code == "io"
    assert take(0)[0] == 2


def test_a_dead_trainer_holds_nothing(arena, take):
    fd = os.open(arena.path, os.O_RDWR)
    hold(fd, arena, 1)
    os.close(fd)
    assert take(0)[0] == 1


def test_our_own_threads_hold_a_slot_too(slots, take):
    slots.enter(1)
    slots.enter(1)
    slots.leave(1)
    assert take(0)[0] == 2
    slots.leave(1)
    assert take(0)[0] == 1


def test_when_everything_is_held_the_push_may_come_again(arena, take, writer):
    hold(writer, arena, 1)
    hold(writer, arena, 2)
    with pytest.raises(PushRefused) as refused:
        take(0)
    assert (refused.value.code, refused.value.retryable) == ("busy", True)


def test_a_lock_taken_late_sees_that_the_slot_has_moved_on(arena, take, writer):
    _, mine = take(0)
    take(0)
    hold(writer, arena, 1)
    assert arena.write_epoch(1) != mine


def test_a_reserved_slot_is_held_until_it_is_given_to_somebody_else(arena, slots, take):
    reserved = slots.reserve(0, take.forgotten.append)
    assert (reserved.slot, reserved.write_epoch, take.forgotten) == (1, arena.write_epoch(1), [1])
    assert slots.holds(reserved, 0)
    assert not slots.holds(reserved, 1), "it is live by now"
    slots.enter(1)
    assert not slots.holds(reserved, 0), "a thread of ours writes into it"
    slots.leave(1)
    take(0)
    assert not slots.holds(reserved, 0)


def test_a_slot_is_not_reserved_under_a_writer_and_held_under_its_own(arena, slots, take, writer):
    hold(writer, arena, 1)
    assert slots.reserve(0, take.forgotten.append) is None
    let_go(writer, arena, 1)
    reserved = slots.reserve(0, take.forgotten.append)
    hold(writer, arena, 1)
    assert slots.holds(reserved, 0), "whoever writes there was told of it"


def test_what_a_rollback_goes_back_to_is_not_reserved(arena, background, take):
    slots = Slots(arena, background, spared=lambda: 1)
    assert slots.reserve(0, take.forgotten.append) is None
    assert take.forgotten == []

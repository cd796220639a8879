import os

import pytest

from rollout_client import slot_lock
from weight_manager.arena import Arena
from weight_manager.errors import PushRefused
from weight_manager.slots import Slots


@pytest.fixture
def arena(tmp_path):
    arena = Arena.create(tmp_path, "t", 8192)
    yield arena
    arena.close(unlink=True)


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


def test_the_live_slot_is_never_given_away(arena):
    slots = Slots(arena)
    live = None
    for _ in range(6):
        slot, epoch = slots.take(live)
        assert slot != live
        assert epoch == arena.write_epoch(slot)
        live = slot


def test_every_taking_moves_the_write_epoch(arena):
    slots = Slots(arena)
    epochs = [slots.take(1) for _ in range(3)]
    assert epochs == [(0, 1), (0, 2), (0, 3)]


def test_a_slot_that_a_trainer_holds_is_stood_in_for_by_the_spare(arena, writer):
    slots = Slots(arena)
    hold(writer, arena, 1)
    assert not arena.backed(2)
    assert slots.take(0)[0] == 2
    assert arena.backed(2)
    assert slots.take(2)[0] == 0, "still held"
    let_go(writer, arena, 1)
    before = arena.write_epoch(2)
    assert slots.take(0)[0] == 1
    assert not arena.backed(2), "the spare's memory is given back"
    assert arena.write_epoch(2) > before, "whoever still reads it finds out"


def test_a_dead_trainer_holds_nothing(arena):
    fd = os.open(arena.path, os.O_RDWR)
    hold(fd, arena, 1)
    os.close(fd)
    assert Slots(arena).take(0)[0] == 1


def test_our_own_threads_hold_a_slot_too(arena):
    slots = Slots(arena)
    slots.enter(1)
    slots.enter(1)
    slots.leave(1)
    assert slots.take(0)[0] == 2
    slots.leave(1)
    assert slots.take(0)[0] == 1


def test_when_everything_is_held_the_push_may_come_again(arena, writer):
    hold(writer, arena, 1)
    hold(writer, arena, 2)
    with pytest.raises(PushRefused) as refused:
        Slots(arena).take(0)
    assert (refused.value.code, refused.value.retryable) == ("busy", True)


def test_a_lock_taken_late_sees_that_the_slot_has_moved_on(arena, writer):
    _, mine = Slots(arena).take(0)
    Slots(arena).take(0)
    hold(writer, arena, 1)
    assert arena.write_epoch(1) != mine

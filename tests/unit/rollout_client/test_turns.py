import threading
import time

import pytest

from rollout_client import turns as module
from rollout_client.arena_file import ArenaFile
from rollout_client.turns import ASKED_S, LATE_S, PATIENCE_S, Turns
from weight_manager.arena import Arena

THREADS = 2
SOON_S = 0.2
"""Far less than the patience, far more than a poll."""


@pytest.fixture
def arena(tmp_path):
    with Arena.create(tmp_path, "turns", 4096) as made, ArenaFile(made.path, write=True) as opened:
        yield opened


@pytest.fixture
def turns(arena):
    return Turns(arena)


def waited(turns):
    began = time.monotonic()
    turns.wait(threading.Event())
    return time.monotonic() - began


def gap(arena, replica, seconds):
    arena.take_turn(replica, time.monotonic_ns() + int(seconds * 1e9))


def test_nobody_waits_who_was_not_held_up(arena, turns):
    arena.take_turn(0, THREADS)
    assert waited(turns) < SOON_S
    assert not arena.asked_for_turns()


def test_who_was_held_up_asks_until_the_push_is_over(arena, turns):
    turns.crowded()
    assert arena.asked_for_turns()
    turns.over()
    assert not arena.asked_for_turns()


def test_an_ask_of_a_trainer_that_died_is_forgotten(arena, monkeypatch):
    monkeypatch.setattr(module, "ASKED_S", 0.05)
    Turns(arena).crowded()
    assert arena.asked_for_turns()
    time.sleep(0.06)
    assert not arena.asked_for_turns()


def test_words_that_nobody_honest_writes_are_not_believed(arena):
    arena.ask_for_turns(time.monotonic_ns() + 10**12)
    assert not arena.asked_for_turns()
    arena.ask_for_turns(2**64 - 1)
    assert not arena.asked_for_turns()


def test_the_copy_waits_for_the_gap_after_a_step(arena, turns):
    arena.take_turn(3, THREADS)
    turns.crowded()
    release = threading.Timer(0.1, gap, (arena, 3, 0.2))
    release.start()
    took = waited(turns)
    release.join()
    assert 0.1 <= took < 0.1 + SOON_S


def test_one_replica_in_a_gap_is_enough(arena, turns):
    arena.take_turn(0, THREADS)
    gap(arena, 1, 0.2)
    turns.crowded()
    assert waited(turns) < SOON_S


def test_the_end_of_a_gap_is_not_used(arena, turns):
    arena.take_turn(0, THREADS)
    gap(arena, 1, module.SHORTEST_S / 2)
    turns.crowded()
    assert waited(turns) >= PATIENCE_S - 0.05


def test_nobody_is_waited_for_for_long(arena, turns):
    arena.take_turn(0, THREADS)  # and killed there
    turns.crowded()
    assert PATIENCE_S - 0.05 <= waited(turns) < PATIENCE_S + SOON_S
    time.sleep(ASKED_S - PATIENCE_S)
    assert waited(turns) < SOON_S


def test_replicas_that_do_not_compute_are_not_waited_for(arena, turns):
    gap(arena, 0, -2 * LATE_S)  # its last step is long over
    turns.crowded()
    assert waited(turns) < SOON_S


def test_a_replica_whose_gap_is_just_over_is_about_to_compute(arena, turns):
    gap(arena, 0, 0.0)
    turns.crowded()
    assert LATE_S * 0.9 < waited(turns) < LATE_S + SOON_S


def test_where_every_core_computes_a_push_asks_before_it_was_held_up(arena, turns, monkeypatch):
    monkeypatch.setattr(module.os, "cpu_count", lambda: 4)
    for replica, word in ((0, 2), (1, 1), (2, time.monotonic_ns() + 10**8)):
        arena.take_turn(replica, word)
    turns.begin()
    assert not arena.asked_for_turns()
    arena.take_turn(2, 1)
    turns.begin()
    assert arena.asked_for_turns()


def test_a_push_that_ends_does_not_wait(arena, turns):
    arena.take_turn(0, THREADS)
    turns.crowded()
    stop = threading.Event()
    stop.set()
    began = time.monotonic()
    turns.wait(stop)
    assert time.monotonic() - began < SOON_S


def test_replicas_beyond_the_page_have_no_word(arena):
    before = arena.turns().copy()
    arena.take_turn(len(before), THREADS)
    assert (arena.turns() == before).all()
    arena.take_turn(len(before) - 1, THREADS)
    assert arena.turns()[-1] == THREADS

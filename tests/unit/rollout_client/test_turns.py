import os
import threading
import time

import pytest

from rollout_client import turns as module
from rollout_client.arena_file import MOST_REPLICAS, NEAR_NS, ArenaFile, take_turn
from rollout_client.turns import LATE_S, Turns
from weight_manager.arena import Arena

CORES = THREADS = 2
PATIENCE_S, SOON_S = 1.5, 0.7
"""Soon is far less than the patience, and far more than a poll on a busy machine."""


@pytest.fixture
def arena(tmp_path):
    with Arena.create(tmp_path, "turns", 4096) as made, ArenaFile(made.path, write=True) as opened:
        yield opened


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))


@pytest.fixture
def turns(arena):
    return Turns(arena, CORES)


def step(arena, replica=0, threads=THREADS, age_s=0.0, usual_s=0.0):
    take_turn(arena.path, replica, threads, time.monotonic_ns() - int(age_s * 1e9), gap=False, usual_s=usual_s)


def gap(arena, replica=0, threads=THREADS, seconds=1.5):
    take_turn(arena.path, replica, threads, time.monotonic_ns() + int(seconds * 1e9), gap=True)


def waited(turns, stop=None):
    began = time.monotonic()
    turns.take(stop or threading.Event())
    turns.give_back()
    return time.monotonic() - began


def test_a_push_asks_where_every_core_computes_and_only_there(arena, turns):
    step(arena, 0, 1)
    turns.begin()
    assert not arena.asked_for_turns()
    step(arena, 1, 1)
    turns.begin()
    assert arena.asked_for_turns()
    turns.over()
    assert not arena.asked_for_turns()


def test_who_is_held_up_asks_only_if_steps_may_be_the_cause(arena, turns):
    turns.held_up()  # by a disk, or by another program
    assert not arena.asked_for_turns()
    step(arena, 0, 1)
    turns.held_up()
    assert arena.asked_for_turns()


def test_nobody_waits_who_has_not_asked(arena, turns):
    step(arena, 0, 1)
    turns.begin()
    assert waited(turns) < SOON_S


def test_an_ask_of_a_trainer_that_died_is_forgotten(arena, monkeypatch):
    monkeypatch.setattr(module, "ASKED_S", 0.05)
    step(arena)
    Turns(arena, CORES).begin()
    assert arena.asked_for_turns()
    time.sleep(0.06)
    assert not arena.asked_for_turns()


@pytest.mark.parametrize("word", [10**12, 2**62])
def test_words_that_nobody_honest_writes_are_not_believed(arena, turns, word):
    arena.ask_for_turns(time.monotonic_ns() + word)
    assert not arena.asked_for_turns()
    step(arena)
    turns.begin()
    take_turn(arena.path, 1, 1, time.monotonic_ns() + word, gap=True)
    assert waited(turns) >= PATIENCE_S * 0.9


def test_the_copy_waits_for_the_gap_after_a_step(arena, turns):
    step(arena)
    turns.begin()
    release = threading.Timer(0.1, gap, (arena,))
    release.start()
    took = waited(turns)
    release.join()
    assert 0.1 <= took < 0.1 + SOON_S


def test_nothing_of_a_push_is_done_before_the_gap(arena, turns):
    step(arena)
    turns.begin()
    release = threading.Timer(0.1, gap, (arena,))
    began = time.monotonic()
    release.start()
    assert turns.wait(began + 30)
    took = time.monotonic() - began
    release.join()
    assert 0.1 <= took < 0.1 + SOON_S
    assert waited(turns) < SOON_S


def test_who_has_waited_in_vain_before_a_push_does_not_wait_again_for_its_copies(arena, turns):
    step(arena)
    turns.begin()
    began = time.monotonic()
    assert turns.wait(began + 30)
    assert PATIENCE_S * 0.9 < time.monotonic() - began < PATIENCE_S + SOON_S
    turns.begin()
    assert waited(turns) < SOON_S


def test_as_many_copy_as_there_are_cores_without_steps(arena, turns):
    step(arena, 0, 1)
    step(arena, 1, 1)
    turns.begin()
    gap(arena, 1, 1)
    turns.take(threading.Event())
    second = threading.Thread(target=turns.take, args=(threading.Event(),))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    turns.give_back()
    second.join(SOON_S)
    assert not second.is_alive()


def test_the_end_of_a_gap_is_not_used(arena, turns):
    step(arena)
    turns.begin()
    gap(arena, seconds=module.SHORTEST_S / 2)
    took = waited(turns)
    assert LATE_S * 0.9 < took < LATE_S + SOON_S  # a step was to follow, and did not


def test_without_gaps_a_push_is_patient_once_and_not_again_for_every_copy(arena, turns, monkeypatch):
    step(arena)
    turns.begin()
    assert PATIENCE_S * 0.9 <= waited(turns) < PATIENCE_S + SOON_S
    for _ in range(5):
        assert waited(turns) < SOON_S
    gap(arena)
    assert waited(turns) < SOON_S
    step(arena)
    assert waited(turns) >= PATIENCE_S * 0.9  # there are gaps after all


def test_a_replica_that_died_in_a_step_is_forgotten(arena, turns):
    step(arena, age_s=1.1 * NEAR_NS / 1e9)
    turns.begin()
    assert not arena.asked_for_turns()


def test_replicas_that_do_not_compute_are_not_waited_for(arena, turns):
    step(arena)
    turns.begin()
    gap(arena, seconds=-2 * LATE_S)  # its last step is long over
    assert waited(turns) < SOON_S


def test_of_the_threads_that_wait_one_looks_for_all(arena, turns, monkeypatch):
    step(arena)
    turns.begin()
    looked = []
    computing = turns._computing
    monkeypatch.setattr(turns, "_computing", lambda: looked.append(1) or computing())
    threads = [threading.Thread(target=waited, args=(turns,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    found = len(looked)
    gap(arena)
    for thread in threads:
        thread.join()
    assert 0 < found <= 0.25 / module.POLL_S


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], module.POLL_S),
        ([(0.0, 0.03)], 0.03),
        ([(0.0, 0.03), (0.02, 0.03)], 0.01),
        ([(0.0, 3.0)], module.LONGEST_POLL_S),
        ([(0.06, 0.03)], 0.03 / 8),
        ([(0.9, 0.03)], module.LONGEST_POLL_S / 5),
        ([(0.0, 0.0)], module.POLL_S),
    ],
)
def test_a_gap_is_looked_for_when_the_step_should_end(arena, turns, steps, expected, monkeypatch):
    """steps: (age, usual length)."""
    now = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    for replica, (age_s, usual_s) in enumerate(steps):
        step(arena, replica, age_s=age_s, usual_s=usual_s)
    assert turns._until_a_gap() == pytest.approx(expected)


def test_how_long_steps_take_says_nothing_of_their_threads(arena, turns):
    step(arena, 0, 1, usual_s=3600.0)
    assert turns._computing() == (1, 0)
    gap(arena, 0, 1)
    assert turns._computing() == (0, 1)


def test_a_push_that_ends_does_not_wait(arena, turns):
    step(arena)
    turns.begin()
    stop = threading.Event()
    stop.set()
    assert waited(turns, stop) < SOON_S


def test_publishers_leave_each_others_asks_alone(arena, turns):
    other = Turns(arena, CORES)
    step(arena)
    turns.begin()
    time.sleep(0.01)
    other.begin()
    turns.over()
    assert arena.asked_for_turns()
    arena.ask_for_turns(0)  # as an older one might
    release = threading.Timer(0.05, gap, (arena,))
    release.start()
    waited(other)
    release.join()
    assert arena.asked_for_turns()


def test_the_last_replica_with_a_place_has_one(arena):
    step(arena, MOST_REPLICAS - 1)
    assert arena.turns()[-1][0] == 2 * THREADS

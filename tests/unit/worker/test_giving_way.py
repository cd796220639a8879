import time

import pytest

from rollout_client.arena_file import MOST_THREADS, ArenaFile
from weight_manager.arena import Arena
from worker.config import WorkerConfig
from worker.cpu import openmp
from worker.giving_way import LONGEST_S, SPIN_MS, GivingWay

REPLICA, THREADS = 2, 3
SHARE = WorkerConfig.model_fields["push_gap"].default


@pytest.fixture
def arena(tmp_path):
    with Arena.create(tmp_path, "giving", 4096) as made, ArenaFile(made.path, write=True) as opened:
        yield opened


@pytest.fixture
def giving():
    return GivingWay(REPLICA, THREADS, SHARE, lambda: 100.0)


def ask(arena):
    arena.ask_for_turns(time.monotonic_ns() + 10**9)


def test_steps_follow_each_other_while_nobody_asks(arena, giving):
    giving.begin(str(arena.path))
    assert arena.turns()[REPLICA] == THREADS
    giving.ended(0.1)
    assert giving.until == 100.0  # which is now
    assert not arena.turns().any()


def test_a_gap_follows_each_step_while_somebody_asks(arena, giving):
    ask(arena)
    giving.begin(str(arena.path))
    assert arena.turns()[REPLICA] == THREADS
    giving.ended(0.1)
    assert giving.until == pytest.approx(100.0 + SHARE * 0.1)
    assert 0 < int(arena.turns()[REPLICA]) - time.monotonic_ns() <= SHARE * 0.1 * 1e9
    arena.ask_for_turns(0)
    giving.begin(str(arena.path))
    giving.ended(0.1)
    assert not arena.turns().any()


def test_a_token_with_its_gap_takes_less_than_two_steps():
    assert SHARE < 1.0


def test_no_gap_is_longer_than_a_commit_can_bear(arena, giving):
    ask(arena)
    giving.begin(str(arena.path))
    giving.ended(60.0)
    assert giving.until == 100.0 + SHARE * LONGEST_S


def test_a_step_that_was_held_up_makes_its_gap_no_longer(arena, giving):
    giving.begin(str(arena.path))
    giving.ended(0.1)
    ask(arena)
    giving.begin(str(arena.path))
    giving.ended(0.3)
    assert giving.until == pytest.approx(100.0 + SHARE * 0.1)


def test_the_store_may_come_back_with_another_arena(arena, giving, tmp_path):
    giving.begin(str(arena.path))
    with Arena.create(tmp_path, "other", 4096) as other, ArenaFile(other.path, write=True) as opened:
        ask(opened)
        giving.begin(str(other.path))
        assert opened.turns()[REPLICA] == THREADS
        giving.ended(0.1)
        assert int(opened.turns()[REPLICA]) > MOST_THREADS
    assert arena.turns()[REPLICA] == THREADS  # as it was left


@pytest.mark.parametrize("path", ["", "/nowhere/an.arena"])
def test_without_an_arena_nobody_asks(giving, path):
    giving.begin(path)
    giving.ended(0.1)
    assert giving.until == 0.0


@pytest.mark.parametrize(("threads", "share"), [(0, SHARE), (THREADS, 0.0)])
def test_on_a_gpu_or_where_it_is_not_wanted_there_are_no_gaps(arena, threads, share):
    ask(arena)
    giving = GivingWay(REPLICA, threads, share, lambda: 100.0)
    giving.begin(str(arena.path))
    giving.ended(0.1)
    assert giving.until == 0.0
    assert not arena.turns().any()


def test_threads_spin_less_while_gaps_are_left(arena, giving, monkeypatch):
    spun = []
    monkeypatch.setattr(openmp, "spin", spun.append)
    ask(arena)
    for _ in range(2):
        giving.begin(str(arena.path))
        giving.ended(0.1)
    arena.ask_for_turns(0)
    giving.begin(str(arena.path))
    giving.ended(0.1)
    assert spun == [SPIN_MS, openmp.USUAL_MS]

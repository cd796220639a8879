import time
from pathlib import Path

import pytest

from rollout_client.arena_file import MOST_REPLICAS, ArenaFile
from weight_manager.arena import Arena
from worker.config import WorkerConfig
from worker.cpu import openmp
from worker.giving_way import LONGEST_S, SHORT_S, SPIN_MS, GivingWay

REPLICA, THREADS = 2, 3
SHARE = WorkerConfig.model_fields["push_gap"].default
STEP, GAP = 2 * THREADS, 2 * THREADS + 1


@pytest.fixture
def arena(tmp_path):
    with Arena.create(tmp_path, "giving", 4096) as made, ArenaFile(made.path, write=True) as opened:
        yield opened


@pytest.fixture
def path(arena):
    return str(arena.path)


@pytest.fixture
def giving():
    return GivingWay(REPLICA, THREADS, SHARE, lambda: 100.0)


def turn(arena):
    """(what, seconds from now)."""
    what, moment = arena.turns()[REPLICA]
    return int(what), (int(moment) - time.monotonic_ns()) / 1e9


def test_steps_follow_each_other_while_nobody_asks(arena, path, giving):
    giving.begin(path)
    what, since = turn(arena)
    assert (what, -0.2 < since <= 0) == (STEP, True)
    giving.ended(path, 0.1, asked=False)
    assert giving.until == 100.0  # which is now
    what, until = turn(arena)
    assert (what, -0.2 < until <= 0) == (GAP, True)


def test_a_gap_follows_each_step_while_somebody_asks(arena, path, giving):
    giving.begin(path)
    giving.ended(path, 0.1, asked=True)
    assert giving.until == pytest.approx(100.0 + SHARE * 0.1)
    what, until = turn(arena)
    assert what == GAP
    assert 0 < until <= SHARE * 0.1


def test_a_token_with_its_gap_takes_less_than_two_steps():
    assert SHARE < 1.0


def test_no_gap_is_longer_than_a_commit_can_bear(path, giving):
    giving.ended(path, 60.0, asked=True)
    assert giving.until == 100.0 + SHARE * LONGEST_S


def test_a_step_that_was_held_up_makes_its_gap_no_longer(path, giving):
    for _ in range(50):
        giving.ended(path, 0.1, asked=False)
    giving.ended(path, 0.3, asked=True)
    assert giving.until == pytest.approx(100.0 + SHARE * 0.1, rel=0.01)


def test_short_steps_are_left_alone_and_nobody_waits_for_their_gaps(arena, path, giving):
    for _ in range(50):
        giving.ended(path, SHORT_S / 2, asked=False)
    before = arena.turns().copy()
    giving.begin(path)
    giving.ended(path, SHORT_S / 2, asked=True)
    assert giving.until == 100.0
    assert (arena.turns() == before).all()


def test_an_arena_that_was_left_is_not_kept(path, giving):
    def held():
        return [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()].count(Path(path))

    before = held()  # by the fixture
    giving.begin(path)
    giving.ended(path, 0.1, asked=True)
    assert held() == before


@pytest.mark.parametrize("path", ["", "/nowhere/an.arena"])
def test_without_an_arena_steps_go_on(giving, path):
    giving.begin(path)
    giving.ended(path, 0.1, asked=False)
    assert giving.until == 100.0


@pytest.mark.parametrize(
    ("replica", "threads", "share"), [(REPLICA, 0, SHARE), (REPLICA, THREADS, 0.0), (MOST_REPLICAS, THREADS, SHARE)]
)
def test_on_a_gpu_or_where_it_is_not_wanted_there_are_no_gaps(arena, path, replica, threads, share):
    giving = GivingWay(replica, threads, share, lambda: 100.0)
    giving.begin(path)
    giving.ended(path, 0.1, asked=True)
    assert giving.until == 0.0
    assert not arena.turns().any()


def test_threads_spin_less_while_gaps_are_left(path, giving, monkeypatch):
    spun = []
    monkeypatch.setattr(openmp, "spin", spun.append)
    for asked in (True, True, False, False):
        giving.ended(path, 0.1, asked=asked)
    assert spun == [SPIN_MS, openmp.USUAL_MS]

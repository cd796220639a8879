import time
from pathlib import Path

import pytest

from rollout_client.arena_file import MOST_REPLICAS, TURN_BITS, ArenaFile
from weight_manager.arena import Arena
from worker.config import WorkerConfig
from worker.cpu import openmp
from worker.giving_way import BEARABLE_S, LONGEST_S, LOOK_S, SHORT_S, SPIN_MS, GivingWay

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


LONG = 0.2
"""Seconds of a step whose share is more than what may always be borne."""
assert SHARE * LONG > BEARABLE_S - LONG > SHORT_S - LONG


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def giving(clock):
    return GivingWay(REPLICA, THREADS, SHARE, clock)


def gap_of(giving, clock):
    """Seconds until a step may begin if the push goes on; the clock is there then."""
    began = clock.now
    while (until := giving.until(lambda: True)) > clock.now:
        assert until <= clock.now + LOOK_S
        clock.now = until
    return clock.now - began


def turn(arena):
    """(what, seconds from now)."""
    what, moment = arena.turns()[REPLICA]
    return int(what) & (1 << TURN_BITS) - 1, (int(moment) - time.monotonic_ns()) / 1e9


def test_steps_follow_each_other_while_nobody_asks(arena, path, giving, clock):
    giving.begin(path)
    what, since = turn(arena)
    assert (what, -0.2 < since <= 0) == (STEP, True)
    giving.ended(path, LONG, asked=False)
    assert gap_of(giving, clock) == 0
    what, until = turn(arena)
    assert (what, -0.2 < until <= 0) == (GAP, True)


def test_a_gap_follows_each_step_while_somebody_asks(arena, path, giving, clock):
    giving.begin(path)
    giving.ended(path, LONG, asked=True)
    what, until = turn(arena)
    assert what == GAP
    assert 0 < until <= SHARE * LONG
    assert gap_of(giving, clock) == pytest.approx(SHARE * LONG)


def test_it_is_said_how_long_a_step_usually_takes(arena, path, giving):
    for _ in range(50):
        giving.ended(path, LONG, asked=False)
    giving.begin(path)
    assert int(arena.turns()[REPLICA][0]) >> TURN_BITS == pytest.approx(LONG * 1e6, rel=0.01)


def test_a_gap_is_over_with_its_push(path, giving, clock):
    giving.ended(path, LONG, asked=True)
    clock.now += 0.03
    assert giving.until(lambda: True) == pytest.approx(clock.now + LOOK_S)
    assert giving.until(lambda: False) <= clock.now
    assert giving.until(lambda: True) <= clock.now  # of another push: that has the next one


def test_a_token_with_its_gap_takes_less_than_two_steps_or_what_can_always_be_borne(path, giving, clock):
    assert SHARE < 1.0
    for step in (0.02, 0.05, 0.1, LONG, 0.4):
        for _ in range(50):
            giving.ended(path, step, asked=False)
        giving.ended(path, step, asked=True)
        assert step + gap_of(giving, clock) <= max(2 * step, BEARABLE_S) * 1.001


def test_short_steps_leave_gaps_in_which_something_can_be_done(path, giving, clock):
    for _ in range(50):
        giving.ended(path, 2 * SHORT_S, asked=False)
    giving.ended(path, 2 * SHORT_S, asked=True)
    assert gap_of(giving, clock) == pytest.approx(BEARABLE_S - 2 * SHORT_S, rel=0.02)


def test_no_gap_is_longer_than_a_commit_can_bear(path, giving, clock):
    giving.ended(path, 60.0, asked=True)
    assert gap_of(giving, clock) == pytest.approx(SHARE * LONGEST_S)


def test_a_step_that_was_held_up_makes_its_gap_no_longer(path, giving, clock):
    for _ in range(50):
        giving.ended(path, LONG, asked=False)
    giving.ended(path, 3 * LONG, asked=True)
    assert gap_of(giving, clock) == pytest.approx(SHARE * LONG, rel=0.01)


def test_a_step_that_begins_new_sequences_changes_nothing_for_those_after_it(path, giving, clock):
    for _ in range(50):
        giving.ended(path, LONG, asked=False)
    giving.ended(path, 10 * LONG, asked=False)
    giving.ended(path, LONG, asked=True)
    assert gap_of(giving, clock) == pytest.approx(SHARE * LONG)


def test_the_shortest_steps_are_left_alone_and_nobody_waits_for_their_gaps(arena, path, giving, clock):
    for _ in range(50):
        giving.ended(path, SHORT_S / 2, asked=False)
    before = arena.turns().copy()
    giving.begin(path)
    giving.ended(path, SHORT_S / 2, asked=True)
    assert gap_of(giving, clock) == 0
    assert (arena.turns() == before).all()


def test_an_arena_that_was_left_is_not_kept(path, giving):
    def held():
        return [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()].count(Path(path))

    before = held()  # by the fixture
    giving.begin(path)
    giving.ended(path, 0.1, asked=True)
    assert held() == before


@pytest.mark.parametrize("path", ["", "/nowhere/an.arena"])
def test_without_an_arena_steps_go_on(giving, clock, path):
    giving.begin(path)
    giving.ended(path, LONG, asked=False)
    assert gap_of(giving, clock) == 0


@pytest.mark.parametrize(
    ("replica", "threads", "share"), [(REPLICA, 0, SHARE), (REPLICA, THREADS, 0.0), (MOST_REPLICAS, THREADS, SHARE)]
)
def test_on_a_gpu_or_where_it_is_not_wanted_there_are_no_gaps(arena, path, clock, replica, threads, share):
    giving = GivingWay(replica, threads, share, clock)
    giving.begin(path)
    giving.ended(path, LONG, asked=True)
    assert gap_of(giving, clock) == 0
    assert not arena.turns().any()


def test_threads_spin_less_while_gaps_are_left(path, giving, monkeypatch):
    spun = []
    monkeypatch.setattr(openmp, "spin", spun.append)
    for asked in (True, True, False, False):
        giving.ended(path, LONG, asked=asked)
    assert spun == [SPIN_MS, openmp.USUAL_MS]

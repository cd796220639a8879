"""The lease from above: what is no time gives none."""

import time
from types import SimpleNamespace

import pytest

from weight_manager.arena import Arena, ArenaReader
from weight_manager.relay.lease import Lease, clock
from weight_manager.relay.messages import Holdings, VersionName


@pytest.fixture
def arena():
    arena = SimpleNamespace(needs_lease=True, leases=[])
    arena.lease = arena.leases.append
    return arena


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("-inf")])
def test_what_is_no_time_fences(arena, seconds):
    lease = Lease(arena, 2.0)
    lease.given(lease.ask(Holdings()), 1.0, Holdings())
    assert not lease.closed
    lease.given(lease.ask(Holdings()), seconds, Holdings())
    assert lease.closed
    assert arena.leases[-1] == 1


@pytest.mark.parametrize("seconds", [3.0, 1e300, float("inf")])
def test_no_lease_is_longer_than_a_full_one(arena, seconds):
    lease = Lease(arena, 2.0)
    before = clock()
    lease.given(lease.ask(Holdings()), seconds, Holdings())
    assert before + 2.0 <= lease.until <= clock() + 2.0


def test_a_lease_runs_out_while_the_machine_sleeps(tmp_path, monkeypatch):
    """The store above counts on, and commits without this one: whoever wakes up may serve nothing, nor may a rank."""
    with Arena.create(tmp_path, "t", 4096) as arena:
        lease = Lease(arena, 15.0)
        lease.given(lease.ask(Holdings()), 15.0, Holdings())
        with ArenaReader(arena.path) as rank:
            assert (lease.closed, rank.expired()) == (False, False)
            slept = 20.0 + clock() - time.monotonic()
            monkeypatch.setattr(time, "clock_gettime", lambda clock: time.monotonic() + slept)
            monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: int((time.monotonic() + slept) * 1e9))
            assert (lease.closed, rank.expired(), lease.left_s) == (True, True, 0.0)
        arena.close(unlink=True)


OLD, ADAPTER = VersionName("run", 1, "d" * 16), {"policy-a": VersionName("run", 1, "a" * 16)}


@pytest.mark.parametrize(
    "changed",
    [(VersionName("run", 2, "e" * 16), ADAPTER), (OLD, {"policy-a": VersionName("run", 2, "b" * 16)}), (OLD, {})],
)
def test_a_lease_that_was_asked_for_with_something_else_gives_nothing(arena, changed):
    old, new = Holdings(OLD, ADAPTER), Holdings(*changed)
    lease = Lease(arena, 2.0)
    lease.given(lease.ask(old), 2.0, new)
    assert lease.closed
    lease.given(lease.ask(new), 2.0, new)
    until = lease.until
    lease.given(lease.ask(old), 2.0, new)
    assert lease.until == until, "what was given stays: who gave it waits for it"
    lease.given(lease.ask(old), 0.0, new)
    assert lease.closed

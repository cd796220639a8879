"""The lease from above: what is no time gives none."""

import time
from types import SimpleNamespace

import pytest

from weight_manager.relay.lease import Lease
from weight_manager.relay.messages import Holdings, VersionName


@pytest.fixture
def arena():
    arena = SimpleNamespace(needs_lease=True, leases=[])
    arena.lease = arena.leases.append
    return arena


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("-inf")])
def test_what_is_no_time_fences(arena, seconds):
    lease = Lease(arena, 2.0)
    lease.given(lease.ask(time.monotonic(), Holdings()), 1.0, Holdings())
    assert not lease.closed
    lease.given(lease.ask(time.monotonic(), Holdings()), seconds, Holdings())
    assert lease.closed
    assert arena.leases[-1] == 1


@pytest.mark.parametrize("seconds", [3.0, 1e300, float("inf")])
def test_no_lease_is_longer_than_a_full_one(arena, seconds):
    lease = Lease(arena, 2.0)
    now = time.monotonic()
    lease.given(lease.ask(now, Holdings()), seconds, Holdings())
    assert lease.until == now + 2.0


OLD, ADAPTER = VersionName("run", 1, "d" * 16), {"policy-a": VersionName("run", 1, "a" * 16)}


@pytest.mark.parametrize(
    "changed",
    [(VersionName("run", 2, "e" * 16), ADAPTER), (OLD, {"policy-a": VersionName("run", 2, "b" * 16)}), (OLD, {})],
)
def test_a_lease_that_was_asked_for_with_something_else_gives_nothing(arena, changed):
    old, new = Holdings(OLD, ADAPTER), Holdings(*changed)
    lease = Lease(arena, 2.0)
    lease.given(lease.ask(time.monotonic(), old), 2.0, new)
    assert lease.closed
    lease.given(lease.ask(time.monotonic(), new), 2.0, new)
    until = lease.until
    lease.given(lease.ask(time.monotonic(), old), 2.0, new)
    assert lease.until == until, "what was given stays: who gave it waits for it"
    lease.given(lease.ask(time.monotonic(), old), 0.0, new)
    assert lease.closed

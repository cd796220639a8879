"""The lease from above: what is no time gives none."""

import time
from types import SimpleNamespace

import pytest

from weight_manager.relay.lease import Lease


@pytest.fixture
def arena():
    arena = SimpleNamespace(needs_lease=True, leases=[])
    arena.lease = arena.leases.append
    return arena


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("-inf")])
def test_what_is_no_time_fences(arena, seconds):
    lease = Lease(arena, 2.0)
    lease.given(lease.ask(time.monotonic()), 1.0)
    assert not lease.closed
    lease.given(lease.ask(time.monotonic()), seconds)
    assert lease.closed
    assert arena.leases[-1] == 1


@pytest.mark.parametrize("seconds", [3.0, 1e300, float("inf")])
def test_no_lease_is_longer_than_a_full_one(arena, seconds):
    lease = Lease(arena, 2.0)
    now = time.monotonic()
    lease.given(lease.ask(now), seconds)
    assert lease.until == now + 2.0

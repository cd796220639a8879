"""A push that may go live from device memory first, as its trainer lives it.

Tensors lie on the CPU, so that only what is said is looked at: what GPUs do is in tests/gpu.
"""

import threading
import time

import numpy as np
import pytest

from rollout_client import errors
from rollout_client import protocol as wire
from rollout_client.protocol import Copy
from rollout_client.publisher import WeightPublisher
from rollout_client.shm_transport import ShmTransport

A = np.arange(12, dtype=np.float32)
COPIES = [Copy(0, (12,), 0, (1,), 0, (1,), "float32")]
LATE_S = 0.05


@pytest.fixture
def ahead(store, monkeypatch):
    """A store that offers it, and a transport that takes the offer."""
    stage, broken = ShmTransport.stage, []

    def fills_first(self, placement, sources, reporter):
        if placement.ahead:
            reporter.go_ahead([(0, 7)])
            reporter.await_live()
            time.sleep(LATE_S)
            if broken:
                raise RuntimeError("CUDA error: unspecified launch failure")
        stage(self, placement, sources, reporter)

    def place(begin, _):
        place_of, size = store.arena.slot_offset(0), store.arena.slot_bytes
        asked = begin.durability == "device"
        return wire.Placement("s", store.lease_s, place_of, size, COPIES, store.arena.bump(0), ahead=asked)

    monkeypatch.setattr(ShmTransport, "stage", fills_first)
    monkeypatch.setattr(WeightPublisher, "_to_devices", lambda *_: True)
    store.on[wire.Begin] = place
    store.on[wire.Ahead] = lambda m, _: wire.IsLive(m.session, 3, "0" * 16, 1)
    store.broken = broken
    return store


@pytest.fixture
def push(publisher, caplog):
    def do():
        report = publisher(transport="cuda_ipc", durability="device").push({"a": A}, 3)
        return report, [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]

    return do


def test_it_is_told_when_it_is_live_and_returns_when_the_arena_has_it(ahead, push):
    report, warnings = push()
    assert 0 < report.live_s < report.seconds["total"] - LATE_S / 2
    assert (report.safe, warnings) == (True, [])
    assert [m.digests for m in ahead.of(wire.Ahead)] == [[(0, 7)]]
    assert len(ahead.digests) == len(ahead.of(wire.Seal)) == 1


def test_an_offer_that_does_not_stand_any_more_is_said_once(ahead, push):
    ahead.on[wire.Ahead] = lambda m, _: wire.NotAhead(m.session, "another replica came")
    report, warnings = push()
    assert report.live_s == report.seconds["total"]
    assert warnings == ["this version goes live by the arena: another replica came"]


@pytest.mark.parametrize("waits_for_sequences", [False, True])
def test_the_way_into_the_arena_waits_for_the_commit_a_moment_only(ahead, publisher, monkeypatch, waits_for_sequences):
    went_on, knew = threading.Event(), []

    def stage(self, placement, sources, reporter):
        reporter.go_ahead([(0, 7)])
        reporter.pause_for_live(0.05 if waits_for_sequences else 30.0)
        knew.append(reporter.live_at is not None)
        went_on.set()

    def live(asked, _):
        if waits_for_sequences:
            assert went_on.wait(30)
        return wire.IsLive(asked.session, 3, "0" * 16, 1)

    monkeypatch.setattr(ShmTransport, "stage", stage)
    ahead.on[wire.Ahead] = live
    publisher(transport="cuda_ipc", durability="device").push({"a": A}, 3)
    assert knew == [not waits_for_sequences]


def test_a_store_that_does_not_offer_it_says_why(ahead, push):
    place = ahead.on[wire.Begin]

    def refuses(begin, payload):
        offered = place(begin, payload)
        return wire.Placement(*[getattr(offered, f) for f in offered.__struct_fields__[:6]], not_ahead="tp is 2")

    ahead.on[wire.Begin] = refuses
    report, warnings = push()
    assert report.safe
    assert warnings == ["this version goes live by the arena: tp is 2"]


def test_a_rank_that_refuses_has_it_pushed_by_the_arena(ahead, push):
    ahead.on[wire.Ahead] = lambda m, _: wire.Error("refused", "replica 0 rank 0 cannot prepare", m.session)
    report, warnings = push()
    assert [begin.durability for begin in ahead.of(wire.Begin)] == ["device", "arena"]
    assert report.live_s == report.seconds["total"]
    assert warnings == ["this version goes live by the arena: replica 0 rank 0 cannot prepare [refused]"]


def test_what_no_way_could_take_is_raised(ahead, push):
    ahead.on[wire.Ahead] = lambda m, _: wire.Error("stale_version", "went live before", m.session)
    with pytest.raises(errors.StaleVersion):
        push()


def test_a_trainer_that_fails_after_it_is_live_leaves_the_arena_to_the_service(ahead, push):
    ahead.broken.append(True)
    report, warnings = push()
    assert (report.version, report.safe) == (3, False)
    assert [m.session for m in ahead.of(wire.Abort)] == ["s"]
    assert "could not be brought into the arena from here: CUDA error" in warnings[0]

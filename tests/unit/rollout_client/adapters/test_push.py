import pytest

from rollout_client.adapters.push import Pusher
from tests.unit.rollout_client.adapters.scripted import ScriptedPublisher


def test_versions_count_up_from_one_and_counters_add_up(publishers):
    with Pusher(run_id="r") as push:
        push({"w": 1})
        push({"w": 2})
        push({"w": 3}, version=10)
        push({"w": 4})
    assert [version for _, version, _ in publishers[0].pushed] == [1, 2, 10, 11]
    assert push.counters == {
        "pushes": 4,
        "bytes": 32,
        "seconds": 2.0,
        "last_seconds": 0.5,
        "stall_ms_max": 11.0,
        "version": 11,
        "replicas": 1,
    }
    assert publishers[0].closed


def test_a_run_that_starts_again_goes_on_where_it_stopped(publishers, monkeypatch):
    monkeypatch.setattr(ScriptedPublisher, "live_run", "r")
    monkeypatch.setattr(ScriptedPublisher, "live_version", 41)
    push = Pusher(run_id="r")
    push({"w": 1})
    assert push.version == 42


def test_another_runs_versions_are_not_ours(publishers, monkeypatch):
    monkeypatch.setattr(ScriptedPublisher, "live_run", "other")
    monkeypatch.setattr(ScriptedPublisher, "live_version", 41)
    push = Pusher(run_id="r")
    push({"w": 1})
    assert push.version == 1


def test_a_refused_push_counts_for_nothing(publishers):
    push = Pusher(run_id="r")
    publishers[0].error = RuntimeError("no")
    with pytest.raises(RuntimeError):
        push({"w": 1})
    assert push.version is None
    assert push.counters["pushes"] == 0

from rollout_client.adapters.metrics import flat
from rollout_client.http_calls import LiveVersion, PauseState, Weights
from rollout_client.push_report import PushReport


def test_a_push_report_becomes_one_level_of_floats():
    report = PushReport(3, "ab", 2, 100, "shm", {"total": 0.5, "move": 0.25}, {"0": 4.0, "1": 5.0})
    wanted = {
        "rollout/version": 3.0,
        "rollout/replicas": 2.0,
        "rollout/nbytes": 100.0,
        "rollout/seconds/total": 0.5,
        "rollout/seconds/move": 0.25,
        "rollout/stall_ms/0": 4.0,
        "rollout/stall_ms/1": 5.0,
        "rollout/already": 0.0,
    }
    found = flat(report)
    assert {name: found[name] for name in wanted} == wanted
    assert all(type(value) is float for value in found.values())


def test_messages_within_messages():
    weights = Weights(LiveVersion("r", 7, 9, "d"), [], True, history=[{"version": 1, "source": "disk"}])
    found = flat(weights, prefix="w/")
    assert found == {"w/live/version": 7.0, "w/live/epoch": 9.0, "w/store_connected": 1.0, "w/history/0/version": 1.0}


def test_what_is_not_there_is_left_out():
    assert flat(PauseState(paused=True, held=2)) == {"rollout/paused": 1.0, "rollout/held": 2.0}
    assert flat({"a": None, "b": "text", "c": {"d": 1}}, prefix="") == {"c/d": 1.0}

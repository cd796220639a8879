import json
import threading

import pytest

from worker.gpu import warming
from worker.gpu.driver import CudaError


@pytest.fixture
def asked(monkeypatch):
    found = []
    monkeypatch.setattr(warming, "Driver", found.append)
    monkeypatch.setattr(warming, "load", lambda name, wheel: found.append(wheel))
    return found


def begin(tmp_path, text, replica=0, rank=0):
    (tmp_path / "config.json").write_text(text)
    thread = warming.begin(tmp_path / "config.json", replica, rank)
    if thread is not None:
        thread.join(30)
    return thread


def test_the_device_that_a_rank_will_compute_on_is_entered_beside_its_imports(tmp_path, asked):
    thread = begin(tmp_path, json.dumps({"worker": {"device": "gpu", "tp": 2}}), replica=3, rank=1)
    assert thread is not threading.current_thread()
    assert asked == [7, "nvidia-cublas"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"worker": 1}',
        '{"worker": {"device": "cpu"}}',
        '{"worker": {"device": "gpu", "engine": "tests.fake_engine:made"}}',
    ],
)
def test_a_rank_without_a_device_or_a_good_config_touches_none(tmp_path, asked, text):
    assert begin(tmp_path, text) is None
    assert not asked


@pytest.mark.parametrize("error", [OSError("no library"), CudaError("no GPU is visible here")])
def test_what_is_wrong_with_a_device_is_left_for_the_engine_to_say(tmp_path, asked, monkeypatch, error):
    def fails(ordinal):
        raise error

    monkeypatch.setattr(warming, "Driver", fails)
    assert begin(tmp_path, '{"worker": {"device": "gpu"}}') is not None  # its thread ends without a word: a warning
    assert not asked  # would fail this test, as all do here

"""First weights that take long: the start has a bound of its own, the log says how far it is, an error what to set."""

import json
import os

import pytest

from tests.faults.store_process import started_as

SLOW = """
    import sys, time
    from weight_manager import __main__, checkpoint, disk, first_weights, snapshot

    disk.SAID_EVERY_S = 0.2
    read_into, goes_on = checkpoint.TensorFile.read_into, disk.Loading.goes_on

    def slow(self, *arguments):
        time.sleep(0.1)
        read_into(self, *arguments)

    def slow_snapshot(path, layout, slot, loading):
        for _ in range(100):
            time.sleep(0.1)
            loading.goes_on()
        return snapshot.read_snapshot(path, layout, slot, loading)

    checkpoint.TensorFile.read_into = slow
    first_weights.read_snapshot = slow_snapshot
    sys.exit(__main__.main())
"""


@pytest.fixture
def slow(launch, monkeypatch):
    """Starts a store whose disk needs a tenth of a second for each tensor, of which there are over ten."""

    def start(**config):
        with started_as(SLOW, monkeypatch):
            return launch(**config)

    return start


def said(store):
    return [json.loads(line)["message"] for line in (store.run_dir / "log").read_text().splitlines()]


def test_first_weights_may_take_longer_than_a_request(slow):
    store = slow(max_deadline_s=0.5).wait_live()
    assert store.status().live.version == 0
    assert [line for line in said(store) if "GB read" in line], "the log says how far it is"


def test_first_weights_that_take_too_long_end_the_start_with_the_option_to_change(slow):
    store = slow(first_load_s=0.5)
    assert store.process.wait(30) == os.EX_CONFIG
    (last,) = [line for line in said(store) if "first weights" in line]
    assert "GB read" in last
    assert "store.first_load_s" in last


@pytest.mark.parametrize("store_config", [{"snapshot": True}])
def test_a_snapshot_that_is_slow_to_read_is_not_given_up_for_the_weights_of_the_first_day(
    store, push, weights, monkeypatch
):
    push(weights(1), 1)
    store.end()
    config = json.loads(store.config_file.read_text())
    config["store"]["first_load_s"] = 0.5
    store.config_file.write_text(json.dumps(config))
    with started_as(SLOW, monkeypatch):
        store.start()
    assert store.process.wait(30) == os.EX_CONFIG
    assert "store.first_load_s" in "".join(said(store))

"""The store's loop itself fails, for whatever reason: what is live must survive that as it survives a kill."""

import json
import signal

import pytest

from rollout_client import errors
from tests.faults.store_process import restart_as

FAILS = """
    import sys
    from weight_manager import __main__, store

    receive = store.Store._receive

    def fails(self, turn_s):
        heard = receive(self, turn_s)
        if (self._config.run_dir / "fail").exists():
            (self._config.run_dir / "fail").unlink()
            raise OSError(28, "No space left on device")
        return heard

    store.Store._receive = fails
    sys.exit(__main__.main())
"""


@pytest.fixture
def failing(store, monkeypatch):
    """A store whose loop can be made to fail."""
    restart_as(store, FAILS, monkeypatch)
    return store


def test_what_is_live_outlives_a_loop_that_failed(failing, replica, push, weights, digest_of, until):
    r = replica()
    push(weights(7), 7)
    (failing.run_dir / "fail").touch()
    assert failing.process.wait(10) == 1, "a beat of the replica has it turn"
    assert len(list(failing.arena_dir.iterdir())) == 1
    records = [json.loads(line) for line in (failing.run_dir / "log").read_text().splitlines()]
    assert "No space left" in next(r for r in records if "has failed" in r["message"])["traceback"]
    failing.log.close()
    failing.start()
    failing.wait_live()
    assert failing.serving() == r.served() == (7, digest_of(weights(7)))
    until(lambda: failing.status().replicas.get("0", {}).get("ready"))
    with pytest.raises(errors.StaleVersion):
        push(weights(6), 6)
    assert push(weights(8), 8).replicas == 1


def test_a_stop_that_fails_leaves_nothing_in_shared_memory(failing):
    failing.process.send_signal(signal.SIGSTOP)  # it must be told to stop before it fails
    (failing.run_dir / "fail").touch()
    failing.process.send_signal(signal.SIGTERM)
    failing.process.send_signal(signal.SIGCONT)
    assert failing.process.wait(10) == 1
    assert list(failing.arena_dir.iterdir()) == []

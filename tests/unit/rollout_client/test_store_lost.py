"""A store that dies under a push and is back soon: the trainer asks it, and does not wait for its own deadline."""

import threading
import time

import numpy as np
import pytest

from rollout_client import errors
from rollout_client import protocol as wire
from rollout_client.protocol import Copy

TENSORS = {"a": np.arange(12, dtype=np.float32)}
COPIES = [Copy(0, (12,), 0, (1,), 0, (1,), "float32")]
DOWN_S = 0.3


@pytest.fixture
def dies(store):
    """At the first message of this kind; comes back, then `after` says what is live."""

    def at(kind, after=lambda: None, seconds=DOWN_S):
        before = store.on[kind]

        def die(message, payload):
            store.vanish()
            time.sleep(seconds)
            after()
            known = store.welcome
            store.welcome = lambda: known(store_id="another")
            store.on[kind] = before
            lost = lambda m, _: wire.Error("unknown_session", "not known", m.session)  # noqa: E731
            store.on |= dict.fromkeys(
                [wire.Seal, wire.Commit, wire.Abort] if kind in (wire.Seal, wire.Commit) else [], lost
            )
            store.come_back()

        store.on[kind] = die

    return at


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("kind", [wire.Hello, wire.Begin])
def test_a_push_that_has_staged_nothing_begins_anew(store, publisher, dies, kind, transport):
    store.place(COPIES)
    dies(kind)
    began = time.monotonic()
    assert publisher(transport=transport, connect_timeout_s=60.0).push(TENSORS, 1, timeout_s=60).version == 1
    assert time.monotonic() - began < DOWN_S + 2
    assert len(store.of(wire.Hello)) == 2


@pytest.mark.parametrize("kind", [wire.Seal, wire.Commit])
def test_a_session_that_is_lost_fails_when_the_store_is_back(store, publisher, dies, kind):
    store.place(COPIES)
    dies(kind)
    began = time.monotonic()
    with pytest.raises(errors.StoreUnavailable, match="lost"):
        publisher().push(TENSORS, 1, timeout_s=60)
    assert time.monotonic() - began < DOWN_S + 2


def test_a_commit_that_was_written_down_before_is_found(store, publisher, dies):
    store.place(COPIES)
    dies(wire.Commit, after=lambda: setattr(store, "live", ("r", 1)))
    began = time.monotonic()
    assert publisher().push(TENSORS, 1, timeout_s=60).version == 1
    assert time.monotonic() - began < DOWN_S + 2


def test_a_store_that_only_lost_the_connection_is_given_time_to_commit(store, publisher):
    store.place(COPIES)

    def cut(message, payload):
        store.vanish()
        store.come_back()
        threading.Timer(0.7, lambda: setattr(store, "live", ("r", 1))).start()

    store.on[wire.Commit] = cut
    began = time.monotonic()
    assert publisher().push(TENSORS, 1, timeout_s=60).version == 1
    assert time.monotonic() - began < 3


def test_a_store_that_stays_away_is_waited_for_to_the_deadline(store, publisher, monkeypatch):
    monkeypatch.setattr("rollout_client.store_link.REPLY_MARGIN_S", 0.2)
    monkeypatch.setattr("rollout_client.store_link.ABORT_S", 0.1)
    store.place(COPIES)
    store.on[wire.Seal] = lambda m, _: store.vanish()
    began = time.monotonic()
    with pytest.raises(errors.StoreUnavailable, match="did not answer Seal"):
        publisher().push(TENSORS, 1, timeout_s=1.5)
    assert 1.5 < time.monotonic() - began < 3


def test_a_closed_publisher_says_so(store, publisher):
    store.place(COPIES)
    closed = publisher()
    closed.push(TENSORS, 1)
    closed.close()
    closed.close()
    for call in (lambda: closed.push(TENSORS, 2), closed.connect):
        with pytest.raises(errors.RolloutError, match="closed"):
            call()


@pytest.mark.parametrize("version", [-1, 2**63, 2**64, 2**80])
def test_a_version_out_of_range_is_named(store, publisher, version):
    with pytest.raises(ValueError, match=rf"version {version} is out of range: 0 to {2**63 - 1}"):
        publisher().push(TENSORS, version)

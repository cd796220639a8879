"""A store that is killed under its trainers, or between their pushes, and is back soon."""

import signal
import socket
import time
from threading import Timer

import pytest

from rollout_client import errors
from rollout_client.channel import Channel
from rollout_client.publisher import WeightPublisher


@pytest.mark.parametrize(
    "store_config", [{"push_endpoint": "tcp://127.0.0.1:*", "relay_endpoint": "tcp://127.0.0.1:*"}]
)
def test_a_store_on_free_ports_is_found_where_it_was(store, weights, digest_of):
    relay = (store.run_dir / "relay_endpoint").read_text()
    with WeightPublisher(store.endpoint, run_id="run", progress=False) as publisher:
        publisher.push(weights(1), 1, timeout_s=10)
        store.end(signal.SIGKILL)
        store.start()
        assert publisher.push(weights(2), 2, timeout_s=10).version == 2
    assert store.serving() == (2, digest_of(weights(2)))
    assert (store.run_dir / "relay_endpoint").read_text() == relay


@pytest.mark.parametrize("store_config", [{"push_endpoint": "tcp://127.0.0.1:*"}])
def test_a_port_that_somebody_took_meanwhile_is_left_to_them(store, weights):
    before = store.endpoint
    store.end(signal.SIGKILL)
    with socket.create_server(("127.0.0.1", int(before.rpartition(":")[2]))):
        store.start()
        store.wait_live()
    assert store.endpoint != before


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("kind", ["Begin", "Seal"])
def test_a_trainer_whose_store_is_killed_waits_for_the_store_not_for_its_deadline(
    store, weights, digest_of, monkeypatch, kind, transport
):
    """The store dies as the question arrives, and is started again at once."""
    asked = Channel.request

    def request(channel, message, answer, **more):
        if type(message).__name__ == kind and not killed:
            killed.append(time.monotonic())
            store.process.send_signal(signal.SIGSTOP)  # the question gets to a store that will not answer
            Timer(0.2, lambda: (store.end(signal.SIGKILL), store.start())).start()
        return asked(channel, message, answer, **more)

    killed: list[float] = []
    monkeypatch.setattr(Channel, "request", request)
    with WeightPublisher(store.endpoint, run_id="run", progress=False, transport=transport) as publisher:
        if kind == "Begin":
            assert publisher.push(weights(1), 1).version == 1
        else:
            with pytest.raises(errors.StoreUnavailable, match="lost"):
                publisher.push(weights(1), 1)
        assert time.monotonic() - killed[0] < 8
        assert publisher.push(weights(2), 2, timeout_s=10).version == 2
    assert store.serving() == (2, digest_of(weights(2)))

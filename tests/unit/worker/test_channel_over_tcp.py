"""Rank 0's socket for an API on another host: known keys only, and no socket file."""

import socket
import time

import pytest
import zmq

from rollout_client.curve import TrainerKeys
from weight_manager.curve import StoreKeys, make_keys
from worker import messages
from worker.channel import Channel, FromApi


@pytest.fixture
def endpoint():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def keys(tmp_path):
    return make_keys(tmp_path / "keys", "api")


@pytest.fixture
def channel(tmp_path, endpoint, keys):
    opened = Channel(tmp_path, 3, endpoint, StoreKeys.read(keys[0]))
    yield opened
    opened.close()


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


def ask(context, endpoint, channel, keys, seconds=1.0):
    """What the channel heard from a connection with these keys, after answering it."""
    asking = context.socket(zmq.DEALER)
    asking.set(zmq.LINGER, 0)
    if keys is not None:
        keys.hold(asking)
    asking.connect(endpoint)
    asking.send(messages.encode(messages.GetStats("hello")))
    heard, end = [], time.monotonic() + seconds
    while not heard and time.monotonic() < end:
        heard = channel.receive(0.05)
    for incoming in heard:
        assert isinstance(incoming, FromApi)
        channel.send_api(incoming.origin, messages.Done("hello"))
        assert asking.poll(1000)
    asking.close()
    return heard


def test_the_key_of_the_api_is_let_in(context, endpoint, channel, keys, tmp_path):
    assert ask(context, endpoint, channel, TrainerKeys.read(keys[1]), 5.0)
    assert not (tmp_path / "replica-3.sock").exists()


def test_other_keys_and_none_are_not(context, endpoint, channel, keys, tmp_path):
    right = TrainerKeys.read(keys[1])
    public, secret = (key.decode() for key in zmq.curve_keypair())
    assert not ask(context, endpoint, channel, TrainerKeys(public, secret, right.store))
    assert not ask(context, endpoint, channel, None)


def test_without_keys_it_does_not_listen(tmp_path, endpoint):
    with pytest.raises(ValueError, match="curve_keys"):
        Channel(tmp_path, 0, endpoint)

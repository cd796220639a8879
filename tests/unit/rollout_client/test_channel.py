"""A connection that goes between the moment a socket has room and the moment it is used."""

import pytest
import zmq

from rollout_client import protocol as wire
from rollout_client.channel import Channel
from rollout_client.errors import StoreUnavailable


class Unlucky:
    """The channel's socket, except that `again` of its next sends and receives find the connection gone."""

    def __init__(self, socket, again):
        self._socket, self.again = socket, again

    def __getattr__(self, name):
        return getattr(self._socket, name)

    def _try(self):
        if self.again:
            self.again -= 1
            raise zmq.Again

    def send(self, *args, **options):
        self._try()
        return self._socket.send(*args, **options)

    def recv_multipart(self, *args):
        self._try()
        return self._socket.recv_multipart(*args)


@pytest.fixture
def channel(store):
    with Channel(store.endpoint) as made:
        made.request(wire.Hello("r"), wire.Welcome, timeout_s=5)
        yield made


def test_a_message_is_sent_again_and_an_answer_read_again(channel):
    channel._socket = Unlucky(channel._socket, 1)
    assert channel.request(wire.Hello("r"), wire.Welcome, timeout_s=5).model == "M"
    channel.send(wire.Hello("r"), timeout_s=5)
    channel._socket.again = 1
    assert isinstance(channel.receive(5), wire.Welcome)


def test_a_store_that_never_takes_it_is_not_there(channel):
    channel._socket = Unlucky(channel._socket, 1 << 30)
    with pytest.raises(StoreUnavailable, match="no store took a Hello"):
        channel.send(wire.Hello("r"), timeout_s=0.1)


def test_a_connection_that_breaks_within_a_message_is_lost(channel):
    class Breaks(Unlucky):
        def send(self, *args, **options):
            if options.get("copy", True):
                return self._socket.send(*args, **options)
            raise zmq.Again

    channel._socket = Breaks(channel._socket, 0)
    with pytest.raises(StoreUnavailable, match="broke within a message"):
        channel.send(wire.Chunk("s", 0, 0, [4]), [b"abcd"], timeout_s=1)

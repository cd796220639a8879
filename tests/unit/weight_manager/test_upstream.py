"""A store that follows another one whose messages make no sense: that costs the session with it, and nothing else."""

import time
from types import SimpleNamespace

import pytest
import zmq

from tests.faults.small_model import LAYOUT
from weight_manager.config import StoreConfig
from weight_manager.errors import IllegalTransition
from weight_manager.relay import messages as wire
from weight_manager.relay import upstream as module
from weight_manager.relay.lease import Lease
from weight_manager.relay.upstream import Upstream
from weight_manager.watching import Watching


class Coordinator:
    """Of a store without weights; `fails` is what happens to whoever asks for its session."""

    settled, ballot, in_doubt, layout, changes = True, None, False, LAYOUT, 0
    fails: Exception | None = None
    history = SimpleNamespace(saved=SimpleNamespace(id="a" * 16), live=None)

    @property
    def session(self):
        if self.fails is not None:
            raise self.fails
        return None


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """(the store below, a function that says something to it from above and returns what it says after that)."""
    monkeypatch.setattr(module, "JOIN_AGAIN_S", 0.0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"

        def connect():
            socket = context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            socket.connect(endpoint)
            return socket

        config = StoreConfig(run_dir=tmp_path, model=tmp_path, upstream=endpoint)
        arena = SimpleNamespace(needs_lease=True, lease=lambda until: None)
        lease = Lease(arena, config.relay_lease_s)
        below = Upstream(
            *(config, Coordinator(), SimpleNamespace()),
            lease=lease,
            data=None,
            connect=connect,
            watching=Watching(),
        )

        def heard():
            assert router.poll(2000)
            peer, content = router.recv_multipart()
            return peer, wire.decode_from_below(content)

        def say(message):
            below.tick(time.monotonic())
            peer, join = heard()
            assert isinstance(join, wire.Join)
            router.send_multipart([peer, message if isinstance(message, bytes) else wire.encode(message)])
            assert below.socket.poll(2000)
            below.receive()
            return peer, heard

        yield below, say
        below.socket.close()


@pytest.mark.parametrize("message", [wire.Rollback("s", "why"), wire.Lease(1, float("nan")), b"\xc1"])
def test_a_message_from_above_that_cannot_be_handled_does_not_end_the_store(pair, message):
    below, say = pair
    below._coordinator.fails = ZeroDivisionError()
    peer, heard = say(message)
    if isinstance(message, wire.Rollback):
        below.tick(time.monotonic())
        again, join = heard()
        assert isinstance(join, wire.Join)
        assert again != peer, "on a connection of its own"
    assert below.lease.closed


def test_when_nobody_knows_what_is_live_the_store_ends(pair):
    below, say = pair
    below._coordinator.fails = IllegalTransition("twice")
    with pytest.raises(IllegalTransition):
        say(wire.Rollback("s", "why"))

"""The port of data connections when there is no room for a connection."""

import resource
import socket
import time
from contextlib import contextmanager

import pytest

from weight_manager import data_port as module
from weight_manager.data_port import DataPort
from weight_manager.metrics import Counters
from weight_manager.watching import Watching


@pytest.fixture
def port():
    watching = Watching()
    made = DataPort("tcp://127.0.0.1:1", 0, watching, Counters())
    yield made, watching
    made.close()


@contextmanager
def no_descriptors():
    """Of the process: every number that it may use is taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def turn(port, watching, patience_ms):
    """One turn of the store's loop; whether anything woke it up."""
    ready = watching.wait(patience_ms)
    watching.call(ready)
    port.tick(time.monotonic())
    return bool(ready)


def test_without_descriptors_the_loop_sleeps_and_the_connection_is_taken_later(port, monkeypatch):
    port, watching = port
    monkeypatch.setattr(module, "DEAF_S", 0.3)

    with socket.create_connection(("127.0.0.1", port.port)):
        with no_descriptors():
            assert turn(port, watching, 1000)
            assert sum(turn(port, watching, 20) for _ in range(5)) == 0, "it wakes up for a connection it cannot take"
        due = port.next_deadline()
        assert due is not None
        time.sleep(max(0.0, due - time.monotonic()))
        turn(port, watching, 0)
        assert turn(port, watching, 1000)
        assert port._strangers

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import zmq

from weight_manager import messages as store_messages
from worker import messages
from worker.channel import Channel, FromApi, FromStore, OriginGone, StoreDown, StoreUp, Terminate


@pytest.fixture
def run_dir():
    with tempfile.TemporaryDirectory(prefix="ch-", dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def channel(run_dir):
    opened = Channel(run_dir, 0)
    yield opened
    opened.close()
    assert not (run_dir / "replica-0.sock").exists()


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


def dealer(context, run_dir):
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(f"ipc://{run_dir / 'replica-0.sock'}")
    return socket


def store(context, run_dir):
    (run_dir / "store.sock").unlink(missing_ok=True)
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(f"ipc://{run_dir / 'store.sock'}")
    return socket


def receive_until(channel, kind, timeout=30.0):
    deadline, seen = time.monotonic() + timeout, []
    while time.monotonic() < deadline:
        seen += channel.receive(0.1)
        if any(isinstance(item, kind) for item in seen):
            return seen
    raise AssertionError(f"no {kind.__name__} in {seen}")


def test_messages_of_one_connection_keep_their_order(channel, context, run_dir):
    with dealer(context, run_dir) as api:
        for number in range(20):
            api.send(messages.encode(messages.Resume(str(number))))
        seen = []
        while len(seen) < 20:
            seen += channel.receive(0.5)
        assert [item.message.call for item in seen if isinstance(item, FromApi)] == [str(n) for n in range(20)]
        channel.send_api(seen[0].origin, messages.Done("0"))
        assert messages.decode_to_api(api.recv()) == messages.Done("0")


UNREADABLE = {
    "no message": b"\xc1",
    "half a message": messages.encode(messages.Resume("a"))[:-1],
    "text that is none": b"\x82\xa1t\xa6resume\xa4call\xa2\xff\xfe",
    "lists in lists": b"\x83\xa1t\xa6resume\xa4call\xa1x\xa4more" + b"\x91" * 100_000 + b"\xc0",
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_bytes_that_cannot_be_read_are_answered_and_counted(channel, context, run_dir, what):
    with dealer(context, run_dir) as api:
        api.send(UNREADABLE[what])
        api.send(messages.encode(messages.Resume("next")))
        assert [item.message.call for item in receive_until(channel, FromApi)] == ["next"]
        assert api.poll(2000)
        assert messages.decode_to_api(api.recv()).code == "bad_message"
    assert channel.bad_messages == 1


@pytest.mark.parametrize("what", UNREADABLE)
def test_bytes_of_the_store_that_cannot_be_read_are_counted(channel, context, run_dir, what):
    with store(context, run_dir) as router:
        receive_until(channel, StoreUp)
        channel.send_store(store_messages.Beat(1, "digest"))
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, UNREADABLE[what]])
        deadline = time.monotonic() + 30
        while not channel.bad_messages:
            assert time.monotonic() < deadline
            assert channel.receive(0.1) == []


def test_a_frame_too_many_is_answered(channel, context, run_dir):
    with dealer(context, run_dir) as api:
        api.send_multipart([messages.encode(messages.Resume("a")), b"more"])
        assert channel.receive(0.5) == []
        assert api.poll(2000)
        assert messages.decode_to_api(api.recv()).code == "bad_message"
    assert channel.bad_messages == 1


def test_a_connection_that_is_gone_is_reported_once(channel, context, run_dir):
    api = dealer(context, run_dir)
    api.send(messages.encode(messages.Resume("a")))
    origin = receive_until(channel, FromApi)[0].origin
    api.close()
    deadline = time.monotonic() + 30
    while channel.send_api(origin, messages.Done("a")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not channel.send_api(origin, messages.Done("b"))
    assert channel.receive(0) == [OriginGone(origin)]
    assert channel.receive(0) == []


def test_a_store_is_noticed_when_it_comes_goes_and_comes_again(channel, context, run_dir):
    assert channel.receive(0.05) == []
    assert not channel.send_store(store_messages.Beat(1, "digest"))  # nobody there: nothing is kept for later
    for _ in range(2):
        with store(context, run_dir) as router:
            receive_until(channel, StoreUp)
            assert channel.send_store(store_messages.Beat(7, "digest"))
            identity, payload = router.recv_multipart()
            assert store_messages.decode_incoming(payload) == store_messages.Beat(7, "digest")
            router.send_multipart([identity, b"\xc1"])
            router.send_multipart([identity, store_messages.encode(store_messages.Flip("s"))])
            assert receive_until(channel, FromStore) == [FromStore(store_messages.Flip("s"))]
        receive_until(channel, StoreDown)
    assert channel.bad_messages == 2


def test_sigterm_wakes_a_waiting_channel(channel):
    before = signal.getsignal(signal.SIGTERM)
    channel.on_sigterm()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        began = time.monotonic()
        assert channel.receive(5.0) == [Terminate()]
        assert time.monotonic() - began < 1
        assert channel.receive(0) == []
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)


def test_a_socket_file_left_by_a_killed_predecessor_is_no_obstacle(run_dir):
    (run_dir / "replica-1.sock").touch()
    Channel(run_dir, 1).close()

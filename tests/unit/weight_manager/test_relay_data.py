"""A store's data connection to the one above, byte by byte: what is sent, what arrives, and what is refused."""

import os
import resource
import socket
import threading
import time
from math import prod

import numpy as np
import pytest

from rollout_client.data_socket import MAGIC, READY
from rollout_client.digest import digest_of
from rollout_client.protocol import Copy
from tests.faults.small_model import LAYOUT
from weight_manager.data_plane import Arrived, Ended, Finished, SocketReader, Taken, Unconnected
from weight_manager.errors import PushRefused
from weight_manager.relay.relayed import UpstreamReceiver
from weight_manager.relay.roster import CLAIM, END, RECORD, Feed
from weight_manager.staging import Staging
from weight_manager.watching import Watching

KEY = b"k" * 16
SIZES = [4 * prod(r.shape) for r in LAYOUT.regions]


class Above:
    """The store above, scripted; what the thread below tells."""

    def __init__(self, answer=READY):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.news = []
        self.slot = memoryview(bytearray(LAYOUT.slot_bytes))
        self.staging = Staging(LAYOUT, self.slot, chunked=True)
        copies = [
            Copy(i, (s // 4,), 0, (1,), r.offset // 4, (1,), "float32")
            for i, (r, s) in enumerate(zip(LAYOUT.regions, SIZES, strict=True))
        ]
        self.staging.add(copies, [r.name for r in LAYOUT.regions])
        self.reception = UpstreamReceiver(self.listener.getsockname()[:2], KEY, self.staging, self.news.append)
        self.reception.start()
        self.peer, _ = self.listener.accept()
        assert self.peer.recv(len(MAGIC) + len(KEY), socket.MSG_WAITALL) == MAGIC + KEY
        if answer:
            self.peer.sendall(answer)

    def send(self, region, offset, content):
        self.peer.sendall(RECORD.pack(region, offset, len(content)) + content)

    def claim(self, region, digest):
        self.peer.sendall(RECORD.pack(CLAIM, region, digest))

    def ended(self, seconds=5.0):
        deadline = time.monotonic() + seconds
        while not (self.news and isinstance(self.news[-1], Ended)):
            assert time.monotonic() < deadline, self.news
            time.sleep(0.005)
        return self.news[-1].refusal

    def close(self):
        self.reception.stop()
        self.peer.close()
        self.listener.close()
        self.reception.close()


@pytest.fixture
def above():
    above = Above()
    yield above
    above.close()


def content(region):
    return np.random.default_rng(region).bytes(SIZES[region])


def in_slot(above, region):
    start = LAYOUT.regions[region].offset
    return bytes(above.slot[start : start + SIZES[region]])


def test_spans_of_several_regions_land_in_place_and_are_hashed_as_they_come(above):
    halves = [(region, half) for half in (0, 1) for region in (0, 1)]
    for region, half in halves:
        middle = SIZES[region] // 2
        part = content(region)[middle:] if half else content(region)[:middle]
        above.send(region, half * middle, part)
    for region in (0, 1):
        above.claim(region, digest_of(content(region)))
    above.peer.sendall(RECORD.pack(END, 0, 0))
    assert above.ended() is None
    assert [type(n) for n in above.news] == [*[Arrived] * 4, Taken, Taken, Finished, Ended]
    for region in (0, 1):
        assert in_slot(above, region) == content(region)
        assert above.staging.targets[region].streamed == digest_of(content(region))


def test_spans_out_of_order_are_hashed_in_their_place_later(above):
    middle = SIZES[0] // 2
    above.send(0, middle, content(0)[middle:])
    above.send(0, 0, content(0)[:middle])
    above.claim(0, digest_of(content(0)))
    above.peer.sendall(RECORD.pack(END, 0, 0))
    assert above.ended() is None
    assert in_slot(above, 0) == content(0)
    assert above.staging.targets[0].streamed is None
    assert above.staging.targets[0].compute()[0] == digest_of(content(0))


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ((len(SIZES), 0, 4), "aborted"),
        ((0, SIZES[0], 4), "bad_message"),
        ((0, 1 << 63, 1 << 63), "bad_message"),
        ((0, 0, SIZES[0] + 4), "bad_message"),
        ((CLAIM, len(SIZES), 7), "bad_message"),
        ((CLAIM, 1 << 60, 7), "bad_message"),
        ((0, 0, 0), "bad_message"),
    ],
)
def test_what_does_not_fit_the_layout_is_refused(above, record, code):
    before = bytes(above.slot)
    above.peer.sendall(RECORD.pack(*record) + b"\xff" * 64)
    assert above.ended().code == code
    assert bytes(above.slot) == before


def test_bytes_that_come_twice_are_refused(above):
    above.send(0, 0, content(0)[:64])
    above.send(0, 32, content(0)[32:96])
    assert above.ended().code == "duplicate_tensor"


def test_a_connection_that_ends_early_is_not_taken_for_complete(above):
    above.peer.sendall(RECORD.pack(0, 0, SIZES[0]) + content(0)[:100])
    above.peer.close()
    assert above.ended() is None
    assert not any(isinstance(n, Finished | Arrived) for n in above.news)


@pytest.mark.parametrize("answer", [b"\xff", b""])
def test_somebody_elses_port_is_not_the_stores(answer):
    above = Above(answer)
    above.peer.close()
    assert above.ended() is None
    assert [type(n) for n in above.news] == [Unconnected, Ended]
    above.close()


def test_it_stops_in_the_middle_of_a_record(above):
    above.peer.sendall(RECORD.pack(0, 0, SIZES[0]) + content(0)[:100])
    time.sleep(0.1)
    began = time.monotonic()
    above.reception.stop()
    above.ended()
    assert time.monotonic() - began < 2


def test_it_stops_while_it_waits_for_an_answer():
    above = Above(b"")
    began = time.monotonic()
    above.reception.stop()
    assert above.ended() is None
    assert time.monotonic() - began < 1
    assert [type(n) for n in above.news] == [Ended], "the port is not to blame"
    above.close()


def test_a_feed_sends_as_fast_as_it_is_read_and_turns_the_loop_only_then():
    near, far = tcp_pair()
    watching = Watching()
    feed = Feed(near, watching)
    big = memoryview(np.random.default_rng(0).bytes(16 << 20))
    feed.put([(3, 5, len(big))], big)
    assert not feed.flush()
    got = bytearray()
    reader = threading.Thread(target=lambda: read_all(far, RECORD.size + len(big), got))
    reader.start()
    deadline = time.monotonic() + 30
    while not feed.flush():
        assert watching.wait(5000), "there is room, and the loop sleeps"
        assert time.monotonic() < deadline
    reader.join(30)
    assert bytes(got) == RECORD.pack(3, 5, len(big)) + bytes(big)
    assert not watching.wait(50), "nothing is left to send, and the loop turns"
    far.close()
    feed.put([(3, 0, len(big))], big)
    while not feed.lost:
        feed.flush()
        assert time.monotonic() < deadline
    feed.put([(END, 0, 0)])
    assert not feed.flush()
    assert not watching.wait(50), "it is lost, and the loop turns for it"
    feed.close()


def test_a_thousand_regions_are_claimed_at_once():
    """More buffers than the kernel takes in one call."""
    near, far = tcp_pair()
    feed = Feed(near, Watching())
    feed.put((CLAIM, region, region) for region in range(5000))
    assert feed.flush()
    got = bytearray()
    read_all(far, 5000 * RECORD.size, got)
    assert RECORD.unpack(got[-RECORD.size :]) == (CLAIM, 4999, 4999)
    feed.close()
    far.close()


def test_a_number_that_is_anothers_by_now_is_not_called():
    """One callback closes a descriptor and the next one opened gets its number, both in one turn."""
    watching, called = Watching(), []
    first, second = os.eventfd(1), os.eventfd(1)
    watching.watch(first, lambda: called.append("first"))

    def swap():
        watching.unwatch(second)
        os.close(second)
        assert os.dup2(first, second) == second
        watching.watch(second, lambda: called.append("another's"))

    watching.watch(second, lambda: called.append("second"))
    ready = watching.wait(1000)
    assert len(ready) == 2
    swap()
    watching.call(ready)
    assert called == ["first"]
    os.close(first)
    os.close(second)


def test_a_feed_that_is_closed_with_bytes_left_wakes_nobody():
    near, far = tcp_pair()
    watching = Watching()
    feed = Feed(near, watching)
    feed.put([(0, 0, 64 << 20)], memoryview(bytes(64 << 20)))
    assert not feed.flush()
    feed.close()
    assert not watching.wait(50)
    far.close()


def test_a_reader_on_a_slow_link_is_woken_once_a_mebibyte():
    """Each packet woke it: a chain of eight stores on two cores took 4.3 times as long as one store."""
    near, far = tcp_pair()
    size, woken = 8 << 20, []

    def read():
        incoming, place, done = SocketReader(far), memoryview(bytearray(size)), 0
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        while done < size:
            done += incoming.some(place[done : done + (256 << 10)], size - done)
        woken.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(size // (32 << 10)):
        near.sendall(bytes(32 << 10))
        time.sleep(0.001)
    reader.join(10)
    assert woken
    assert woken[0] <= 40, "of 256 packets"
    near.close()
    far.close()


def test_the_last_bytes_of_a_record_do_not_wait_for_a_mebibyte():
    near, far = tcp_pair()
    incoming = SocketReader(far)
    near.sendall(bytes(3000))
    began = time.monotonic()
    assert len(incoming.exactly(3000)) == 3000
    threading.Timer(0.05, near.sendall, [bytes(1000)]).start()
    assert len(incoming.exactly(1000)) == 1000
    assert time.monotonic() - began < 0.2
    near.close()
    with pytest.raises(ConnectionError):
        incoming.exactly(1)
    far.close()


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def read_all(far, size, got):
    while len(got) < size:
        got += far.recv(1 << 20)


def test_a_record_that_has_begun_is_not_one_that_has_come(above):
    above.peer.sendall(RECORD.pack(0, 0, SIZES[0]) + content(0)[:1])
    deadline = time.monotonic() + 30
    while not above.staging.received_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    with pytest.raises(PushRefused, match="bytes are missing"):
        above.staging.written([(0, digest_of(in_slot(above, 0)))])
    above.peer.sendall(content(0)[1:])
    above.claim(0, digest_of(content(0)))
    above.peer.sendall(RECORD.pack(END, 0, 0))
    assert above.ended() is None
    assert above.staging.written([(0, digest_of(content(0)))])

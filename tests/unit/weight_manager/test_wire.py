"""The trainers' socket against arbitrary bytes: one answer for each, nothing else, and the loop goes on."""

import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_client.protocol import Chunk, Hello, Renew, encode
from weight_manager import wire
from weight_manager.errors import IllegalTransition
from weight_manager.metrics import Counters
from weight_manager.relay.messages import Beat, Holdings, decode_from_below
from weight_manager.relay.messages import encode as encode_to_above
from weight_manager.wire import Router, receive_messages, receive_pushes


class Receiver:
    def __init__(self):
        self.requests, self.refused, self.buffer = [], [], bytearray(64)

    def request(self, peer, request):
        if request == Renew("bug"):
            raise ZeroDivisionError
        if request == Renew("impossible"):
            raise IllegalTransition("recorded twice")
        self.requests.append(request)

    def chunk(self, peer, chunk):
        if chunk.session == "unknown":
            return None
        if chunk.session == "bug":
            raise ZeroDivisionError
        view = memoryview(self.buffer)
        return [view[: max(size, 0)] for size in chunk.sizes]

    def received(self, peer, chunk):
        pass

    def malformed(self, peer, code, message, session=""):
        self.refused.append(code)


@pytest.fixture
def pair():
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        router = Router(context, "inproc://push", 1 << 20, 64)
        dealer.connect("inproc://push")
        receiver, counters = Receiver(), Counters()

        def exchange(frames):
            before = len(receiver.requests) + len(receiver.refused)
            dealer.send_multipart(frames)
            dealer.send(encode(Renew("marker")))
            for _ in range(100):
                if receiver.requests and receiver.requests[-1] == Renew("marker"):
                    break
                router.socket.poll(100)
                receive_pushes(router, receiver, 32, counters)
            assert receiver.requests.pop() == Renew("marker"), "the message after it was not understood"
            return len(receiver.requests) + len(receiver.refused) - before

        yield exchange, receiver, counters
        router.close()


FUZZ = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@FUZZ
@given(frames=st.lists(st.binary(max_size=80), min_size=1, max_size=5))
def test_any_frames(pair, frames):
    exchange, _, _ = pair
    assert exchange(frames) == 1


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
KEYS = ["t", "session", "version", "parts", "sizes", "copy", "offset", "digests", "run_id", "world", "protocol"]
TAGS = ["hello", "begin", "chunk", "written", "renew", "seal", "commit", "abort"]


@FUZZ
@given(
    fields=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8),
    tag=st.sampled_from(TAGS),
    payload=st.lists(st.binary(max_size=40), max_size=3),
)
def test_any_message(pair, fields, tag, payload):
    exchange, _, _ = pair
    raw = msgspec.msgpack.encode(fields | {"t": tag})
    answered = exchange([raw, *payload])
    assert answered <= 1
    if not answered:
        assert tag == "chunk"


@FUZZ
@given(sizes=st.lists(st.integers(-5, 40), max_size=4), payload=st.lists(st.binary(max_size=40), max_size=4))
def test_any_payload(pair, sizes, payload):
    exchange, receiver, _ = pair
    before = len(receiver.refused)
    exchange([encode(Chunk("s", 0, 0, sizes)), *payload])
    fits = [max(n, 0) for n in sizes] == [len(p) for p in payload] and max(sizes, default=0) <= 32
    assert len(receiver.refused) - before == (0 if fits else 1)


def test_frames_of_a_chunk_that_nobody_wants_are_read_to_the_end(pair):
    exchange, _, _ = pair
    assert exchange([encode(Chunk("unknown", 0, 0, [4, 4])), b"1234", b"5678"]) == 0


def test_caps_are_counted(pair):
    exchange, receiver, counters = pair
    exchange([encode(Chunk("s", 0, 0, [33])), bytes(33)])
    assert receiver.refused == ["too_large"]
    assert counters.values()["oversized_frames"] == 1
    exchange([encode(Hello("run")), b"payload"])
    assert receiver.refused[-1] == "bad_message"
    assert counters.values()["bad_messages"] == 1


def test_a_bug_of_ours_is_answered_and_the_loop_goes_on(pair, caplog):
    exchange, receiver, _ = pair
    exchange([encode(Renew("bug"))])
    exchange([encode(Chunk("bug", 0, 0, [4])), b"1234"])
    assert receiver.refused == ["internal", "internal"]
    assert "ZeroDivisionError" in caplog.text


def test_when_nobody_knows_what_is_live_a_trainers_message_ends_the_store_too(pair):
    """As one of a replica, an operator or another store does: the next life of the store learns what is true."""
    exchange, receiver, _ = pair
    with pytest.raises(IllegalTransition):
        exchange([encode(Renew("impossible"))])
    assert not receiver.refused


class StoreReceiver:
    def __init__(self):
        self.requests, self.refused, self.failed = [], [], []

    def request(self, peer, message):
        if message == Beat(13, Holdings()):
            raise ZeroDivisionError
        if message == Beat(14, Holdings()):
            raise IllegalTransition("recorded twice")
        self.requests.append(message)

    def malformed(self, peer, why):
        self.refused.append(why)

    def broken(self, peer, why):
        self.failed.append(why)


@pytest.fixture
def stores():
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        router = Router(context, "inproc://relay", 1 << 20, 64)
        dealer.connect("inproc://relay")
        receiver = StoreReceiver()

        def say(*messages):
            for message in messages:
                dealer.send(message if isinstance(message, bytes) else encode_to_above(message))
            for _ in messages:
                router.socket.poll(1000)
                receive_messages(
                    router,
                    decode_from_below,
                    request=receiver.request,
                    malformed=receiver.malformed,
                    broken=receiver.broken,
                    counters=Counters(),
                )
            return receiver

        yield say
        router.close()


def test_a_message_from_below_that_cannot_be_handled_costs_its_sender_and_nobody_else(stores):
    receiver = stores(Beat(1, Holdings()), Beat(13, Holdings()), b"\xc1", Beat(2, Holdings()))
    assert receiver.requests == [Beat(1, Holdings()), Beat(2, Holdings())]
    assert len(receiver.failed) == 1
    assert "ZeroDivisionError" in receiver.failed[0]
    assert len(receiver.refused) == 1


def test_when_nobody_knows_what_is_live_the_store_ends(stores):
    with pytest.raises(IllegalTransition):
        stores(Beat(14, Holdings()))


def test_trainers_that_say_much_keep_replicas_waiting_for_a_moment_only(monkeypatch):
    now = [0.0]

    class Slow(Receiver):
        def request(self, peer, request):
            super().request(peer, request)
            now[0] += 0.4 * wire.TURN_S

    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        router, receiver = Router(context, "inproc://push", 1 << 20, 64), Slow()
        dealer.connect("inproc://push")
        for number in range(7):
            dealer.send(encode(Renew(str(number))))
        turns, deadline = [], time.monotonic() + 30.0
        while len(receiver.requests) < 7:
            assert time.monotonic() < deadline
            before = len(receiver.requests)
            receive_pushes(router, receiver, 32, Counters())
            turns.append(len(receiver.requests) - before)
        router.close()
    assert max(turns) == 3
    assert [request.session for request in receiver.requests] == [str(number) for number in range(7)]

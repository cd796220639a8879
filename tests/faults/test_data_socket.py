"""The bytes of a push through a socket of their own: good pushes, and everything a peer there can do wrong."""

import contextlib
import socket
import struct
import threading
import time

import numpy as np
import pytest

from rollout_client import data_socket, errors, zmq_transport
from rollout_client import protocol as wire
from rollout_client.data_socket import DIGEST, DONE, END, MAGIC, READY, RECORD
from rollout_client.publisher import WeightPublisher

NORM = "model.norm.weight"


@pytest.fixture
def store_config():
    return {"push_endpoint": "tcp://127.0.0.1:*"}


class Line:
    """A trainer's data connection, byte by byte."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.socket = socket.create_connection(("127.0.0.1", trainer.welcome.data_port), timeout=30)
        self.socket.sendall(MAGIC + trainer.placement.data_key)
        with contextlib.suppress(ConnectionResetError):
            self.said = self.socket.recv(1)

    def copy(self, number, *, spoil=b"", digest=None):
        raw, right = self.trainer.chunks(number)
        raw = spoil + raw[len(spoil) :]
        self.socket.sendall(RECORD.pack(number, len(raw)) + raw + DIGEST.pack(right if digest is None else digest))

    def closed(self, seconds=5.0):
        self.socket.settimeout(seconds)
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def begun(trainer, weights):
    """(trainer, its line) of a push of version 2 that has been placed."""
    lines = []

    def begin(version=2, seed=2, run_id="run", **fields):
        t = trainer(run_id)
        placed = t.begin(weights(seed), version, transport="zmq", **fields)
        assert isinstance(placed, wire.Placement), placed
        lines.append(Line(t))
        return t, lines[-1]

    yield begin
    for line in lines:
        line.socket.close()


def counters(store):
    return store.status().counters


@pytest.mark.parametrize(
    "store_config", [{"push_endpoint": "tcp://127.0.0.1:*", "dtype": d} for d in ("float32", "bfloat16")]
)
def test_a_push_goes_through_it_cast_and_all(store, weights, push, store_config):
    itemsize = 4 if store_config["dtype"] == "float32" else 2
    before = counters(store)["data_connections"]
    report = push(weights(3), 1, transport="zmq")
    assert counters(store)["data_connections"] == before + 1
    assert report.sent == sum(w.size for w in weights(3).values()) * itemsize
    assert push(weights(3), 2, transport="shm").digest == report.digest, "the same bytes whatever way they took"


def test_slices_for_two_ranks_of_a_replica_are_scattered_into_place(launch, weights):
    store = launch(push_endpoint="tcp://127.0.0.1:*", tp=2).wait_live()
    digests = set()
    for version, transport in enumerate(("zmq", "shm"), 1):
        with WeightPublisher(store.endpoint, run_id="run", transport=transport, progress=False) as publisher:
            digests.add(publisher.push(weights(4), version, timeout_s=10).digest)
    assert len(digests) == 1


def test_word_by_word(store, begun, weights, digest_of):
    t, line = begun()
    for number in reversed(range(len(t.placement.copies))):
        line.copy(number)
    line.socket.sendall(RECORD.pack(END, 0))
    assert line.socket.recv(1) == DONE
    assert isinstance(t.ask(wire.Seal(t.placement.session)), wire.Sealed)
    assert t.ask(wire.Commit(t.placement.session)).digest == digest_of(weights(2))
    assert store.serving() == (2, digest_of(weights(2)))
    assert line.closed()


def test_half_as_chunks_half_through_the_line(store, begun, weights, digest_of):
    t, line = begun()
    count = len(t.placement.copies)
    for number in range(count // 2):
        raw, digest = t.chunks(number)
        t.say(wire.Chunk(t.placement.session, number, 0, [len(raw)]), raw)
        t.say(wire.Written(t.placement.session, [(number, digest)]))
    for number in range(count // 2, count):
        line.copy(number)
    line.socket.sendall(RECORD.pack(END, 0))
    assert line.socket.recv(1) == DONE
    assert isinstance(t.ask(wire.Seal(t.placement.session)), wire.Sealed)
    assert t.ask(wire.Commit(t.placement.session)).digest == digest_of(weights(2))


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda line: line.copy(3, spoil=b"\xff"), "checksum_mismatch"),
        (lambda line: line.copy(3, digest=1), "checksum_mismatch"),
        (lambda line: (line.copy(3), line.copy(3)), "duplicate_tensor"),
        (lambda line: line.socket.sendall(RECORD.pack(10_000, 4)), "bad_message"),
        (lambda line: line.socket.sendall(RECORD.pack(3, 1 << 40)), "bad_message"),
        (lambda line: line.socket.sendall(RECORD.pack(END, 0)), "missing_tensor"),
    ],
    ids=["bit", "digest", "twice", "copy", "size", "early"],
)
def test_what_does_not_fit_ends_the_push_by_name(store, begun, push, weights, digest_of, wrong, code):
    before = store.serving()
    t, line = begun()
    wrong(line)
    if code == "missing_tensor":
        assert line.socket.recv(1) == DONE
    else:
        assert line.closed()
    answer = t.ask(wire.Seal(t.placement.session))
    assert (type(answer), answer.code) == (wire.Error, code)
    assert store.serving() == before
    assert push(weights(5), 3, run_id="run", transport="zmq").digest == digest_of(weights(5))


def test_a_line_that_breaks_costs_a_lease_and_no_more(store, begun, push, weights, within):
    t, line = begun()
    raw, _ = t.chunks(0)
    line.socket.sendall(RECORD.pack(0, len(raw)) + raw[: len(raw) // 2])
    line.socket.close()
    with within(4):
        assert push(weights(5), 3, run_id="run", transport="zmq").version == 3
    assert t.ask(wire.Seal(t.placement.session)).code == "lease_expired"


def test_a_line_that_stalls_holds_no_slot_once_its_session_is_over(store, begun, push, weights):
    """Its thread sits in the middle of a copy; the session ends, so it must stop before the slot is used again."""
    for version in range(2, 6):
        t, line = begun(version)
        raw, _ = t.chunks(0)
        line.socket.sendall(RECORD.pack(0, len(raw)) + raw[: len(raw) // 2])
        assert isinstance(t.ask(wire.Abort(t.placement.session)), wire.Aborted)
        assert line.closed(), "the store hangs up"
    assert push(weights(5), 9, run_id="run", transport="zmq").version == 9
    (arena,) = store.arena_dir.glob("*.arena")
    assert arena.stat().st_blocks * 512 <= 4096 + 3 * t.placement.slot_bytes


def test_bytes_that_trickle_keep_the_lease(store, begun):
    t, line = begun()
    raw, digest = t.chunks(0)
    line.socket.sendall(RECORD.pack(0, len(raw)))
    end = time.monotonic() + 2.5  # the lease is 1 s
    while time.monotonic() < end:
        line.socket.sendall(raw[:256])
        raw = raw[256:]
        time.sleep(0.1)
    assert store.status().session is not None
    line.socket.sendall(raw + DIGEST.pack(digest))


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", MAGIC + bytes(16)])
def test_strangers_get_nothing(store, greeting, push, weights):
    with WeightPublisher(store.endpoint, run_id="other", transport="zmq", progress=False) as publisher:
        port = publisher.connect().data_port
    before = counters(store)["bad_messages"]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.sendall(greeting)
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):  # what it sent beyond a greeting was never read
            assert stranger.recv(1) == b""
        assert time.monotonic() - began < (7 if not greeting else 1)
    assert counters(store)["bad_messages"] == before + bool(greeting)
    assert push(weights(1), 1, transport="zmq").version == 1


def test_a_key_is_good_for_one_line_and_one_session(store, begun):
    t, line = begun()
    second = Line(t)
    assert (line.said, second.said) == (READY, b""), "the key has been used"
    t.ask(wire.Abort(t.placement.session))
    assert line.closed()
    third = Line(t)
    assert third.said == b""
    for one in (second, third):
        one.socket.close()


def test_a_crowd_of_strangers_keeps_nobody_out(store, push, weights):
    with WeightPublisher(store.endpoint, run_id="other", transport="zmq", progress=False) as publisher:
        port = publisher.connect().data_port
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(150)]
    before = counters(store)["data_connections"]
    assert push(weights(1), 1, transport="zmq").version == 1
    assert counters(store)["data_connections"] == before + 1
    for one in crowd:
        one.close()


def test_a_port_that_cannot_be_reached_is_gone_without(store, weights, monkeypatch):
    tries = []

    def closed(*_):
        tries.append(1)
        raise OSError("no route")

    monkeypatch.setattr(zmq_transport, "DataSocket", closed)
    with WeightPublisher(store.endpoint, run_id="run", transport="zmq", progress=False) as publisher:
        for version in (1, 2):
            assert publisher.push(weights(version), version, timeout_s=10).version == version
    assert len(tries) == 1, "not waited for twice"


@pytest.mark.parametrize("answer", [b"", b"220 ready\r\n", None], ids=["hangs up", "another service", "silence"])
def test_a_port_of_somebody_else_is_gone_without(store, weights, monkeypatch, answer):
    """Behind a translated address the number may belong to another service."""
    monkeypatch.setattr(data_socket, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        held = []

        def serve():
            connection, _ = other.accept()
            held.append(connection)
            if answer is not None:
                connection.sendall(answer)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with WeightPublisher(store.endpoint, run_id="run", transport="zmq", progress=False) as publisher:
            real = zmq_transport.DataSocket
            port = other.getsockname()[1]
            monkeypatch.setattr(zmq_transport, "DataSocket", lambda endpoint, _, key: real(endpoint, port, key))
            assert publisher.push(weights(1), 1, timeout_s=10).version == 1
        thread.join(30)
        held[0].close()


@pytest.mark.parametrize("store_config", [{"push_endpoint": "tcp://127.0.0.1:*", "data_port": None}, {}])
def test_a_store_without_one_takes_chunks(store, push, weights):
    assert push(weights(1), 1, transport="zmq").version == 1
    assert counters(store)["data_connections"] == 0


def test_the_store_stops_under_it_and_the_trainer_says_so(store, weights, monkeypatch):
    """The publisher waits in `send`, and in `recv` for the last answer; both end when the store does."""
    monkeypatch.setattr(data_socket, "BLOCK_BYTES", 1 << 12)
    real = data_socket.DataSocket._copy

    def slow(self, number, *rest):
        if number == 5:
            store.end()
        return real(self, number, *rest)

    monkeypatch.setattr(data_socket.DataSocket, "_copy", slow)
    with (
        WeightPublisher(
            store.endpoint, run_id="run", transport="zmq", progress=False, connect_timeout_s=1
        ) as publisher,
        pytest.raises((errors.StoreUnavailable, errors.PushError)),
    ):
        publisher.push(weights(1), 1, timeout_s=20)


def test_the_wire_is_what_it_says():
    """Golden: 8 + 16 bytes of greeting, little-endian records."""
    assert MAGIC == b"PDLDATA1"
    assert RECORD.pack(7, 1 << 33).hex() == "070000000000000002000000"
    assert DIGEST.pack(0xFEDCBA9876543210).hex() == "1032547698badcfe"
    assert RECORD.pack(END, 0)[:4] == struct.pack("<I", 0xFFFFFFFF)
    assert np.frombuffer(DONE, np.uint8).tolist() == [1]

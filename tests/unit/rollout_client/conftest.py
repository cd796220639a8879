"""A store at the other end of a real socket that answers as a test tells it to."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from rollout_client import protocol as wire
from rollout_client.publisher import WeightPublisher
from weight_manager.arena import Arena

Answer = Callable[[Any, list[bytes]], list[Any] | Any | None]


class ScriptedStore:
    """`on[Type] = answer(message, payload)`: a reply, several, or None. Everything received is in `heard`."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.heard: list[Any] = []
        self.payload: dict[int, bytearray] = {}
        self.lease_s = 10.0
        self.live: tuple[str, int | None] = ("", None)
        self.on: dict[type, Answer] = {
            wire.Hello: lambda m, _: self.welcome(),
            wire.Renew: lambda m, _: wire.Renewed(m.session, self.lease_s, 0),
            wire.Seal: lambda m, _: wire.Sealed(m.session, "0" * 16),
            wire.Commit: lambda m, _: wire.Committed(self.begun.version, "0" * 16, 1, {"stage": 0.25}, {"0": 1.5}),
            wire.Abort: lambda m, _: wire.Aborted(m.session),
        }
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def welcome(self, **changes: Any) -> wire.Welcome:
        known = {
            "store_id": "s",
            "model": "M",
            "dtype": "float32",
            "live_run": self.live[0],
            "live_version": self.live[1],
            "arena_path": str(self.arena.path),
            "arena_nonce": self.arena.nonce,
            "max_frame": 1 << 20,
            "lease_s": self.lease_s,
        }
        return wire.Welcome(**known | changes)

    def place(self, copies: list[wire.Copy], slot: int = 0) -> None:
        """Answer Begin with these copies, in a slot given away anew."""

        def answer(begin: wire.Begin, _: list[bytes]) -> wire.Placement:
            epoch = self.arena.bump(slot)
            offset, size = self.arena.slot_offset(slot), self.arena.slot_bytes
            return wire.Placement("session", self.lease_s, offset, size, copies, epoch)

        self.on[wire.Begin] = answer

    def of(self, kind: type) -> list[Any]:
        return [m for m in self.heard if isinstance(m, kind)]

    @property
    def begun(self) -> wire.Begin:
        return self.of(wire.Begin)[-1]

    @property
    def digests(self) -> dict[int, int]:
        return dict(d for m in self.of(wire.Written) for d in m.digests)

    def vanish(self) -> None:
        """As a store that is killed: connections break, answers never come. For answers only, as is `come_back`."""
        self._socket.close(0)

    def come_back(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        for pause in (*[0.01] * 200, None):
            try:
                self._socket.bind(self.endpoint)
                return
            except zmq.ZMQError:
                if pause is None:
                    raise
                time.sleep(pause)  # ZMQ closes the old one in its own time

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        self._socket.close(0)
        self._context.term()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.closed or not self._socket.poll(20):
                continue
            peer, head, *payload = self._socket.recv_multipart()
            message = wire.decode_request(head)
            self.heard.append(message)
            if isinstance(message, wire.Chunk):
                assert [len(p) for p in payload] == message.sizes
                buffer = self.payload.setdefault(message.copy, bytearray())
                assert message.offset == len(buffer)
                for frame in payload:
                    buffer += frame
            sealed = self._answer(peer, message, payload)
            if isinstance(message, wire.Seal) and message.commit and sealed:
                self._answer(peer, wire.Commit(message.session, message.deadline_s), [])

    def _answer(self, peer: bytes, message: Any, payload: list[bytes]) -> bool:
        """Whether it was answered, and not by an error."""
        answer = self.on.get(type(message))
        replies = answer(message, payload) if answer else None
        said = [reply for reply in (replies if isinstance(replies, list) else [replies]) if reply is not None]
        for reply in said:
            self._socket.send_multipart([peer, reply if isinstance(reply, bytes) else wire.encode(reply)])
        return bool(said) and not isinstance(said[-1], wire.Error)


@pytest.fixture
def arena(tmp_path) -> Iterator[Arena]:
    made = Arena.create(tmp_path, "unit", 64 << 10)
    yield made
    made.close(unlink=True)


@pytest.fixture
def store(arena) -> Iterator[ScriptedStore]:
    made = ScriptedStore(arena)
    yield made
    made.close()


@pytest.fixture
def publisher(store):
    made = []

    def make(**options):
        made.append(WeightPublisher(store.endpoint, run_id="r", **{"connect_timeout_s": 5.0} | options))
        return made[-1]

    yield make
    for each in made:
        each.close()

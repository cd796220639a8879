"""A trainer that speaks the wire protocol word by word, so that a test can say something wrong at any point."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zmq

from rollout_client import protocol as wire
from rollout_client.arena_file import ArenaFile
from rollout_client.copying import slot_view, source_view
from rollout_client.digest import digest_of
from rollout_client.protocol import Part
from tests.faults.small_model import Weights


class Trainer:
    """Says exactly what it is told to."""

    def __init__(self, endpoint: str, run_id: str = "run", token: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.run_id, self.token = run_id, token

    def say(self, message: Any, *payload: Any) -> None:
        self.socket.send_multipart([wire.encode(message), *payload])

    def hear(self, seconds: float = 10.0) -> Any:
        assert self.socket.poll(int(seconds * 1000)), "no answer"
        return wire.decode_reply(self.socket.recv())

    def drain(self) -> None:
        while self.socket.poll(200):
            self.socket.recv()

    def quiet(self, seconds: float = 0.2) -> bool:
        return not self.socket.poll(int(seconds * 1000))

    def ask(self, message: Any, seconds: float = 10.0) -> Any:
        self.say(message)
        return self.hear(seconds)

    def hello(self) -> Any:
        return self.ask(wire.Hello(self.run_id, token=self.token))

    def begin(self, tensors: Weights, version: int, **fields: Any) -> Any:
        self.tensors, self.sources = tensors, list(tensors.values())
        fields.setdefault("parts", [Part(n, t.dtype.name, t.shape) for n, t in tensors.items()])
        self.welcome = self.hello()
        assert isinstance(self.welcome, wire.Welcome), self.welcome
        self.placement = self.ask_begin(wire.Begin(version, **fields))
        return self.placement

    def ask_begin(self, begin: wire.Begin, seconds: float = 30.0) -> Any:
        """The answer to a Begin; it is asked again while the store makes memory for a slot, as any trainer does."""
        deadline = time.monotonic() + seconds
        while True:
            answer = self.ask(begin)
            making = isinstance(answer, wire.Error) and "getting its memory" in answer.message
            if not making or time.monotonic() > deadline:
                return answer
            time.sleep(0.02)

    def write(self, count: int | None = None) -> list[tuple[int, int]]:
        """Put copies into the slot through a mapping of the arena; their (number, digest)."""
        digests = []
        with self.slot() as slot:
            for number, copy in enumerate(self.placement.copies[:count]):
                source = np.ascontiguousarray(source_view(self.sources[copy.part].reshape(-1), copy))
                slot_view(slot, copy)[...] = source
                digests.append((number, digest_of(source.data)))
        return digests

    @contextmanager
    def slot(self) -> Iterator[memoryview]:
        """The staged slot, mapped as a trainer may."""
        with ArenaFile(self.welcome.arena_path, write=True) as arena:
            yield arena.slot(arena.slot_at(self.placement.slot_offset))

    def chunks(self, number: int) -> tuple[bytes, int]:
        """Bytes of a copy and their digest."""
        copy = self.placement.copies[number]
        raw = np.ascontiguousarray(source_view(self.sources[copy.part].reshape(-1), copy)).tobytes()
        return raw, digest_of(raw)

    def close(self) -> None:
        self.socket.close()
        self.context.term()

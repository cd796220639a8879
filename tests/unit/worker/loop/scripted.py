"""The two edges of a loop under test: a store and an API that say what a test wants said, over real sockets."""

import itertools
import time

import msgspec
import numpy as np
import zmq

from tests.fake_engine import views_hash
from weight_manager import messages as store_messages
from weight_manager.layout import rank_views, region_digests, version_digest
from weight_manager.messages import Live
from worker import messages
from worker.messages import CallFailed, Chunk, Chunks, Done, Generate, GetStats, SamplingParams, Stats, Tokens

PATIENCE_S = 30.0
"""For what must happen; how soon is another test's claim, and a busy machine's threads wait for one another."""


class ScriptedStore:
    """Says to the replica what a test wants said, over the store's socket.

    passes: messages that it takes for nothing.
    """

    passes = (store_messages.Beat,)

    def __init__(self, run_dir, arena, layout, context):
        self.arena, self.layout = arena, layout
        self.arena_path = str(arena.path)
        self.hashes = {}  # version -> what FakeEngine makes of its views
        self.seen = []
        self._path = run_dir / "store.sock"
        self._context = context
        self._epochs = itertools.count(1)
        self._identity = b""
        self.open()

    def open(self):
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{self._path}")

    def close(self):
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def write(self, version, slot, run_id="run"):
        """Random weights of a version into a slot, as a finished push leaves them."""
        epoch = self.arena.bump(slot)
        rng = np.random.default_rng(version)
        values = np.frombuffer(self.arena.slot(slot), np.float32)
        values[:] = rng.standard_normal(values.size, np.float32)
        digest = version_digest(self.layout, region_digests(self.layout, self.arena.slot(slot)))
        self.hashes[version] = views_hash(rank_views(self.layout, 0, self.arena.slot(slot)))
        return Live(run_id, version, next(self._epochs), slot, digest, epoch)

    def send(self, message):
        self._socket.send_multipart([self._identity, store_messages.encode(message)])

    def poll(self, timeout=0.0):
        """The next message but those, or None."""
        deadline = time.monotonic() + timeout
        while self._socket.poll(max(0, (deadline - time.monotonic()) * 1000)):
            self._identity, payload = self._socket.recv_multipart()
            message = store_messages.decode_incoming(payload)
            self.seen.append(message)
            if not isinstance(message, self.passes):
                return message
        return None

    def expect(self, kind, timeout=PATIENCE_S):
        message = self.poll(timeout)
        assert isinstance(message, kind), f"wanted {kind.__name__}, got {message}"
        return message

    def register(self, live, timeout=PATIENCE_S):
        """Welcome the replica and have it map `live`."""
        self.expect(store_messages.Register, timeout)
        self.send(store_messages.Registered(self.arena_path, live, 1.0))
        if live is not None:
            adopted = self.expect(store_messages.Adopted)
            assert adopted == store_messages.Adopted(live.epoch), adopted

    def prepare(self, session, live, in_flight="keep", deadline_s=5.0):
        self.send(store_messages.Prepare(session, live, in_flight, deadline_s))
        return self.expect(store_messages.Prepared)

    def flip(self, session):
        self.send(store_messages.Flip(session))
        return self.expect(store_messages.Flipped)

    def push(self, session, live, in_flight="keep"):
        """A whole commit."""
        assert self.prepare(session, live, in_flight).ok
        assert self.flip(session).ok
        self.send(store_messages.Finalize(session))
        return self.expect(store_messages.Finalized)


class ScriptedApi:
    """One connection of an API process."""

    def __init__(self, run_dir, context):
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{run_dir / 'replica-0.sock'}")
        self._calls = itertools.count()
        self.chunks = {}  # request id -> chunks in order
        self.answers = {}
        self.announced = []

    def send(self, message):
        self._socket.send(message if isinstance(message, bytes) else messages.encode(message))

    def generate(self, request_id, prompt=(1, 2, 3), *, stream=True, adapter="", **sampling):
        options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}
        if request_id not in self.chunks or self.finished(request_id):  # else it is refused, and the first goes on
            self.chunks[request_id] = []
        self.send(Generate(request_id, list(prompt), SamplingParams(**options), stream=stream, adapter=adapter))

    def start(self, kind, *args, **kwargs):
        """Send a control call; returns its id."""
        call = f"call-{next(self._calls)}"
        self.send(kind(call, *args, **kwargs))
        return call

    def call(self, kind, *args, timeout=PATIENCE_S, **kwargs):
        """A control call and its answer."""
        return self.answer(self.start(kind, *args, **kwargs), timeout)

    def answer(self, call, timeout=PATIENCE_S):
        self.until(lambda: call in self.answers, timeout)
        return self.answers.pop(call)

    def stats(self):
        return self.call(GetStats)

    def finished(self, request_id):
        return any(chunk.finish for chunk in self.chunks[request_id])

    def finish(self, request_id, timeout=PATIENCE_S):
        """Wait for the end of a request with one sequence; (token ids, spans, finish)."""
        self.until(lambda: self.finished(request_id) or request_id in self.answers, timeout)
        assert request_id not in self.answers, self.answers[request_id]
        return self.result(request_id)

    def result(self, request_id):
        chunks = self.chunks[request_id]
        return [t for c in chunks for t in c.token_ids], chunks[-1].spans, chunks[-1].finish

    def tokens(self, request_id):
        return sum(len(chunk.token_ids) for chunk in self.chunks[request_id])

    def until(self, condition, timeout=PATIENCE_S):
        deadline = time.monotonic() + timeout
        self.pump(0)
        while not condition():
            assert time.monotonic() < deadline, "condition not met in time"
            self.pump(0.02)

    def pump(self, timeout):
        """Read what has come."""
        while self._socket.poll(timeout * 1000):
            timeout = 0
            message = messages.decode_to_api(self._socket.recv())
            match message:
                case Chunks():
                    for chunk in message.items:
                        self.chunks.setdefault(chunk.request_id, []).append(chunk)
                case Tokens():
                    self.members = message.members or self.members
                    for (request_id, index), token, logprob in zip(self.members, *message.drawn(), strict=True):
                        *before, last = self.chunks[request_id][-1].spans
                        spans = [*before, msgspec.structs.replace(last, end=last.end + 1)]
                        self.chunks[request_id].append(Chunk(request_id, index, [token], [logprob], spans))
                case Done() | CallFailed():
                    self.answers[message.call] = message
                case Stats() if message.call:
                    self.answers[message.call] = message
                case _:
                    self.announced.append(message)

    def close(self):
        self._socket.close()

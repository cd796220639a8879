"""The real loop of one rank on real sockets and a real arena, between a scripted store and a scripted API."""

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import zmq

from weight_manager import messages as store_messages
from weight_manager.arena import Arena
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, rank_views, region_digests, version_digest
from weight_manager.messages import Live
from worker import messages
from worker.boot import build_loop
from worker.channel import Channel
from worker.config import FakeEngineConfig, WorkerConfig
from worker.engine.fake_engine import replay, views_hash
from worker.messages import CallFailed, Chunks, Done, Drain, Generate, GetStats, SamplingParams, Stats
from worker.service import units_of_service

PATIENCE_S = 20.0
"""For what must happen; how soon is another test's claim, and a busy machine's threads wait for one another."""

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


class ScriptedStore:
    """Says to the replica what a test wants said, over the store's socket."""

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
        """The next message but beats, or None."""
        deadline = time.monotonic() + timeout
        while self._socket.poll(max(0, (deadline - time.monotonic()) * 1000)):
            self._identity, payload = self._socket.recv_multipart()
            message = store_messages.decode_incoming(payload)
            self.seen.append(message)
            if not isinstance(message, store_messages.Beat):
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

    def generate(self, request_id, prompt=(1, 2, 3), *, stream=True, **sampling):
        options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}
        self.chunks[request_id] = []
        self.send(Generate(request_id, list(prompt), SamplingParams(**options), stream=stream))

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
                case Done() | CallFailed():
                    self.answers[message.call] = message
                case Stats() if message.call:
                    self.answers[message.call] = message
                case _:
                    self.announced.append(message)

    def close(self):
        self._socket.close()


class Rig:
    """A running loop and the two ends it talks to."""

    def __init__(self, **config):
        run_dir = Path(tempfile.mkdtemp(prefix="rig-", dir="/dev/shm"))
        self.run_dir = run_dir
        model = run_dir / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        fake = FakeEngineConfig(**config.pop("fake", {}))
        options = {"max_batch": 8, "max_tokens_per_step": 64, "num_blocks": 64, "block_size": 4, **config}
        self.config = WorkerConfig(model_dir=model, engine="fake", fake=fake, **options)
        self.layout = make_layout(manifest_for(MODEL, "float32"), self.config.tp)
        self.arena = Arena.create(run_dir, "rig", self.layout.slot_bytes)
        self.context = zmq.Context()
        self.store = ScriptedStore(run_dir, self.arena, self.layout, self.context)
        self.apis = []
        self._stopped = False
        self.loop = None
        self.error = None
        self.launch()
        self.api = self.connect()

    def launch(self):
        """Start the loop, in a thread of this process."""
        self._built = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._built.wait(10)

    def connect(self):
        self.apis.append(ScriptedApi(self.run_dir, self.context))
        return self.apis[-1]

    def serve(self, version=0):
        """Register with a first version; returns it."""
        live = self.store.write(version, 0)
        self.store.register(live)
        self.api.until(lambda: self.api.stats().state == "serving")
        return live

    def check(self, api, request_id, prompt=(1, 2, 3)):
        """Derive every token again from the version its span claims."""
        tokens, spans, _ = api.result(request_id)
        assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
        assert (spans[0].start, spans[-1].end) == (0, len(tokens))
        for span in spans:
            expected = replay(self.store.hashes[span.version], prompt, tokens, MODEL["vocab_size"])
            assert tokens[span.start : span.end] == expected[span.start : span.end], f"torn: {span} of {spans}"

    def stop(self):
        """End it; raises what the loop raised. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        alive = not self.end()
        for api in self.apis:
            api.close()
        self.store.close()
        self.context.term()
        self.arena.close(unlink=True)
        shutil.rmtree(self.run_dir)
        assert not alive, "the loop did not stop"
        if self.error:
            raise self.error

    def end(self):
        """Have the loop stop; whether it did."""
        if self._thread.is_alive():
            self.api.send(Drain("stop", 0.0))
            self._thread.join(5)
        return not self._thread.is_alive()

    def _run(self):
        channel = Channel(self.run_dir, 0)
        try:
            self.loop = build_loop(self.config, channel, 0, 0)
            self._built.set()
            self.loop.run()
        except BaseException as error:
            self.error = error
            self._built.set()
        finally:
            channel.close()


class ProcessRig(Rig):
    """The same with every rank a process of its own, as the supervisor starts them."""

    def launch(self):
        config = self.run_dir / "config.json"
        config.write_text(json.dumps({"worker": self.config.model_dump(mode="json")}))
        (spec,) = [u for u in units_of_service(config, replicas=1, tp=self.config.tp) if u.kind == "replica"]
        places = spec.incarnation() if spec.incarnation else [{}]
        self.log = (self.run_dir / "ranks.log").open("w")
        self.ranks = [
            subprocess.Popen(process.argv, env={**os.environ, **place}, stderr=self.log)
            for process, place in zip(spec.processes, places, strict=True)
        ]

    def end(self):
        whole = all(rank.poll() is None for rank in self.ranks)
        if whole:
            self.api.send(Drain("stop", 0.0))
        try:
            statuses = [rank.wait(10) for rank in self.ranks]
            return not whole or statuses == [0] * len(statuses)
        except subprocess.TimeoutExpired:
            return False
        finally:
            for rank in self.ranks:
                rank.kill()
                rank.wait(5)
            self.log.close()

    def cpu(self):
        """Seconds of processor time of each rank."""
        seconds = []
        for rank in self.ranks:
            fields = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()
            seconds.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return seconds

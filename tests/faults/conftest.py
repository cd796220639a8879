"""A real store process on real sockets, and the two parties at its edge.

`Trainer` speaks the wire protocol word by word, so that a test can say something wrong at any point; the
good pushes of these tests go through the real WeightPublisher. `Replica` stands for rank 0 of a replica
(worker/membership.py): it answers the store as told, its liveness is a real process, and what it serves it
reads from the arena as a rank would.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zmq
from safetensors.numpy import save_file

from rollout_client import protocol as wire
from rollout_client.arena_file import ArenaFile
from rollout_client.copying import slot_view, source_view
from rollout_client.protocol import Part
from rollout_client.publisher import WeightPublisher
from weight_manager import messages
from weight_manager.arena import ArenaReader
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, region_digests, version_digest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}
LAYOUT = make_layout(manifest_for(CONFIG, "float32"), 1)
Weights = dict[str, np.ndarray]


def weights(seed: int) -> Weights:
    """A whole version."""
    rng = np.random.default_rng(seed)
    return {p.name: rng.standard_normal(p.shape, dtype=np.float32) for p in LAYOUT.manifest.parameters}


def digest_of(tensors: Weights) -> str:
    """What the store must call this version: computed here from the tensors alone (tp 1: a region is a tensor)."""
    digests = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(tensors[r.name]).data) for r in LAYOUT.regions]
    return version_digest(LAYOUT, digests)


class Timed:
    """`within(seconds)`: the block must end in time, and the bound is part of the test."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> "Timed":
        self.began = time.monotonic()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        took = time.monotonic() - self.began
        assert kind is not None or took <= self.seconds, f"took {took:.2f} s, bound {self.seconds} s"


def until(what: Callable[[], Any], seconds: float = 5.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "nothing came of it in time"
        time.sleep(0.01)
    return value


class Store:
    """`python -m weight_manager` and what the API would ask it."""

    def __init__(self, run_dir: Path, model: Path, arena_dir: Path, **config: Any) -> None:
        self.run_dir, self.arena_dir = run_dir, arena_dir
        run_dir.mkdir(exist_ok=True)
        arena_dir.mkdir(exist_ok=True)
        part = {"name": "t", "run_dir": str(run_dir), "model": str(model), "arena_dir": str(arena_dir)}
        part |= {"push_endpoint": f"ipc://{run_dir}/push.sock", "lease_s": 1.0, "flip_s": 1.0, "rollback_s": 0.5}
        self.config_file = run_dir / "config.json"
        self.config_file.write_text(json.dumps({"store": part | config}))
        self.context = zmq.Context()
        self.api = self.context.socket(zmq.DEALER)
        self.api.set(zmq.LINGER, 0)
        self.start()

    def start(self) -> None:
        self.log = (self.run_dir / "log").open("ab")
        command = [sys.executable, "-m", "weight_manager", "--config", str(self.config_file)]
        self.process = subprocess.Popen(command, stderr=self.log)
        self.api.connect(f"ipc://{self.run_dir}/store.sock")

    @property
    def endpoint(self) -> str:
        return (self.run_dir / "push_endpoint").read_text().strip()

    def ask(self, message: Any, seconds: float = 10.0) -> Any:
        self.api.send(messages.encode(message))
        end = time.monotonic() + seconds
        while self.api.poll(max(0, int((end - time.monotonic()) * 1000))):
            reply = messages.decode_for_api(self.api.recv())
            if getattr(reply, "call", None) == message.call:
                return reply
        raise AssertionError(f"no answer from the store:\n{(self.run_dir / 'log').read_text()[-3000:]}")

    def status(self) -> messages.Status:
        return self.ask(messages.GetStatus(os.urandom(4).hex()))

    def serving(self) -> tuple[int | None, str]:
        """(live version, digest of the bytes in its slot, read here and now)."""
        live = self.status().live
        if live is None:
            return None, ""
        (path,) = self.arena_dir.glob("*.arena")
        with ArenaReader(path) as reader:
            return live.version, version_digest(LAYOUT, region_digests(LAYOUT, reader.slot(live.slot)))

    def wait_live(self) -> "Store":
        until(lambda: self.status().live, 20)
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(10)
        self.log.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.end()
        self.log.close()
        self.api.close()
        self.context.term()


class Trainer:
    """A trainer that says exactly what it is told to."""

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
        self.placement = self.ask(wire.Begin(version, **fields))
        return self.placement

    def write(self, count: int | None = None) -> list[tuple[int, int]]:
        """Put copies into the slot through a mapping of the arena; their (number, digest)."""
        digests = []
        with self.slot() as slot:
            for number, copy in enumerate(self.placement.copies[:count]):
                source = np.ascontiguousarray(source_view(self.sources[copy.part].reshape(-1), copy))
                slot_view(slot, copy)[...] = source
                digests.append((number, xxhash.xxh3_64_intdigest(source.data)))
        return digests

    @contextmanager
    def slot(self) -> Iterator[memoryview]:
        """The staged slot, mapped as a trainer may."""
        with ArenaFile(self.welcome.arena_path, write=True) as arena:
            yield arena.slot((self.placement.slot_offset - arena.slot_offset(0)) // arena.slot_bytes)

    def chunks(self, number: int) -> tuple[bytes, int]:
        """Bytes of a copy and their digest."""
        copy = self.placement.copies[number]
        raw = np.ascontiguousarray(source_view(self.sources[copy.part].reshape(-1), copy)).tobytes()
        return raw, xxhash.xxh3_64_intdigest(raw)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class Replica:
    """Rank 0 of a replica, scripted. `plan`: what it does instead of yes: "no", "silent", "die", by message."""

    def __init__(self, store: Store, number: int = 0, *, beats: bool = True, **plan: str) -> None:
        self.store, self.number, self.plan, self.beats = store, number, plan, beats
        self.process = subprocess.Popen(["sleep", "300"])
        self.seen: list[Any] = []
        self.live: messages.Live | None = None
        self._staged: messages.Live | None = None
        self._flipped = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def served(self) -> tuple[int, str]:
        """(version, digest of the bytes it computes with)."""
        assert self.live is not None
        with ArenaReader(self.arena_path) as reader:
            slot = reader.slot(self.live.slot)
            return self.live.version, version_digest(LAYOUT, region_digests(LAYOUT, slot))

    def saw(self, kind: type) -> list[Any]:
        return [m for m in self.seen if isinstance(m, kind)]

    def die(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stop.set()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 200)
            socket.connect(f"ipc://{self.store.run_dir}/store.sock")
            self._talk(socket)

    def _talk(self, socket: zmq.Socket) -> None:
        register = messages.Register(self.number, [self.process.pid], self.plan.get("layout", LAYOUT.digest))
        socket.send(messages.encode(register))
        while not self._stop.is_set():
            if not socket.poll(100):
                if self.beats:
                    socket.send(messages.encode(messages.Beat(self.live.epoch if self.live else 0)))
                continue
            message = messages.decode_for_replica(socket.recv())
            self.seen.append(message)
            what = self.plan.get(type(message).__name__.lower(), "yes")
            reply = register if isinstance(message, messages.Refused) else None
            reply = self._answer(message, what) if reply is None or what != "yes" else reply
            if reply is not None:
                socket.send(messages.encode(reply))

    def _answer(self, message: Any, what: str) -> Any:
        if what == "die":
            self.die()
        if what in ("die", "silent"):
            return None
        ok, error = what == "yes", "" if what == "yes" else "model.norm.weight does not fit"
        match message:
            case messages.Registered():
                self.arena_path = message.arena_path
                self.live = message.live
                return messages.Adopted(message.live.epoch) if message.live else None
            case messages.Adopt():
                self.live = message.live
                return messages.Adopted(message.live.epoch)
            case messages.Prepare():
                self._staged = message.live
                return messages.Prepared(message.session, ok, 0, error, [] if ok else ["model.norm.weight"])
            case messages.Flip():
                if ok:
                    self._flipped, self._before, self.live = message.session, self.live, self._staged
                return messages.Flipped(message.session, ok, 0, error)
            case messages.Finalize():
                return messages.Finalized(message.session, 1.5)
            case messages.Rollback():
                if self._flipped == message.session:
                    self.live = self._before
                return messages.RolledBack(message.session)


@pytest.fixture(name="weights")
def weights_fixture() -> Callable[[int], Weights]:
    return weights


@pytest.fixture(name="digest_of")
def digest_fixture() -> Callable[[Weights], str]:
    return digest_of


@pytest.fixture(name="within")
def within_fixture() -> type[Timed]:
    return Timed


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Any]:
    return until


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory with `weights(0)`."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(0), directory / "model.safetensors")
    return directory


@pytest.fixture
def launch(tmp_path: Path, model: Path) -> Iterator[Callable[..., Store]]:
    stores: list[Store] = []

    def start(**config: Any) -> Store:
        here, n = config.pop("model", model), len(stores)
        stores.append(Store(tmp_path / f"run{n}", here, tmp_path / f"arena{n}", **config))
        return stores[-1]

    yield start
    for store in stores:
        store.close()


@pytest.fixture
def store_config() -> dict[str, Any]:
    """Fields of StoreConfig; a test parametrises it."""
    return {}


@pytest.fixture
def store(launch: Callable[..., Store], store_config: dict[str, Any]) -> Store:
    return launch(**store_config).wait_live()


@pytest.fixture
def trainer(store: Store) -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []

    def connect(run_id: str = "run", **fields: Any) -> Trainer:
        trainers.append(Trainer(store.endpoint, run_id, **fields))
        return trainers[-1]

    yield connect
    for t in trainers:
        t.close()


@pytest.fixture
def replica(store: Store) -> Iterator[Callable[..., Replica]]:
    replicas: list[Replica] = []

    def join(number: int = 0, *, wait: bool = True, **plan: Any) -> Replica:
        replicas.append(Replica(store, number, **plan))
        if wait:
            until(lambda: store.status().replicas.get(str(number), {}).get("ready"))
        return replicas[-1]

    yield join
    for r in replicas:
        r.close()


@pytest.fixture
def push(store: Store) -> Callable[..., Any]:
    """A good push through the real publisher."""

    def run(tensors: Weights, version: int, run_id: str = "run", **fields: Any) -> Any:
        transport = fields.pop("transport", "auto")
        with WeightPublisher(store.endpoint, run_id=run_id, transport=transport, progress=False) as publisher:
            return publisher.push(tensors, version, timeout_s=fields.pop("timeout_s", 10), **fields)

    return run

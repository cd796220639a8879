"""Fixtures: a store on real sockets and the two parties at its edge. Good pushes use the real WeightPublisher."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from rollout_client.publisher import WeightPublisher
from tests.faults import small_model, waiting
from tests.faults.relay_fleet import RelayFleet
from tests.faults.replica import Replica
from tests.faults.small_model import CONFIG, Weights
from tests.faults.store_process import Store
from tests.faults.trainer import Trainer
from tests.faults.waiting import Timed, until


@pytest.fixture(name="weights")
def weights_fixture() -> Callable[[int], Weights]:
    return small_model.weights


@pytest.fixture(name="digest_of")
def digest_fixture() -> Callable[[Weights], str]:
    return small_model.digest_of


@pytest.fixture(name="within")
def within_fixture() -> type[Timed]:
    return Timed


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Any]:
    return waiting.until


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory with version 0."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(small_model.weights(0), directory / "model.safetensors")
    return directory


@contextmanager
def launcher(directory: Path, model: Path) -> Iterator[Callable[..., Store]]:
    stores: list[Store] = []

    def start(**config: Any) -> Store:
        here, n = config.pop("model", model), len(stores)
        arena_dir = config.pop("arena_dir", directory / f"arena{n}")
        stores.append(Store(directory / f"run{n}", here, arena_dir, **config))
        return stores[-1]

    yield start
    for store in stores:
        store.close()


@contextmanager
def joiner(store: Store) -> Iterator[Callable[..., Replica]]:
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
def launch(tmp_path: Path, model: Path) -> Iterator[Callable[..., Store]]:
    """Starts stores that end with the test."""
    with launcher(tmp_path, model) as start:
        yield start


@pytest.fixture
def store_config() -> dict[str, Any]:
    """Fields of StoreConfig; a test parametrises it."""
    return {}


@pytest.fixture
def store(launch: Callable[..., Store], store_config: dict[str, Any]) -> Store:
    return launch(**store_config).wait_live()


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Store]:
    """For modules whose tests leave the store as they found it."""
    with launcher(tmp_path_factory.mktemp("shared"), model) as start:
        yield start().wait_live()


@pytest.fixture(scope="module")
def shared_replica(shared_store: Store) -> Iterator[Callable[..., Replica]]:
    with joiner(shared_store) as join:
        yield join


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """The test's own training run."""
    return request.node.name


@pytest.fixture
def trainer(store: Store, run: str) -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []

    def connect(run_id: str = run, **fields: Any) -> Trainer:
        trainers.append(Trainer(store.endpoint, run_id, **fields))
        return trainers[-1]

    yield connect
    for t in trainers:
        t.close()


@pytest.fixture
def replica(store: Store) -> Iterator[Callable[..., Replica]]:
    with joiner(store) as join:
        yield join


@pytest.fixture
def push(store: Store, run: str) -> Callable[..., Any]:
    """A good push through the real publisher."""

    def push(tensors: Weights, version: int, run_id: str = run, **fields: Any) -> Any:
        transport = fields.pop("transport", "auto")
        with WeightPublisher(store.endpoint, run_id=run_id, transport=transport, progress=False) as publisher:
            return publisher.push(tensors, version, timeout_s=fields.pop("timeout_s", 10), **fields)

    return push


@pytest.fixture(scope="module")
def served_by(shared_replica):
    return shared_replica(0)


@pytest.fixture
def served(store, served_by, push, weights, digest_of):
    """Version 1 is live on one replica. `.intact()` proves that it still is; `.recovers()` pushes version 2."""

    class Served:
        def __init__(self) -> None:
            self.replica = served_by
            push(weights(1), 1)
            self.expected = (1, digest_of(weights(1)))
            self.intact()

        def intact(self) -> None:
            assert store.serving() == self.expected
            assert self.replica.served() == self.expected

        def recovers(self, seconds: float = 5.0) -> None:
            self.intact()
            began = time.monotonic()
            report = push(weights(2), 2)
            assert time.monotonic() - began < seconds
            assert report.replicas == 1
            assert store.serving() == self.replica.served() == (2, digest_of(weights(2)))

    return Served()


@pytest.fixture
def trainer_of():
    """Begins a push word by word, sends all but the last copies, and gives a function that does the rest."""
    from rollout_client import protocol as wire
    from tests.faults.relay_fleet import TOKEN

    trainers = []

    def start(fleet, tensors, version, *, held_back):
        t = Trainer(next(iter(fleet.hosts.values())).store.endpoint, "run", TOKEN)
        trainers.append(t)
        placement = t.begin(tensors, version, transport="zmq")
        count = len(placement.copies)

        def send(numbers):
            for number in numbers:
                raw, digest = t.chunks(number)
                t.say(wire.Chunk(placement.session, number, 0, [len(raw)]), raw)
                t.say(wire.Written(placement.session, [(number, digest)]))

        def finish():
            send(range(count - held_back, count))
            assert isinstance(t.ask(wire.Seal(placement.session)), wire.Sealed)
            return t.ask(wire.Commit(placement.session))

        send(range(count - held_back))
        return t, finish

    yield start
    for t in trainers:
        t.close()


@pytest.fixture
def fleet(tmp_path, model):
    """Stores of several hosts, none yet."""
    fleet = RelayFleet(tmp_path, model)
    yield fleet
    fleet.close()

"""The API under test between two stand-ins (scripted.py), and a client of it."""

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app import create_app
from api.config import ApiConfig
from api.model import Model
from api.server import Server
from api.service import Service
from tests.unit.api.byte_tokenizer import EOS, VOCAB, ByteTokenizer
from tests.unit.api.scripted import CONTEXT, ScriptedReplica, ScriptedStore


@pytest.fixture
def same_signals() -> Iterator[None]:
    """uvicorn takes over signals in the main thread; a test that starts a server has its own again after it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short: an ipc path may have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="pr-api-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    document = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "architectures": ["LlamaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(document))
    return path


@pytest.fixture
def settings() -> dict[str, Any]:
    """Override in a test module to configure the API differently."""
    return {}


@pytest.fixture
def config(run_dir: Path, model_dir: Path, settings: dict[str, Any]) -> ApiConfig:
    return ApiConfig(**({"run_dir": run_dir, "model": model_dir, "replicas": 2} | settings))


@pytest.fixture
def make_replica(config: ApiConfig) -> Callable[[int], ScriptedReplica]:
    """Override in a test module for replicas of another kind."""
    return lambda index: ScriptedReplica(config.run_dir, index)


@pytest.fixture
async def replicas(
    config: ApiConfig, make_replica: Callable[[int], ScriptedReplica]
) -> AsyncIterator[list[ScriptedReplica]]:
    made = [make_replica(i) for i in range(config.replicas)]
    for replica in made:
        replica.start()
    yield made
    for replica in made:
        await replica.die()


@pytest.fixture
async def store(config: ApiConfig) -> AsyncIterator[ScriptedStore]:
    made = ScriptedStore(config.run_dir)
    yield made
    await made.close()


@pytest.fixture
def model(config: ApiConfig) -> Model:
    return Model(
        config.model_name,
        config.model,
        VOCAB,
        CONTEXT,
        "LlamaForCausalLM",
        ByteTokenizer(),  # type: ignore[arg-type]
        (EOS, 7),
        aliases=config.model_aliases,
    )


@pytest.fixture
async def service(
    config: ApiConfig, model: Model, replicas: list[ScriptedReplica], store: ScriptedStore
) -> AsyncIterator[Service]:
    made = Service(config, model)
    async with made.running():
        await until(lambda: all(r.serves(made.fleet.live) for r in made.fleet.replicas) and made.weights.live)
        yield made


@contextlib.asynccontextmanager
async def served(service: Service, listener: socket.socket) -> AsyncIterator[Server]:
    """A whole server of it on this socket, with its replicas, until the block ends."""
    if listener.family == socket.AF_INET:  # as the service's loop, uvloop, has it, or each answer waits 40 ms
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # whom it accepts have it from it
    server = Server(service)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started and all(r.serves(service.fleet.live) for r in service.fleet.replicas))
    yield server
    server.should_exit = True
    server._leave.set()
    await asyncio.wait_for(task, 20)


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=10) as made:
        yield made


async def until(condition: Any, timeout_s: float = 30.0) -> None:
    """Wait for something the event loop is about to do."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110  there is no one event for what tests wait for
                await asyncio.sleep(0.005)
            return
    raise AssertionError("it did not happen in time")


@pytest.fixture(name="until")
def until_fixture() -> Any:
    return until

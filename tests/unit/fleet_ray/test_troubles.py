"""The head's side when something else than Ray fails, as a disk that is full for a while: it goes on, and makes up for
what it could not do. Actors are stand-ins for processes on other hosts.
"""

import asyncio
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from fleet_ray import apis as apis_module
from fleet_ray import kept_file, replicas, stores
from fleet_ray.actors import Place
from fleet_ray.apis import Apis
from fleet_ray.config import FleetConfig
from fleet_ray.head import Head
from fleet_ray.kept_file import KeptFile
from fleet_ray.messages import SOCKET, Failed, FleetState, GetFleet, Scale, decode_reply, encode
from fleet_ray.replicas import KeptReplica
from fleet_ray.stores import Stores
from tests.unit.fleet_ray.test_apis import NODE, Actor, Method, until
from worker import background

ENDPOINT = "tcp://10.0.0.2:40001"
FULL = OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    for module in (apis_module, background, kept_file, replicas, stores):
        monkeypatch.setattr(module, "AGAIN_S", 0.01)
    monkeypatch.setattr(apis_module, "LOOK_S", 0.01)


@pytest.fixture
def short_dir():
    """An ipc path may have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="pr-fleet-"))
    yield path
    shutil.rmtree(path)


def failing_once(answer):
    """A function that raises the first time, as where the disk is full, and answers then."""
    left = [FULL]

    def call(*_):
        if left:
            raise left.pop()
        return answer

    return call


class Replica:
    """The actor of a replica."""

    def __init__(self):
        self.where = Method(lambda path: Place(NODE, "10.0.0.2"))
        self.start = Method(lambda *words: ENDPOINT)
        self.ended = self

    def remote(self):
        return asyncio.get_running_loop().create_future()


async def test_a_file_is_written_once_it_can_be_and_says_the_newest(tmp_path, caplog):
    file = KeptFile(tmp_path / "run" / "replicas.json")
    file.say(b"old")
    file.say(b"new")
    await asyncio.sleep(0.1)
    assert len(caplog.records) == 1, "it is said once, not with every try"
    (tmp_path / "run").mkdir()
    await until((tmp_path / "run" / "replicas.json").exists)
    assert (tmp_path / "run" / "replicas.json").read_bytes() == b"new"
    file.say(b"newer")
    assert (tmp_path / "run" / "replicas.json").read_bytes() == b"newer"


async def test_where_a_replica_is_reaches_the_api_after_the_disk_was_full(tmp_path):
    run_dir = tmp_path / "run"
    head = Head(FleetConfig(run_dir=run_dir), tmp_path / "config.json")
    head._told(0, ENDPOINT)
    head._told(0, ENDPOINT)
    run_dir.mkdir()
    await until((run_dir / "replicas.json").exists)
    assert json.loads((run_dir / "replicas.json").read_bytes()) == {"0": ENDPOINT}


@pytest.mark.parametrize("what", ["at", "told"])
async def test_a_replica_is_placed_again_whatever_failed(tmp_path, monkeypatch, what):
    class Placed:
        at = staticmethod(failing_once(tmp_path) if what == "at" else lambda *_: tmp_path)

        def serves_itself(self, place):
            return False

    placed, told = Placed(), []
    at = placed.at
    placed.at = lambda *words: Method(at).remote(*words)
    tell = failing_once(None) if what == "told" else lambda *_: None
    made = KeptReplica(0, FleetConfig(run_dir=tmp_path), placed, 1, lambda *said: (tell(), told.append(said)))
    monkeypatch.setattr(made, "_make", lambda: setattr(made, "_actor", Replica()))
    task = asyncio.create_task(made.run())
    await until(lambda: (0, ENDPOINT) in told and made.state == "running")
    task.cancel()


async def test_a_node_s_store_is_watched_on_whatever_failed(tmp_path, monkeypatch):
    class Store:
        def __init__(self):
            self.started = 0
            self.alive = Method(lambda: None)
            self.start = Method(self._start)
            self.ended, self.stop = self, Method(lambda: None)

        def _start(self, upstream):
            self.started += 1
            return str(tmp_path), "tcp://10.0.0.2:7000"

        def remote(self):
            return asyncio.get_running_loop().create_future()

    class Beside:
        def __init__(self):
            self._call = failing_once(None)

        def beside(self, node, actor):
            self._call()

        def gone(self, node):
            pass

    store = Store()
    monkeypatch.setattr(stores._Life, "_make", lambda life: store)
    monkeypatch.setattr(stores.ray, "kill", lambda actor: None)
    head = Place("head", "10.0.0.1", sees_head=True)
    run_dir = tmp_path / "not there"  # so that the node cannot be written down either
    kept = Stores(
        None, head, run_dir=run_dir, relay="tcp://10.0.0.1:5601", fan_out=2, apis=Beside(), log_level="warning"
    )
    assert await asyncio.wait_for(kept.at(Place(NODE, "10.0.0.2"), 0), 30) == tmp_path
    await until(lambda: store.started == 2)
    await kept._lives[NODE].stop()


async def test_what_a_node_could_not_write_down_it_is_told_again(tmp_path):
    (tmp_path / "http_url").write_text("http://0.0.0.0:8000\n")
    (tmp_path / "replicas.json").write_text("{}")
    api = {"state_dir": None, "host": "0.0.0.0", "data_token": "a token"}
    kept = Apis(tmp_path, "10.0.0.1", port=8001, api=api)
    actor = Actor("http://10.0.0.2:8001")
    told = failing_once(None)
    actor.tell = Method(lambda *said: (told(), actor.told.__setitem__(*said)))
    kept.beside(NODE, actor)
    await until(lambda: actor.told == {"replicas.json": b"{}"})
    kept.close()


async def test_the_apis_are_looked_after_whatever_failed(tmp_path, monkeypatch):
    (tmp_path / "http_url").write_text("http://0.0.0.0:8000\n")
    api = {"state_dir": None, "host": "0.0.0.0", "data_token": "a token"}
    kept = Apis(tmp_path, "10.0.0.1", port=8001, api=api)
    actor = Actor("http://10.0.0.2:8001")
    kept.beside(NODE, actor)
    await until((tmp_path / "apis.json").exists)
    monkeypatch.setattr(kept, "_content", failing_once(b"{}"))
    await until(lambda: actor.told.get("replicas.json") == b"{}")
    kept.close()


@pytest.mark.parametrize("unreadable", [b"\xc1", b"\x82\xa1t\xa5scale\xa4call\xa2\xff\xfe"])
async def test_the_fleet_answers_after_bytes_that_cannot_be_read(short_dir, unreadable):
    head = Head(FleetConfig(run_dir=short_dir), short_dir / "config.json")
    control = asyncio.create_task(head._serve_control())
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(f"ipc://{short_dir / SOCKET}")
        for message, answer in ((unreadable, Failed), (encode(GetFleet("a")), FleetState)):
            await asker.send(message)
            assert isinstance(decode_reply(await asyncio.wait_for(asker.recv(), 30)), answer)
    control.cancel()
    await asyncio.gather(control, return_exceptions=True)


async def test_the_fleet_answers_after_a_scale_that_failed(short_dir, monkeypatch):
    head = Head(FleetConfig(run_dir=short_dir), short_dir / "config.json")
    monkeypatch.setattr(head, "_scale", failing_once(None))
    control = asyncio.create_task(head._serve_control())
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(f"ipc://{short_dir / SOCKET}")
        for message, answer in ((Scale("a", 2), Failed), (Scale("b", 2), FleetState)):
            await asker.send(encode(message))
            assert isinstance(decode_reply(await asyncio.wait_for(asker.recv(), 30)), answer)
    control.cancel()
    await asyncio.gather(control, return_exceptions=True)


async def test_the_fleet_can_be_asked_again_after_its_answers_failed(short_dir, monkeypatch):
    head = Head(FleetConfig(run_dir=short_dir), short_dir / "config.json")
    monkeypatch.setattr(head, "_reply", failing_once(FleetState("b", 0, [])))
    control = asyncio.create_task(head._serve_control())
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(f"ipc://{short_dir / SOCKET}")
        await asker.send(encode(GetFleet("a")))
        assert not await asker.poll(200), "it was to fail"
        await asker.send(encode(GetFleet("b")))
        assert decode_reply(await asyncio.wait_for(asker.recv(), 30)) == FleetState("b", 0, [])
    control.cancel()
    await asyncio.gather(control, return_exceptions=True)


async def test_of_nodes_that_are_gone_nothing_is_kept(tmp_path):
    (tmp_path / "http_url").write_text("http://0.0.0.0:8000\n")
    (tmp_path / "replicas.json").write_text("{}")
    kept = Apis(tmp_path, "10.0.0.1", port=8001, api={"state_dir": None, "host": "0.0.0.0", "data_token": "a token"})
    actor = Actor("http://10.0.0.2:8001")
    kept.beside(NODE, actor)
    await until((tmp_path / "apis.json").exists)
    kept.gone(NODE)
    assert not kept._told
    kept.look()
    kept.close()

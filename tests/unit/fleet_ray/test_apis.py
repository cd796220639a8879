"""The APIs of nodes as the head keeps them: told what changes, begun again, written down while they are there."""

import asyncio
import json

import pytest

from fleet_ray import apis as module
from fleet_ray.apis import Apis

NODE = "abcd1234" + "0" * 48


class Method:
    """A method of an actor, as Ray calls it: it stands for a process on another host."""

    def __init__(self, call):
        self._call = call

    def remote(self, *words):
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self._call(*words))
        except (RuntimeError, OSError) as error:
            future.set_exception(error)
        return future


class Actor:
    def __init__(self, *answers):
        self.asked, self.told, self._answers = [], {}, list(answers)
        self.ends = []  # of each life of its API
        self.serve = Method(self._serve)
        self.tell = Method(self.told.__setitem__)
        self.api_ended = self

    def remote(self):
        self.ends.append(asyncio.get_running_loop().create_future())
        return self.ends[-1]

    def _serve(self, head_url, port):
        self.asked.append((head_url, port))
        answer = self._answers.pop(0)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer


@pytest.fixture
async def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    (tmp_path / "http_url").write_text("http://0.0.0.0:8000\n")
    (tmp_path / "replicas.json").write_text("{}")
    made = Apis(tmp_path, "10.0.0.1", port=8001, api={"state_dir": None, "host": "0.0.0.0", "data_token": "a token"})
    yield made
    made.close()


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  a test
            await asyncio.sleep(0.005)


def written(tmp_path):
    path = tmp_path / "apis.json"
    return json.loads(path.read_text()) if path.exists() else {}


async def test_a_node_is_told_what_its_api_reads_and_whatever_changes_of_it(kept, tmp_path):
    actor = Actor("http://10.0.0.2:8001")
    kept.beside(NODE, actor)
    await until(lambda: written(tmp_path) == {"abcd1234": "http://10.0.0.2:8001"})
    assert actor.asked == [("http://10.0.0.1:8000", 8001)], "where nodes reach the head, not what it was bound to"
    assert actor.told == {"replicas.json": b"{}"}
    (tmp_path / "version_names.json").write_text("[]")
    (tmp_path / "replicas.json").write_text('{"0": "tcp://10.0.0.2:4000"}')
    await until(lambda: actor.told.get("version_names.json") == b"[]" and len(actor.told["replicas.json"]) > 2)
    again = Actor("http://10.0.0.2:8001")  # the actor was restarted: it knows nothing
    kept.beside(NODE, again)
    await until(lambda: len(again.told) == 2)
    kept.gone(NODE)
    assert written(tmp_path) == {}


async def test_an_api_that_does_not_start_is_begun_again(kept, tmp_path):
    actor = Actor(RuntimeError("the API did not start"), "http://10.0.0.2:8001")
    kept.beside(NODE, actor)
    await until(lambda: written(tmp_path))
    assert len(actor.asked) == 2


@pytest.mark.parametrize("how", ["given up", "the actor has died"])
async def test_an_api_that_was_given_up_is_listed_no_more_and_begun_again(kept, tmp_path, how):
    """The node's store goes on, so nothing else would begin it again."""
    actor = Actor("http://10.0.0.2:8001", RuntimeError("not yet"), "http://10.0.0.2:8002")
    kept.beside(NODE, actor)
    await until(lambda: actor.ends)
    assert written(tmp_path) == {"abcd1234": "http://10.0.0.2:8001"}
    if how == "given up":
        actor.ends[0].set_result("api ended 8 times in 60 s")
    else:
        actor.ends[0].set_exception(RuntimeError("the actor died"))
    await until(lambda: len(actor.ends) == 2)
    assert written(tmp_path) == {"abcd1234": "http://10.0.0.2:8002"}
    assert len(actor.asked) == 3


async def test_where_strangers_could_reach_it_there_is_none(kept, tmp_path):
    actor = Actor("")
    kept.beside(NODE, actor)
    await until(lambda: actor.asked)
    await asyncio.sleep(0.05)
    assert (len(actor.asked), written(tmp_path)) == (1, {})

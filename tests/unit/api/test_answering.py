"""A stream that has nothing to say yet keeps its connection, through proxies that cut silent ones."""

import asyncio
import json

import pytest
from starlette.requests import ClientDisconnect

from api import answering
from api.answering import DONE, KEEP_ALIVE, EventStream, event, while_connected
from api.app import create_app
from api.errors import Conflict
from worker.messages import Generate

SILENCE_S = 0.05


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", SILENCE_S)


class Connection:
    """One client of an ASGI application: what it sent, what it got so far."""

    def __init__(self, body: dict) -> None:
        self.got: list[dict] = []
        self._inbox = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._gone = asyncio.Event()

    async def receive(self):
        if self._inbox:
            return self._inbox.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.got.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.got if m["type"] == "http.response.body" and m["body"]]

    @property
    def status(self) -> int | None:
        return self.got[0]["status"] if self.got else None

    def leave(self):
        self._gone.set()

    def scope(self, path: str):
        plain = {"client": None, "server": None, "scheme": "http", "root_path": "", "query_string": b""}
        return plain | {"type": "http", "method": "POST", "path": path, "headers": [(b"host", b"127.0.0.1")]}


def opened(service, path: str, body: dict) -> tuple[Connection, "asyncio.Task[None]"]:
    connection = Connection(body | {"stream": True})
    app = create_app(service)
    return connection, asyncio.create_task(app(connection.scope(path), connection.receive, connection.send))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rollout/generate", {"prompt": "A", "max_tokens": 2}),
        ("/v1/completions", {"prompt": "A", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A"}], "max_tokens": 2}),
        ("/inference/v1/generate", {"token_ids": [65], "sampling_params": {"max_tokens": 2}}),
        ("/generate", {"text": "A", "sampling_params": {"max_new_tokens": 2}}),
    ],
)
async def test_a_held_stream_says_that_it_is_there(client, service, until, path, body):
    await client.post("/v1/rollout/pause")
    connection, task = opened(service, path, body)
    await until(lambda: connection.bodies.count(KEEP_ALIVE) >= 3)
    assert connection.status == 200
    assert set(connection.bodies) == {KEEP_ALIVE}
    await client.post("/v1/rollout/resume")
    await task
    said = [part for part in connection.bodies if part != KEEP_ALIVE]
    assert said[-1] == DONE
    assert all(part.startswith(b"data: {") for part in said[:-1])
    assert [m["type"] for m in connection.got].count("http.response.start") == 1
    assert connection.got[-1]["more_body"] is False


async def test_one_that_is_frozen_in_the_middle_does_too(client, service, replicas, until):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(1)
    connection, task = opened(service, "/v1/rollout/generate", {"prompt": "A", "max_tokens": 2})
    await until(lambda: connection.bodies.count(KEEP_ALIVE) >= 2)
    assert connection.bodies[0].startswith(b"data: {")
    for replica in replicas:
        replica.gate.release()
    await task
    assert connection.bodies[-1] == DONE


async def test_a_busy_one_has_no_need(client, service, replicas, until, monkeypatch):
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", 1.0)  # of 1.4 s in all; a busy machine may stand still for a while
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    connection, task = opened(service, "/v1/rollout/generate", {"prompt": "A", "max_tokens": 12})
    for _ in range(12):
        await asyncio.sleep(0.12)
        for replica in replicas:
            replica.gate.release()
    await task
    assert KEEP_ALIVE not in connection.bodies


async def test_a_client_that_leaves_meanwhile_is_noticed(client, service, replicas, until):
    await client.post("/v1/rollout/pause")
    connection, task = opened(service, "/v1/completions", {"prompt": "A"})
    await until(lambda: KEEP_ALIVE in connection.bodies)
    connection.leave()
    await task
    assert service.generations.open == 0
    await client.post("/v1/rollout/resume")
    await asyncio.sleep(0.02)
    assert not any(r.got(Generate) for r in replicas)


async def test_an_error_before_the_first_comment_is_a_plain_one(service):
    body = {"prompt": "A", "min_weight_version": 9, "version_timeout_s": 0.01}
    # The fleet looks at deadlines four times a second.
    answering.KEEP_ALIVE_S = 5.0
    connection, task = opened(service, "/v1/completions", body)
    await task
    assert connection.status == 409


async def test_a_later_one_is_an_event_that_has_the_status(service):
    body = {"prompt": "A", "min_weight_version": 9, "version_timeout_s": 0.2}
    connection, task = opened(service, "/v1/completions", body)
    await task
    assert connection.status == 200
    *_, failed, end = b"".join(connection.bodies).split(b"\n\n")[:-1]
    assert end == b"data: [DONE]"
    error = json.loads(failed.removeprefix(b"data: "))["error"]
    assert (error["status"], error["code"]) == (409, "Conflict")


async def test_headers_are_made_when_the_status_goes_out():
    headers = {}

    async def events():
        headers["x-made"] = "late"
        yield event({})

    connection = Connection({})
    await EventStream(events(), lambda: headers)(connection.scope("/"), connection.receive, connection.send)
    assert (b"x-made", b"late") in connection.got[0]["headers"]


async def test_an_error_at_once_leaves_the_status_to_others():
    async def events():
        raise Conflict("no")
        yield b""

    connection = Connection({})
    with pytest.raises(Conflict):
        await EventStream(events())(connection.scope("/"), connection.receive, connection.send)
    assert connection.got == []


@pytest.mark.parametrize(("goes", "ended"), [(True, False), (False, True), (True, True)])
async def test_work_ends_when_its_client_goes_or_when_it_is_cancelled(goes, ended):
    """Who cancels is told apart: a service that stops must not take it for a client's leaving."""
    gone, begun, seen = asyncio.Event(), asyncio.Event(), []

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # what takes an await to be undone
            seen.append("undone")

    task = asyncio.create_task(while_connected(receive, work()))
    await begun.wait()
    await asyncio.sleep(0)
    if goes:
        gone.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    if ended:
        task.cancel()
    with pytest.raises(asyncio.CancelledError if ended else ClientDisconnect):
        await task
    assert seen == ["undone"]


async def test_work_that_is_done_is_not_ended_by_a_client_that_goes_after_it():
    async def receive():
        return {"type": "http.disconnect"}

    async def work():
        return 7

    assert await while_connected(receive, work()) == 7
    await asyncio.sleep(0.01)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0

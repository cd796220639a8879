"""Events of tokens: all of them, in order, written at once where the server lets them be."""

import asyncio
import json

import pytest

from api.answering import DONE
from api.app import create_app
from api.connections import WRITE_NOW
from tests.unit.api.test_answering import Connection
from worker.messages import Chunk

TOKENS = 6


class Server(Connection):
    """One client of a server that can write without an await. `full`: it cannot now; `stuck`: nor with one."""

    def __init__(self, body):
        super().__init__(body | {"stream": True})
        self.full = False
        self.stuck = asyncio.Event()
        self.stuck.set()
        self.held_up = 0
        self.written: list[bytes] = []
        self.all: list[bytes] = []

    def scope(self, path):
        return super().scope(path) | {"extensions": {WRITE_NOW: self.write_now}}

    def write_now(self, data):
        assert data, "an empty chunk ends a body"
        assert self.got, "nothing goes before the status"
        if self.full:
            return False
        self.written.append(data)
        self.all.append(data)
        return True

    async def send(self, message):
        self.held_up += not self.stuck.is_set()
        await self.stuck.wait()
        await super().send(message)
        if message["type"] == "http.response.body":
            self.all.append(message["body"])

    @property
    def events(self):
        said = b"".join(self.all).split(b"\n\n")
        return [json.loads(one.removeprefix(b"data: ")) for one in said if one.startswith(b"data: {")]

    @property
    def tokens(self):
        return [token for one in self.events for token in one["outputs"][0]["token_ids"]]


@pytest.fixture
def opened(service, replicas):
    """A stream whose replicas make a token for each release of their gates."""
    tasks = []
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)

    def start(path="/v1/rollout/generate", **body):
        server = Server({"prompt": "A", "max_tokens": TOKENS} | body)
        task = asyncio.create_task(create_app(service)(server.scope(path), server.receive, server.send))
        tasks.append(task)
        return server, task

    yield start
    for task in tasks:
        task.cancel()


def release(replicas, count=1):
    for replica in replicas:
        for _ in range(count):
            replica.gate.release()


async def test_only_the_first_event_and_the_end_take_an_await(opened, replicas, until):
    server, task = opened()
    for made in range(1, TOKENS + 1):
        release(replicas)
        await until(lambda made=made: len(server.tokens) == made)
    await task
    assert server.tokens == [ord("A") + 1 + i for i in range(TOKENS)]
    assert len(server.written) == TOKENS - 2, "an event for each token between"
    assert [one["outputs"][0]["spans"][0]["end"] for one in server.events] == list(range(1, TOKENS + 1))
    assert server.all[-2:] == [DONE, b""]


async def test_what_a_slow_reader_has_not_taken_becomes_one_event(opened, service, replicas, until):
    server, task = opened()
    release(replicas)
    await until(lambda: server.tokens)
    server.full = True
    server.stuck.clear()
    release(replicas)
    await until(lambda: server.held_up == 1)
    release(replicas, 2)
    (flight,) = service.fleet.flights
    await until(lambda: len(flight.samples[0].token_ids) == 4)
    await asyncio.sleep(0.01)
    assert (len(server.tokens), server.held_up) == (1, 1), "nothing more is sent until that is taken"
    server.stuck.set()
    await until(lambda: len(server.tokens) == 4)
    assert [len(one["outputs"][0]["token_ids"]) for one in server.events] == [1, 1, 2]
    server.full = False
    release(replicas, TOKENS)
    await task
    assert server.tokens == [ord("A") + 1 + i for i in range(TOKENS)]


async def test_a_slow_reader_holds_up_nobody_else(opened, replicas, until):
    (slow, _), (quick, task) = opened(), opened()
    release(replicas, 2)
    await until(lambda: slow.tokens and quick.tokens)
    slow.full = True
    slow.stuck.clear()
    release(replicas, TOKENS * 2)
    await task
    assert len(quick.tokens) == TOKENS
    assert len(slow.tokens) < TOKENS


async def test_samples_of_one_request_are_written_together(opened, service, replicas, until):
    server, task = opened(n=4)
    release(replicas)
    await until(lambda: len(server.events) == 4)
    (flight,) = service.fleet.flights
    for _ in range(2):
        for index in range(4):
            flight.go_on(index, 7, -0.5)
        before = len(server.written)
        await until(lambda before=before: len(server.written) > before)
    assert [part.count(b"data: ") for part in server.written] == [4, 4]
    release(replicas, TOKENS)
    await task


async def test_prompts_that_end_before_others_end_no_stream(opened, service, replicas, until):
    """An empty chunk would: `write_now` is asked for none."""
    server, task = opened(prompt=["A", "B"])
    release(replicas[:1], TOKENS * 2)
    await until(lambda: sum(one["outputs"][0]["finish_reason"] == "length" for one in server.events) == 1)
    assert not task.done()
    release(replicas[1:], TOKENS * 2)
    await task
    assert sum(one["outputs"][0]["finish_reason"] == "length" for one in server.events) == 2


async def test_a_failure_comes_after_what_was_made_before_it(opened, service, replicas, until):
    server, task = opened(n=2)
    release(replicas)
    await until(lambda: len(server.events) == 2)
    (flight,) = service.fleet.flights
    flight.go_on(0, 99, -0.5)
    spans = flight.samples[1].spans
    flight.add(Chunk(flight.attempt_id, 1, [], [], spans, finish="error", error="it broke"))
    flight.go_on(0, 100, -0.5)
    await task
    *_, last, failed = server.events
    assert last["outputs"][0]["token_ids"] == [99, 100]
    assert failed["error"]["message"] == "it broke"
    assert server.all[-1] == b""
    assert b"[DONE]" in server.all[-2]
    assert service.generations.open == 0


async def test_a_fault_of_our_own_ends_that_stream_alone(opened, service, replicas, until, monkeypatch):
    from api.routes import rollout

    (broken, failing), (whole, task) = opened(prompt="A"), opened(prompt="Z")
    release(replicas, 2)
    await until(lambda: broken.tokens and whole.tokens)
    real = rollout._output

    def output(prompt_index, part, text):
        if part.token_ids == [ord("A") + 3]:
            raise KeyError("a fault")
        return real(prompt_index, part, text)

    monkeypatch.setattr(rollout, "_output", output)
    for _ in range(TOKENS * 2):
        release(replicas)
        await asyncio.sleep(0.01)
    await task
    assert len(whole.tokens) == TOKENS
    with pytest.raises(KeyError, match="a fault"):
        await failing
    assert service.generations.open == 0


async def test_one_whose_client_has_gone_is_written_nothing(opened, service, replicas, until):
    server, task = opened()
    release(replicas, 2)
    await until(lambda: len(server.tokens) == 2)
    server.leave()
    await task
    assert service.generations.open == 0
    release(replicas, TOKENS)
    await asyncio.sleep(0.05)
    assert len(server.tokens) == 2


async def test_messages_that_are_there_together_are_one_event(opened, service, replicas, until):
    server, task = opened()
    release(replicas)
    await until(lambda: server.tokens)
    (flight,) = service.fleet.flights
    for token in (7, 8, 9):
        flight.go_on(0, token, -0.5)
    assert not server.written, "not before all is taken in"
    await until(lambda: server.written)
    assert server.events[-1]["outputs"][0]["token_ids"] == [7, 8, 9]
    task.cancel()

"""What every data route does alike, whole and streamed: versions, joining by id, staleness, a client that leaves."""

import asyncio
import json
import threading
from typing import Any, NamedTuple

import pytest

from api import answering
from tests.unit.api.scripted import span
from worker.messages import Abort, Generate


class Route(NamedTuple):
    """A route, how it is asked for `count` tokens, and what it calls a request id."""

    path: str
    asked: Any
    id_field: str = "request_id"


def _plain(count: int) -> dict[str, Any]:
    return {"prompt": "A", "max_tokens": count}


NATIVE = Route("/v1/rollout/generate", _plain)
COMPLETIONS = Route("/v1/completions", _plain)
CHAT = Route("/v1/chat/completions", lambda n: {"messages": [{"role": "user", "content": "A"}], "max_tokens": n})
TOKENS = Route("/inference/v1/generate", lambda n: {"token_ids": [65], "sampling_params": {"max_tokens": n}})
SGLANG = Route("/generate", lambda n: {"text": "A", "sampling_params": {"max_new_tokens": n}}, "rid")
LEGACY = Route("/generate", lambda n: {"prompts": ["A"], "max_tokens": n})
NAMED = pytest.mark.parametrize(
    "route", [NATIVE, COMPLETIONS, CHAT, TOKENS, SGLANG], ids=["native", "completions", "chat", "tokens", "sglang"]
)
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def events(text: str) -> list[dict[str, Any]]:
    """Every event of a stream but [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.strip().split("\n\n") if not line.startswith(":")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def spans_of(reply: dict[str, Any]) -> list[list[Any]]:
    """Version spans of each sample in a reply, or in an event."""
    if "meta_info" in reply:
        return [reply["meta_info"]["weight_versions"]]
    parts = reply.get("outputs") or reply["choices"]
    return [part.get("spans", part.get("weight_versions")) for part in parts]


def finish_of(reply: dict[str, Any]) -> Any:
    if "meta_info" in reply:
        return (reply["meta_info"]["finish_reason"] or {}).get("type")
    return (reply.get("outputs") or reply["choices"])[0]["finish_reason"]


async def ask(client, route: Route, stream: bool, count: int = 3, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    reply = await client.post(route.path, json=route.asked(count) | {"stream": stream} | more)
    if reply.status_code != 200:
        return reply, []
    return reply, events(reply.text) if stream else [reply.json()]


def gated(replicas) -> None:
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)


def let_go(replicas, tokens: int) -> None:
    for replica in replicas:
        for _ in range(tokens):
            replica.gate.release()


async def all_at(service, store, replicas, until, version: int) -> None:
    store.commit(version)
    for replica in replicas:
        replica.move("serving", version)
    await until(lambda: all(r.version == version for r in service.fleet.replicas))
    await until(lambda: service.fleet.live.version == version)


@NAMED
@STREAM
@pytest.mark.parametrize("count", [3, 0])
async def test_versions_cover_every_token(client, store, replicas, service, until, route, stream, count):
    await all_at(service, store, replicas, until, 7)
    reply, parts = await ask(client, route, stream, count)
    assert reply.headers["x-weight-version"] == "7"
    seen = 0
    for part in parts:
        for spans in spans_of(part):
            assert [s["start"] for s in spans] == [0, *(s["end"] for s in spans[:-1])]
            assert {str(s["version"]) for s in spans} == {"7"}
            assert spans[-1]["end"] >= seen
            seen = spans[-1]["end"]
    assert seen == count
    if route is not NATIVE:
        for part in parts:
            assert part.get("weight_version", part.get("meta_info", {}).get("weight_version")) == "7"


@NAMED
@STREAM
async def test_what_was_computed_again_is_said(client, replicas, route, stream):
    for replica in replicas:
        replica.recomputed_after = 1
    _, parts = await ask(client, route, stream)
    (spans,) = spans_of(parts[-1])
    assert [(s["start"], s["end"], s["recomputed"]) for s in spans] == [(0, 1, False), (1, 3, True)]
    for part in parts:
        assert all(
            set(s) == {"version", "start", "end", "recomputed", "digest"} for spans in spans_of(part) for s in spans
        )


async def test_versions_of_the_older_trl_form(client):
    reply, (body,) = await ask(client, LEGACY, stream=False)
    assert body["weight_version"] == "default"
    assert body["weight_versions"] == [[span("default", 0, 3)]]
    assert reply.headers["x-weight-version"] == "0"


@NAMED
async def test_a_stream_s_header_is_of_the_version_it_begins_under(client, service, store, replicas, until, route):
    """Not of the one that was live when it was sent and held."""
    await client.post("/v1/rollout/pause")
    asked = asyncio.create_task(ask(client, route, stream=True))
    await until(lambda: service.fleet.held)
    store.commit(4)
    for replica in replicas:
        replica.version = 4
    await client.post("/v1/rollout/resume")
    await until(lambda: service.fleet.live.version == 4)
    reply, _ = await asked
    assert reply.headers["x-weight-version"] == "4"


@NAMED
@pytest.mark.parametrize("streams", [(False, False), (True, True), (True, False), (False, True)])
async def test_a_repeated_id_gets_the_first_one_s_result(client, service, replicas, until, route, streams):
    gated(replicas)
    named = {route.id_field: "same"}
    first = asyncio.create_task(ask(client, route, streams[0], 2, **named))
    await until(lambda: any(r.running for r in replicas))
    second = asyncio.create_task(ask(client, route, streams[1], 2, **named))
    await until(lambda: service.generations._jobs["same"]._watchers == 2)
    let_go(replicas, 2)
    for _, parts in (await first, await second):
        assert spans_of(parts[-1])[0][-1]["end"] == 2
        assert finish_of(parts[-1]) == "length"
    assert sum(len(r.got(Generate)) for r in replicas) == 1


@NAMED
@STREAM
async def test_one_of_two_that_leaves_does_not_take_the_other_s_result(client, replicas, until, service, route, stream):
    gated(replicas)
    named = {route.id_field: "same"}
    first = asyncio.create_task(ask(client, route, stream, 2, **named))
    await until(lambda: any(r.running for r in replicas))
    second = asyncio.create_task(ask(client, route, stream, 2, **named))
    await until(lambda: service.generations._jobs["same"]._watchers == 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.sleep(0.02)
    assert not any(abort.request_ids for r in replicas for abort in r.got(Abort))
    let_go(replicas, 2)
    _, parts = await second
    assert spans_of(parts[-1])[0][-1]["end"] == 2


@NAMED
@STREAM
async def test_a_client_that_leaves_ends_its_request(client, replicas, service, until, route, stream):
    gated(replicas)
    task = asyncio.create_task(ask(client, route, stream))
    await until(lambda: any(r.running for r in replicas))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not any(r.running for r in replicas))
    assert service.generations.open == 0
    assert not service.fleet.flights


@NAMED
@STREAM
async def test_a_client_that_leaves_while_held_never_runs(client, replicas, service, until, route, stream):
    await client.post("/v1/rollout/pause")
    task = asyncio.create_task(ask(client, route, stream))
    await until(lambda: service.fleet.held)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not service.fleet.held)
    await client.post("/v1/rollout/resume")
    await asyncio.sleep(0.05)
    assert not any(r.got(Generate) for r in replicas)


@NAMED
@STREAM
async def test_a_version_that_does_not_come_is_a_conflict(client, route, stream):
    reply, _ = await ask(client, route, stream, min_weight_version=5, version_timeout_s=0.05)
    assert reply.status_code == 409
    assert "version 5; live is 0" in reply.json()["error"]["message"]


@NAMED
@STREAM
async def test_a_request_waits_for_the_version_it_wants(client, service, store, replicas, until, route, stream):
    task = asyncio.create_task(ask(client, route, stream, min_weight_version=2))
    await until(lambda: service.fleet.held)
    assert not any(r.got(Generate) for r in replicas)
    await all_at(service, store, replicas, until, 2)
    reply, parts = await task
    assert reply.headers["x-weight-version"] == "2"
    assert {str(span["version"]) for span in spans_of(parts[-1])[0]} == {"2"}


@NAMED
@STREAM
async def test_what_becomes_too_stale_ends_with_what_it_has(client, service, store, replicas, until, route, stream):
    gated(replicas)
    task = asyncio.create_task(ask(client, route, stream, max_staleness=1))
    await until(lambda: any(r.running for r in replicas))
    let_go(replicas, 1)
    await all_at(service, store, replicas, until, 1)
    await asyncio.sleep(0.02)
    assert not task.done()
    await all_at(service, store, replicas, until, 2)
    _, parts = await task
    assert finish_of(parts[-1]) == "abort"


@NAMED
async def test_writing_a_long_reply_keeps_nobody_waiting(client, monkeypatch, route):
    writers: list[int] = []

    class Noted(answering.Json):
        def render(self, content: Any) -> bytes:
            writers.append(threading.get_ident())
            return super().render(content)

    monkeypatch.setattr(answering, "Json", Noted)
    monkeypatch.setattr(answering, "INLINE_TOKENS", 2)
    await ask(client, route, stream=False, count=3)
    assert writers
    assert threading.get_ident() not in writers  # the event loop's thread answers everybody else meanwhile

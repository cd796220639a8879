import asyncio
import json
import struct
from typing import Any

import pytest

from api.app import create_app
from api.generation import Flight
from api.schemas.rollout import GenerateResponse
from tests.unit.api.scripted import digest_of, span
from worker.messages import Chunk, Chunks, Generate, SamplingParams, Span, Tokens

URL = "/v1/rollout/generate"


def events(body: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.strip().split("\n\n")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_ids_in_ids_out(client, replicas):
    reply = await client.post(URL, json={"prompt_ids": [65, 66], "max_tokens": 3, "n": 2, "logprobs": 1})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    GenerateResponse.model_validate(body)
    assert [o["index"] for o in body["outputs"]] == [0, 1]
    for output in body["outputs"]:
        assert output["token_ids"] == [67, 68, 69]
        assert output["text"] == "CDE"
        assert output["finish_reason"] == "length"
        assert output["spans"] == [span(0, 0, 3)]
        assert output["top_logprobs"][0][0] == {"token_id": 67, "logprob": -0.5}
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert reply.headers["x-weight-version"] == "0"


async def test_several_text_prompts_are_answered_in_order(client):
    body = (await client.post(URL, json={"prompt": ["A", "a"], "max_tokens": 2})).json()
    assert [(o["prompt_index"], o["text"]) for o in body["outputs"]] == [(0, "BC"), (1, "bc")]


async def test_a_request_without_streaming_asks_for_one_chunk(client, replicas):
    await client.post(URL, json={"prompt": "A", "max_tokens": 2})
    (message,) = [m for r in replicas for m in r.got(Generate)]
    assert message.stream is False


async def test_streamed_pieces_join_to_the_whole(client, replicas):
    whole = (await client.post(URL, json={"prompt": "A", "max_tokens": 5})).json()["outputs"][0]
    reply = await client.post(URL, json={"prompt": "A", "max_tokens": 5, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    parts = [part["outputs"][0] for part in events(reply.text)]
    assert [i for p in parts for i in p["token_ids"]] == whole["token_ids"]
    assert "".join(p["text"] for p in parts) == whole["text"]
    assert {p["finish_reason"] for p in parts[:-1]} <= {None}
    assert parts[-1]["finish_reason"] == "length"
    assert parts[-1]["spans"] == whole["spans"]


async def test_stop_string_is_cut_from_text_and_kept_in_ids(client, replicas):
    for replica in replicas:
        replica.script = list(b"xyENDEN") + list(b"D")
        replica.finish, replica.stop_reason = "stop", "END"
    for stream in (False, True):
        reply = await client.post(URL, json={"prompt": "A", "stop": "END", "min_tokens": 6, "stream": stream})
        parts = [p["outputs"][0] for p in events(reply.text)] if stream else reply.json()["outputs"]
        assert "".join(p["text"] for p in parts) == "xyEND"
        assert [i for p in parts for i in p["token_ids"]] == list(b"xyENDEND")


async def test_a_client_that_goes_away_aborts_its_request(client, replicas, service, until):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    task = asyncio.create_task(client.post(URL, json={"prompt": "A", "max_tokens": 5}))
    await until(lambda: any(r.running for r in replicas))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not any(r.running for r in replicas) and not service.fleet.flights)


async def test_repeating_a_running_id_joins_it(client, replicas, until):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    body = {"prompt": "A", "max_tokens": 2, "request_id": "same"}
    first = asyncio.create_task(client.post(URL, json=body))
    await until(lambda: any(r.running for r in replicas))
    second = asyncio.create_task(client.post(URL, json=body))
    await asyncio.sleep(0.05)
    other = await client.post(URL, json=body | {"prompt": "B"})
    assert other.status_code == 409
    for replica in replicas:
        replica.gate.release()
        replica.gate.release()
    a, b = await asyncio.gather(first, second)
    assert a.json() == b.json()
    assert sum(len(r.got(Generate)) for r in replicas) == 1


async def test_a_stream_whose_client_is_gone_before_it_begins_leaves_nothing(service):
    sent = []

    async def receive():
        if not sent:
            sent.append(True)
            return {"type": "http.request", "body": b'{"prompt": "A", "stream": true}', "more_body": False}
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": URL, "headers": [(b"host", b"x")], "query_string": b""}
    await create_app(service)(
        scope | {"client": None, "server": None, "scheme": "http", "root_path": ""}, receive, send
    )
    await asyncio.sleep(0.05)
    assert service.generations.open == 0
    assert not service.fleet.flights


@pytest.mark.parametrize("path", [URL, "/v1/completions", "/generate"])
async def test_a_stream_that_is_left_in_the_middle_is_ended(client, replicas, service, until, path):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(1)
    body = {"text" if path == "/generate" else "prompt": "A", "stream": True}
    task = asyncio.create_task(client.post(path, json=body))
    await until(lambda: any(r.running for r in replicas))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not any(r.running for r in replicas) and service.generations.open == 0)


@pytest.mark.parametrize(("fault", "status"), [("request", 400), ("adapter", 404), ("", 500)])
async def test_an_error_is_the_requests_own_or_the_engines(client, replicas, monkeypatch, fault, status):
    def fail(replica, origin, g, *_):
        chunk = Chunk(g.request_id, 0, [], [], [Span(0, 0, 0)], finish="error", error="no way", fault=fault)
        replica._send(origin, Chunks([chunk]))

    monkeypatch.setattr(type(replicas[0]), "_emit", fail)
    reply = await client.post(URL, json={"prompt_ids": [65], "max_tokens": 1})
    assert (reply.status_code, reply.json()["error"]["message"]) == (status, "no way")


async def test_columns_for_requests_that_are_gone_are_nobodys(client, replicas, monkeypatch):
    def go_on(replica, origin, g, token_id, made):
        if made == 1:
            replica._emit(origin, g, [token_id], made, None)
        else:
            members = [("another", 0), (g.request_id, 0)]
            columns = struct.pack("<2i", 7, token_id), struct.pack("<2d", -9.0, -0.25)
            replica._send(origin, Tokens(*columns, members if made == 2 else None))

    monkeypatch.setattr(type(replicas[0]), "_go_on", go_on)
    for _ in range(2):  # the second time the columns are another's
        reply = await client.post(URL, json={"prompt_ids": [65], "max_tokens": 5, "stream": True})
        outputs = [output for said in events(reply.text) for output in said["outputs"]]
        assert [token for output in outputs for token in output["token_ids"]] == [66, 67, 68, 69, 70]
        assert [logprob for output in outputs for logprob in output["logprobs"]] == [-0.5, -0.25, -0.25, -0.25, -0.5]


def test_a_token_alone_makes_the_last_span_longer():
    flight = Flight(Generate("r", [1], SamplingParams(n=2)))
    heard = []
    for index in (0, 1):
        flight.watch(index, lambda index=index: heard.append(index))
    spans = [Span(3, 0, 1), Span(4, 1, 2, recomputed=True)]
    flight.add(Chunk("r", 1, [5, 6], [-1.0, -2.0], spans, cached_tokens=8))
    flight.go_on(1, 7, -3.0)
    sample = flight.samples[1]
    assert (sample.token_ids, sample.logprobs) == ([5, 6, 7], [-1.0, -2.0, -3.0])
    assert sample.spans == [Span(3, 0, 1), Span(4, 1, 3, recomputed=True)]
    assert spans[-1].end == 2
    assert heard == [1, 1]
    chunk = sample.since(2)
    assert (chunk.index, chunk.token_ids, chunk.spans, chunk.cached_tokens) == (1, [7], sample.spans, 8)
    before = sample.spans
    flight.go_on(1, 8, -4.0)
    assert (before[-1].end, sample.spans[-1].end) == (3, 4)
    flight.end_aborted(0, digest_of(0))
    flight.go_on(1, 9, -1.0)
    assert sample.token_ids == [5, 6, 7, 8]

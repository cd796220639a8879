import json
from typing import Any

import pytest

from api.schemas.openai import ChatResponse, CompletionResponse
from tests.unit.api.scripted import span
from worker.messages import Generate


def events(body: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.strip().split("\n\n")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def complete(client, **body: Any) -> dict[str, Any]:
    reply = await client.post("/v1/completions", json={"max_tokens": 3} | body)
    assert reply.status_code == 200, reply.text
    return CompletionResponse.model_validate(reply.json()).model_dump() and reply.json()


@pytest.mark.parametrize("prompt", ["A", ["A"], [65], [[65]]])
async def test_every_kind_of_prompt(client, prompt):
    body = await complete(client, prompt=prompt)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("BCD", "length", None)
    assert body["object"] == "text_completion"
    assert body["usage"]["total_tokens"] == 4
    assert body["weight_version"] == choice["weight_version"] == "default"
    assert choice["weight_versions"] == [span("default", 0, 3)]


async def test_choices_come_prompt_by_prompt(client):
    body = await complete(client, prompt=["A", "a"], n=2)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "BCD"), (1, "BCD"), (2, "bcd"), (3, "bcd")]


async def test_logprobs_and_ids(client):
    body = await complete(client, prompt="A", logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True)
    (choice,) = body["choices"]
    assert choice["token_ids"] == [66, 67, 68]
    assert choice["prompt_token_ids"] == [65]
    assert choice["logprobs"]["tokens"] == ["token_id:66", "token_id:67", "token_id:68"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:66": -0.5, "token_id:0": -2.0}


async def test_echo_puts_the_prompt_first_with_its_logprobs(client):
    body = await complete(client, prompt="AB", echo=True, logprobs=0, prompt_logprobs=0)
    (choice,) = body["choices"]
    assert choice["text"] == "ABCDE"
    assert choice["logprobs"]["tokens"] == list("ABCDE")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["prompt_logprobs"] == [None, {"66": {"logprob": -1.0, "rank": 1, "decoded_token": "B"}}]


async def test_nulls_and_unknown_fields_mean_the_default(client, replicas):
    fields = ("stop", "stop_token_ids", "n", "temperature", "top_p", "min_p", "seed", "logit_bias", "model", "priority")
    await complete(client, prompt="A", max_tokens=None, top_k=100_000_000, guided_json={}, **dict.fromkeys(fields))
    (message,) = [m for r in replicas for m in r.got(Generate)]
    assert message.sampling.top_k == 0
    assert message.sampling.max_tokens == 16
    assert (message.sampling.n, message.sampling.temperature, message.sampling.stop) == (1, 1.0, [])


@pytest.mark.parametrize("top_k", [0, -1, 100_000_000, None])
async def test_every_way_to_switch_top_k_off(client, replicas, top_k):
    await complete(client, prompt="A", top_k=top_k)
    (message,) = [m for r in replicas for m in r.got(Generate)]
    assert message.sampling.top_k == 0


async def test_streamed_completion(client):
    reply = await client.post(
        "/v1/completions",
        json={
            "prompt": ["A", "a"],
            "max_tokens": 3,
            "stream": True,
            "logprobs": 0,
            "stream_options": {"include_usage": True},
        },
    )
    *parts, last = events(reply.text)
    for part in parts:
        CompletionResponse.model_validate(part)
    texts = {i: "".join(c["text"] for p in parts for c in p["choices"] if c["index"] == i) for i in (0, 1)}
    assert texts == {0: "BCD", 1: "bcd"}
    offsets = [o for p in parts for c in p["choices"] if c["index"] == 0 for o in c["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6


async def test_stop_token_loses_its_text_only(client, replicas):
    for replica in replicas:
        replica.script, replica.finish, replica.stop_reason = [66, 67, 10], "stop", 10
    body = await complete(client, prompt="A", stop_token_ids=[10], return_token_ids=True)
    (choice,) = body["choices"]
    assert (choice["text"], choice["stop_reason"], choice["token_ids"]) == ("BC", 10, [66, 67, 10])
    body = await complete(client, prompt="A", stop_token_ids=[10], include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "BC\n"


CHAT = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 3}


async def test_chat(client, replicas):
    body = CHAT | {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "n": 2}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    ChatResponse.model_validate(reply.json())
    made = reply.json()
    assert made["prompt_token_ids"] == list(b"u:A;a:")
    assert [c["message"] for c in made["choices"]] == [{"role": "assistant", "content": ";<="}] * 2
    entry = made["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == ";"
    assert entry["bytes"] == [59]
    assert len(entry["top_logprobs"]) == 1
    assert made["choices"][0]["token_ids"] == [59, 60, 61]


async def test_chat_takes_text_parts_and_refuses_pictures(client, replicas):
    parts = [{"type": "text", "text": "A"}]
    reply = await client.post("/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": parts}]})
    assert reply.status_code == 200
    (message,) = [m for r in replicas for m in r.got(Generate)]
    assert message.prompt_ids == list(b"u:A;a:")
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    reply = await client.post("/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": parts}]})
    assert reply.status_code == 400
    assert "only text" in reply.json()["error"]["message"]


async def test_streamed_chat_opens_with_the_role_and_ends_with_a_reason(client):
    reply = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    parts = events(reply.text)
    deltas = [p["choices"][0]["delta"] for p in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d["content"] for d in deltas) == ";<="
    assert {p["choices"][0]["finish_reason"] for p in parts[:-1]} == {None}
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert parts[-1]["choices"][0]["weight_versions"] == [span("default", 0, 3)]
    assert {p["object"] for p in parts} == {"chat.completion.chunk"}


async def test_models(client, store, until, service):
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"], card["weight_version"]) == ("tiny", 64, "default")
    assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
    assert (await client.get("/v1/models/other")).status_code == 404


async def test_tokenize_and_back(client):
    made = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert made == {"count": 3, "max_model_len": 64, "tokens": [104, 195, 169], "token_strs": ["h", "\ufffd", "\ufffd"]}
    text = (await client.post("/detokenize", json={"tokens": made["tokens"]})).json()
    assert text == {"prompt": "hé", "text": "hé"}
    made = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
    assert made["tokens"] == list(b"u:A;a:")


async def test_versions_are_named_by_number_once_pushed(client, replicas, store, until, service):
    for replica in replicas:
        replica.move("serving", 4)
    store.commit(4)
    await until(lambda: service.fleet.live.version == 4 and all(r.version == 4 for r in service.fleet.replicas))
    body = await complete(client, prompt="A")
    assert body["weight_version"] == "4"
    assert body["choices"][0]["weight_versions"] == [span("4", 0, 3)]

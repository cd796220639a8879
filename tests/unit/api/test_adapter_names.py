"""An adapter is asked for by its name, in every dialect's way; what is not loaded is not found."""

import asyncio
import json

import jsonschema
import pytest

from api import adapter_names
from api.adapter_names import LOOK_AGAIN_S
from rollout_client import http_calls as calls
from tests.unit.api.scripted import ADAPTER_DIGEST, span
from weight_manager.messages import LoadAdapter, Result, UnloadAdapter
from worker.messages import Generate

PROMPT = [5, 6, 7]
SAMPLING = {"max_tokens": 3, "temperature": 0}
BY_MODEL = {
    "/v1/completions": {"prompt": PROMPT, **SAMPLING},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], **SAMPLING},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": SAMPLING},
}


@pytest.fixture
async def loaded(store, replicas, service, until):
    """policy-a version 3 and policy-b version 5."""
    for number, (name, version) in enumerate({"policy-a": 3, "policy-b": 5}.items()):
        store.load_adapter(name, version, 9 + number)
        for replica in replicas:
            replica.adapters[name] = version
    await until(lambda: service.weights.adapters == {"policy-a": 3, "policy-b": 5})
    return store


def named(replicas):
    return [request.adapter for replica in replicas for request in replica.got(Generate)]


def versions_of(reply):
    (choice,) = reply.json()["choices"]
    return [(span["version"], span.get("adapter_version")) for span in choice["weight_versions"]]


@pytest.mark.parametrize("path", BY_MODEL)
async def test_model_names_an_adapter(client, loaded, replicas, path):
    for model, adapter, answers in (
        ("policy-a", "policy-a", [("default", "3")]),
        ("tiny:policy-b", "policy-b", [("default", "5")]),
        ("tiny", "", [("default", None)]),
        (None, "", [("default", None)]),
    ):
        reply = await client.post(path, json=BY_MODEL[path] | {"model": model})
        assert reply.status_code == 200, reply.text
        assert versions_of(reply) == answers
        assert reply.json()["model"] == (adapter or "tiny")
        assert named(replicas)[-1] == adapter or adapter in named(replicas)
    assert sorted(named(replicas)) == ["", "", "policy-a", "policy-b"]


@pytest.mark.parametrize("path", BY_MODEL)
async def test_a_stream_says_its_adapters_version(client, loaded, path):
    reply = await client.post(path, json=BY_MODEL[path] | {"model": "policy-a", "stream": True})
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    spans = [span for event in events for choice in event["choices"] for span in choice["weight_versions"]]
    assert {span.get("adapter_version") for span in spans if span["end"]} == {"3"}
    assert {event["model"] for event in events} == {"policy-a"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_sglangs_lora_path_counts_where_model_names_the_base(client, loaded, replicas, path):
    for more in ({"lora_path": "policy-a"}, {"model": "tiny", "lora_path": "policy-a"}):
        assert versions_of(await client.post(path, json=BY_MODEL[path] | more)) == [("default", "3")]
    both = {"model": "policy-b", "lora_path": "policy-a"}
    assert versions_of(await client.post(path, json=BY_MODEL[path] | both)) == [("default", "5")]
    reply = await client.post(path, json=BY_MODEL[path] | {"lora_path": "nobody"})
    assert reply.status_code == 404
    assert "'nobody'" in reply.json()["error"]["message"]


async def test_sglangs_generate_takes_one_name_or_one_each(client, loaded, replicas):
    sampling = {"max_new_tokens": 2}

    async def versions(body):
        reply = await client.post("/generate", json=body | {"sampling_params": sampling})
        assert reply.status_code == 200, reply.text
        outputs = reply.json() if isinstance(reply.json(), list) else [reply.json()]
        return [output["meta_info"]["weight_versions"][0].get("adapter_version") for output in outputs]

    assert await versions({"input_ids": PROMPT, "lora_path": "policy-a"}) == ["3"]
    assert await versions({"input_ids": PROMPT}) == [None]
    two = [PROMPT, PROMPT[::-1]]
    assert await versions({"input_ids": two, "lora_path": "policy-b"}) == ["5", "5"]
    assert await versions({"input_ids": two, "lora_path": ["policy-b", None]}) == ["5", None]
    reply = await client.post("/generate", json={"input_ids": two, "lora_path": ["policy-b", "nobody"]})
    assert reply.status_code == 404
    reply = await client.post("/generate", json={"input_ids": two, "lora_path": ["policy-b"]})
    assert reply.status_code == 400


async def test_the_native_route_has_a_field_for_it(client, loaded, replicas):
    body = {"prompt_ids": PROMPT, "max_tokens": 3}
    reply = (await client.post("/v1/rollout/generate", json=body | {"adapter": "policy-a"})).json()
    (output,) = reply["outputs"]
    assert (reply["model"], reply["adapter"], output["adapter_version"]) == ("tiny", "policy-a", 3)
    assert output["spans"] == [span(0, 0, 3) | {"adapter_version": 3, "adapter_digest": ADAPTER_DIGEST}]
    reply = (await client.post("/v1/rollout/generate", json=body)).json()
    (output,) = reply["outputs"]
    assert output["spans"] == [span(0, 0, 3)]
    assert "adapter" not in reply
    assert "adapter_version" not in output
    unknown = await client.post("/v1/rollout/generate", json=body | {"adapter": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "adapter_not_found")


async def test_scores_are_an_adapters_too(client, loaded, replicas):
    body = {"prompt_ids": [PROMPT], "token_ids": [[8, 9]], "adapter": "policy-b"}
    (output,) = (await client.post("/v1/rollout/score", json=body)).json()["outputs"]
    assert output["adapter_version"] == 5
    assert named(replicas) == ["policy-b"]


async def test_models_lists_the_base_and_adapters_over_it(client, loaded):
    cards = (await client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("tiny", None),
        ("policy-a", "tiny"),
        ("policy-b", "tiny"),
    ]
    assert [card["weight_version"] for card in cards] == ["default", "3", "5"]
    assert (await client.get("/v1/models/policy-a")).json() == cards[1]
    assert (await client.get("/v1/models/nobody")).status_code == 404


async def test_tokens_are_the_same_for_all(client, loaded):
    for model in ("policy-a", "tiny"):
        reply = await client.post("/tokenize", json={"model": model, "prompt": "ab"})
        assert reply.status_code == 200, reply.text


async def test_a_name_that_another_process_has_just_loaded_is_asked_for(client, store, replicas, service):
    """The store has not told this process yet."""
    publish, store.publish = store.publish, lambda: None
    store.load_adapter("late", 1, 9)
    for replica in replicas:
        replica.adapters["late"] = 1
    assert service.weights.adapters == {}
    reply = await client.post("/v1/completions", json=BY_MODEL["/v1/completions"] | {"model": "late"})
    assert versions_of(reply) == [("default", "1")]
    store.publish = publish


async def test_all_that_ask_at_once_for_a_name_that_was_just_loaded_get_it(client, store, replicas, service):
    """Whoever comes while the store is asked waits for its answer, too."""
    publish, store.publish = store.publish, lambda: None
    store.load_adapter("late", 1, 9)
    for replica in replicas:
        replica.adapters["late"] = 1
    body = {"prompt_ids": PROMPT, "max_tokens": 3, "adapter": "late"}
    replies = await asyncio.gather(*(client.post("/v1/rollout/generate", json=body) for _ in range(8)))
    assert [reply.status_code for reply in replies] == [200] * 8
    store.publish = publish


async def test_while_the_store_does_not_answer_nobody_is_told_that_there_is_no_such_adapter(
    client, loaded, monkeypatch
):
    """It may have been loaded meanwhile; a process that has just been started has heard of none."""
    monkeypatch.setattr(adapter_names, "ANSWER_S", 0.5)
    loaded.stopped = True
    body = {"prompt_ids": PROMPT, "max_tokens": 3}
    replies = await asyncio.gather(
        *(client.post("/v1/rollout/generate", json=body | {"adapter": "late"}) for _ in range(3))
    )
    replies.append(await client.post("/v1/completions", json=BY_MODEL["/v1/completions"] | {"model": "late"}))
    for reply in replies:
        assert reply.status_code == 503, reply.text
        assert "weight store" in reply.json()["error"]["message"]
        assert "late" in reply.json()["error"]["message"]
    known = await client.post("/v1/rollout/generate", json=body | {"adapter": "policy-a"})
    assert known.status_code == 200
    loaded.stopped = False
    await asyncio.sleep(LOOK_AGAIN_S)
    reply = await client.post("/v1/rollout/generate", json=body | {"adapter": "late"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "adapter_not_found")


async def test_a_store_that_takes_seconds_is_waited_for(client, loaded):
    """It may be writing a commit to a disk that is slow to sync."""
    loaded.busy_s = 2.5
    body = {"prompt_ids": PROMPT, "max_tokens": 3, "adapter": "late"}
    replies = await asyncio.gather(*(client.post("/v1/rollout/generate", json=body) for _ in range(2)))
    assert [reply.status_code for reply in replies] == [404, 404]
    assert loaded.busy_s == 0.0


async def test_a_name_that_nobody_knows_is_not_asked_for_again_and_again(client, store):
    store.received.clear()
    for _ in range(5):
        reply = await client.post("/v1/completions", json=BY_MODEL["/v1/completions"] | {"model": "nobody"})
        assert reply.status_code == 404
    assert len(store.received) == 1


async def test_an_adapter_that_a_replica_has_just_lost_is_not_found(client, loaded, replicas):
    for replica in replicas:
        replica.adapters.clear()
    reply = await client.post("/v1/completions", json=BY_MODEL["/v1/completions"] | {"model": "policy-a"})
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "adapter_not_found"
    assert all(replica.running == {} for replica in replicas)
    assert (await client.get("/health")).status_code == 200


async def test_a_request_id_of_another_adapter_is_another_request(client, loaded, replicas, service, until):
    replicas[0].gate = replicas[1].gate = asyncio.Semaphore(0)
    body = {"prompt_ids": PROMPT, "max_tokens": 3, "request_id": "x"}
    first = asyncio.create_task(client.post("/v1/rollout/generate", json=body | {"adapter": "policy-a"}))
    await until(lambda: service.generations.open)
    assert (await client.post("/v1/rollout/generate", json=body)).status_code == 409
    for replica in replicas:
        replica.gate.release()
        replica.gate.release()
        replica.gate.release()
    assert (await first).status_code == 200


async def test_vllms_routes_load_replace_and_unload(client, loaded):
    load = {"lora_name": "policy-c", "lora_path": "/models/c"}
    reply = await client.post("/v1/load_lora_adapter", json=load)
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'policy-c' added successfully.")
    (asked,) = [message for message in loaded.received if isinstance(message, LoadAdapter)]
    assert (asked.name, asked.path, asked.version, asked.in_flight) == ("policy-c", "/models/c", None, "keep")

    again = load | {"lora_name": "policy-a"}
    reply = await client.post("/v1/load_lora_adapter", json=again)
    assert reply.status_code == 400
    assert "has already been loaded" in reply.json()["error"]["message"]
    assert (await client.post("/v1/load_lora_adapter", json=again | {"load_inplace": True})).status_code == 200
    reply = await client.post("/v1/load_lora_adapter", json=load | {"lora_name": "tiny"})
    assert reply.status_code == 400
    assert "conflicts with a served base model" in reply.json()["error"]["message"]
    reply = await client.post("/v1/load_lora_adapter", json=load | {"is_3d_lora_weight": True})
    assert reply.status_code == 400
    assert len([message for message in loaded.received if isinstance(message, LoadAdapter)]) == 2

    reply = await client.post("/v1/unload_lora_adapter", json={"lora_name": "policy-a", "lora_int_id": 1})
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'policy-a' removed successfully.")
    loaded.results[UnloadAdapter] = Result("", False, "unknown_adapter", "no adapter 'x' is loaded")
    reply = await client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "The lora adapter 'x' cannot be found."


async def test_sglangs_routes_load_and_unload(client, loaded):
    load = {"lora_name": "policy-c", "lora_path": "/models/c", "pinned": True}
    reply = await client.post("/load_lora_adapter", json=load)
    names = {"policy-a": "policy-a", "policy-b": "policy-b"}
    assert reply.status_code == 200
    assert reply.json() == {"success": True, "error_message": None, "loaded_adapters": names}
    reply = await client.post("/load_lora_adapter", json=load | {"lora_name": "policy-a"})
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    loaded.results[LoadAdapter] = Result("", False, "io", "/models/c: no adapter_config.json")
    reply = await client.post("/load_lora_adapter", json=load)
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    assert reply.json()["error_message"] == "/models/c: no adapter_config.json"
    assert (await client.post("/unload_lora_adapter", json={"lora_name": "policy-a"})).json()["success"] is True
    loaded.results[UnloadAdapter] = Result("", False, "unknown_adapter", "no adapter 'x' is loaded")
    reply = await client.post("/unload_lora_adapter", json={"lora_name": "x"})
    assert (reply.status_code, reply.json()["error_message"]) == (400, "no adapter 'x' is loaded")


async def test_the_client_names_an_adapter(client, loaded):
    reply = await client.post("/v1/rollout/generate", json=calls.generate(prompt_ids=PROMPT, adapter="policy-a").body)
    result = calls.generate(prompt_ids=PROMPT, adapter="policy-a").decode(reply)
    assert result.outputs[0].spans[0].adapter_version == 3


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/unload_lora_adapter"])
async def test_what_sglangs_routes_refuse_is_described(client, loaded, path):
    """Whether the adapter is wrong or the request itself is."""
    document = (await client.get("/openapi.json")).json()
    described = document["paths"][path]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
    loaded.results[LoadAdapter] = loaded.results[UnloadAdapter] = Result("", False, "io", "no such adapter")
    for body in ({}, {"lora_name": "policy-c", "lora_path": "/models/c"}):
        reply = await client.post(path, json=body)
        assert reply.status_code == 400
        jsonschema.validate(reply.json(), described | {"components": document["components"]})

"""The page at /docs: every route is on it, with schemas for what goes in and what comes out."""

import asyncio
import json
import re
import threading

import httpx

from api.app import create_app

LORA_OF_VLLM = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Answered with a line of text, as vLLM's clients expect it."""


async def operations(client):
    document = (await client.get("/openapi.json")).json()
    return [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ], document


async def test_every_route_has_response_schemas(client):
    found, _ = await operations(client)
    assert len(found) > 60
    for method, path, operation in found:
        if path in {"/metrics", "/ui", "/ui/events", *LORA_OF_VLLM}:  # text, a page, and events
            continue
        content = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert content, (method, path)
        assert any(status.startswith(("4", "default")) for status in operation["responses"]), (method, path)
        if "requestBody" in operation:
            assert operation["requestBody"]["content"]["application/json"]["schema"], (method, path)


async def test_fields_of_bodies_say_what_they_mean(client):
    """What stands under a field in its class is beside it on the page: what null means, what is cut or refused."""
    _, document = await operations(client)
    schemas = document["components"]["schemas"]
    assert "More than fits is cut to it" in schemas["GenerateRequest"]["properties"]["max_tokens"]["description"]
    assert "More than fits is a 400" in schemas["ChatRequest"]["properties"]["max_tokens"]["description"]


async def test_others_are_answered_while_the_document_is_made(service, monkeypatch, until):
    """It takes a second or two of computing, in which every stream of the process would stand still."""
    app = create_app(service)
    making, go_on, made = threading.Event(), threading.Event(), []
    whole = app.openapi

    def slow():
        making.set()
        assert go_on.wait(10), "nobody was answered meanwhile"
        made.append(whole())
        return made[-1]

    monkeypatch.setattr(app, "openapi", slow)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=30) as client:
        asked = [asyncio.create_task(client.get("/openapi.json")) for _ in range(3)]
        await until(making.is_set)
        assert (await client.get("/live")).status_code == 200
        go_on.set()
        documents = [(await one).json() for one in asked]
    assert all(document == json.loads(json.dumps(made[0])) for document in documents)


async def test_streams_are_described_event_by_event(client):
    """The status page's is always one, the routes with `stream` in their body are one when it is asked for."""
    found, document = await operations(client)
    streams = {path: op["responses"]["200"]["content"] for _, path, op in found}
    streams = {path: content for path, content in streams.items() if "text/event-stream" in content}
    assert streams.keys() == {
        "/ui/events",
        "/v1/rollout/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/tokens",
        "/inference/v1/generate",
        "/generate",
    }
    for path, content in streams.items():
        data = content["text/event-stream"]["itemSchema"]["properties"]["data"]
        assert ("application/json" in content) == ("anyOf" in data) == (path != "/ui/events")
        payload = data["anyOf"][0] if "anyOf" in data else data
        for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(payload)):
            assert reference in document["components"]["schemas"]


async def test_operation_ids_are_unique_and_every_route_is_described(client):
    found, _ = await operations(client)
    ids = [operation["operationId"] for _, _, operation in found]
    assert len(ids) == len(set(ids))
    for method, path, operation in found:
        assert operation.get("description"), (method, path)
        assert operation["tags"], (method, path)


async def test_the_routes_that_clients_of_each_dialect_call(client):
    found, _ = await operations(client)
    there = {(method, path) for method, path, _ in found}
    posts = """/v1/rollout/generate /v1/rollout/pause /v1/rollout/resume /v1/rollout/abort /v1/rollout/weights/load
        /v1/rollout/weights/abort /v1/completions /v1/chat/completions /tokenize /detokenize /inference/v1/generate
        /pause /resume /abort_requests /init_weight_transfer_engine /start_weight_update /update_weights
        /finish_weight_update /shutdown_weight_transfer_engine /update_weight_version /weight_checker /sleep /wake_up
        /reset_prefix_cache /generate /pause_generation /continue_generation /update_weights_from_disk /flush_cache
        /abort_request /release_memory_occupation /resume_memory_occupation /weights_checker /get_weights_by_name
        /areal_pause_generation /areal_continue_generation /areal_update_weights /clear_load_weight
        /update_model_weight /v1/pause /v1/resume /v1/update_weights /v1/sleep /v1/wakeup /v1/abort_requests"""
    gets = """/v1/rollout/weights /v1/rollout/weights/wait /v1/models /is_paused /weight_info /get_world_size
        /is_sleeping /server_info /get_server_info /model_info /get_model_info /get_weight_version /flush_cache
        /v1/loads /get_load /health /live /ready /health_generate /metrics /clear_load_weight /update_model_weight
        /v1/is_paused /ui /ui/events"""
    missing = {("POST", path) for path in posts.split()} | {("GET", path) for path in gets.split()}
    assert missing - there == set()
    assert (await client.get("/docs")).status_code == 200


async def test_everything_that_a_client_sends_has_bounds(client):
    """A number past what a message holds, or a list that has an error for each of a million items, stops everybody."""
    found, document = await operations(client)
    unbounded, seen, numbers = [], set(), 0

    def look(schema, where):
        nonlocal numbers
        if "$ref" in schema:
            if schema["$ref"] not in seen:
                seen.add(schema["$ref"])
                look(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], where)
            return
        if schema.get("type") == "integer":
            numbers += 1
            low = schema.get("minimum", schema.get("exclusiveMinimum", float("-inf")))
            high = schema.get("maximum", schema.get("exclusiveMaximum", float("inf")))
            if not -(2**63) <= low <= high <= 2**63:
                unbounded.append(where)
        if schema.get("type") == "array" and "maxItems" not in schema:
            unbounded.append(where)
        inner = [schema.get("items"), schema.get("additionalProperties")]
        for of in (*schema.get("anyOf", ()), *schema.get("allOf", ()), *inner):
            if isinstance(of, dict):
                look(of, where)
        for name, of in schema.get("properties", {}).items():
            look(of, f"{where}.{name}")

    for method, path, operation in found:
        for parameter in operation.get("parameters", ()):
            look(parameter["schema"], f"{method} {path}?{parameter['name']}")
        if "requestBody" in operation:
            look(operation["requestBody"]["content"]["application/json"]["schema"], f"{method} {path}")
    assert unbounded == []
    assert numbers > 40

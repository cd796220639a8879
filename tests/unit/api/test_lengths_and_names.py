"""How many tokens come when nobody says, how many are too many, and the names of the model, as each dialect has it."""

from typing import Any

import pytest

from tests.unit.api.scripted import CONTEXT
from tests.unit.api.test_fields import valid
from worker.messages import Generate

LIMIT = f"maximum context length is {CONTEXT} tokens"
PARTS = ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"]
LENGTHS = [
    ("/v1/completions", "max_tokens"),
    ("/v1/chat/completions", "max_tokens"),
    ("/v1/chat/completions", "max_completion_tokens"),
    ("/inference/v1/generate sampling_params", "max_tokens"),
    ("/generate sampling_params", "max_new_tokens"),
]


def without_length(part: str) -> tuple[str, dict[str, Any]]:
    path, body = valid(part, "n", 1)
    for place in (body, body.get("sampling_params", {})):
        for name in ("max_tokens", "max_new_tokens"):
            place.pop(name, None)
    return path, body


def asked(replicas) -> Generate:
    (message,) = [m for replica in replicas for m in replica.got(Generate)]
    return message


@pytest.mark.parametrize(
    ("part", "default"),
    [
        ("/v1/completions", 16),
        ("/v1/chat/completions", None),
        ("/inference/v1/generate sampling_params", None),
        ("/generate sampling_params", 128),
    ],
)
async def test_how_many_when_nobody_says(client, replicas, part, default):
    path, body = without_length(part)
    assert (await client.post(path, json=body)).status_code == 200
    assert asked(replicas).sampling.max_tokens == default


@pytest.mark.parametrize(
    ("part", "field", "meaning"),
    [("/v1/completions", "max_tokens", 16), ("/generate sampling_params", "max_new_tokens", None)],
)
async def test_null_is_no_number(client, replicas, part, field, meaning):
    path, body = valid(part, field, None)
    assert (await client.post(path, json=body)).status_code == 200
    assert asked(replicas).sampling.max_tokens == meaning


async def test_older_trl_gets_sixteen(client, replicas):
    assert (await client.post("/generate", json={"prompts": ["A"]})).status_code == 200
    assert asked(replicas).sampling.max_tokens == 16


@pytest.mark.parametrize("part", ["/v1/completions", "/generate sampling_params"])
async def test_a_default_never_refuses_a_prompt_that_fits(client, part):
    path, body = without_length(part)
    field = "text" if path == "/generate" else "prompt"
    reply = await client.post(path, json=body | {field: "A" * (CONTEXT - 2)})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(("part", "field"), LENGTHS)
async def test_more_than_the_context_leaves_is_refused(client, replicas, part, field):
    """Not cut silently. Exactly what is left is no error."""
    path, body = valid(part, field, CONTEXT)
    reply = await client.post(path, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert LIMIT in error["message"]
    assert error["code"] == "context_length_exceeded"
    most = int(error["message"].rpartition(" ")[2])
    place = body.get("sampling_params", body)
    place[field] = most
    assert (await client.post(path, json=body)).status_code == 200
    place[field] = most + 1
    assert (await client.post(path, json=body)).status_code == 400


async def test_the_native_route_leaves_the_cut_to_the_worker(client, replicas):
    body = {"prompt": "A", "max_tokens": 2 * CONTEXT}
    assert (await client.post("/v1/rollout/generate", json=body)).status_code == 200
    assert asked(replicas).sampling.max_tokens == 2 * CONTEXT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rollout/generate", {"prompt": "A" * CONTEXT}),
        ("/v1/completions", {"prompt": "A" * CONTEXT}),
        ("/v1/completions", {"prompt": [65] * CONTEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A" * CONTEXT}]}),
        ("/inference/v1/generate", {"token_ids": [65] * CONTEXT}),
        ("/generate", {"text": "A" * CONTEXT}),
        ("/generate", {"prompts": ["A" * CONTEXT]}),
    ],
)
async def test_a_prompt_over_the_context_is_told_in_words_that_clients_look_for(client, path, body):
    reply = await client.post(path, json=body)
    assert reply.status_code == 400
    assert LIMIT in reply.json()["error"]["message"]


NAMED = ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize", "/detokenize"]


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"model_aliases": ["policy", "org/policy"]}


@pytest.mark.parametrize("part", NAMED)
async def test_a_model_that_is_not_served_is_not_found(client, part):
    """An adapter's name must not get samples of the base."""
    for name in ("my-adapter", "tiny:my-adapter", "org/tiny"):
        path, body = valid(part, "model", name)
        reply = await client.post(path, json=body)
        assert reply.status_code == 404, reply.text
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert name in error["message"]
        assert "'tiny', 'policy', 'org/policy'" in error["message"]
    assert (await client.get("/v1/models/my-adapter")).status_code == 404


@pytest.mark.parametrize("part", NAMED)
async def test_every_name_of_the_model(client, config, part):
    path_of_model = str(config.model)
    for name in ("tiny", "policy", "org/policy", "default", path_of_model, path_of_model + "/", None, ""):
        path, body = valid(part, "model", name)
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, (name, reply.text)
    assert (await client.get("/v1/models/org/policy")).json()["id"] == "tiny"

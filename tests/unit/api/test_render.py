"""/render writes what /inference/v1/generate continues: the same prompt and sampling as without the detour."""

import msgspec
import pytest

from api.schemas.tokens import TokenRequest
from tests.unit.api.scripted import CONTEXT
from worker.messages import Generate

HI = [{"role": "user", "content": "A"}]
FIELDS = [
    {},
    {"max_tokens": 5},
    {"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 7, "max_tokens": 3},
    {"stop": ["x", "yz"], "stop_token_ids": [9], "ignore_eos": True, "min_tokens": 1, "max_tokens": 3},
    {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {"66": 1.5}},
    {"allowed_token_ids": [66, 67], "prompt_logprobs": 1, "bad_words": ["q"], "max_tokens": 2},
    {"top_k": -1, "temperature": 0, "priority": 3, "cache_salt": "s", "session_id": "a"},
]


def sent(replicas):
    """What replicas were asked to generate, without our own names of requests; clears the list."""
    found = [m for r in replicas for m in r.got(Generate)]
    for replica in replicas:
        replica.received.clear()
    plain = [msgspec.to_builtins(message) for message in found]
    for message in plain:
        message.pop("request_id")
    return plain


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "A"}),
        ("/v1/completions", {"prompt": [65, 66]}),
        ("/v1/chat/completions", {"messages": HI}),
    ],
)
async def test_the_detour_changes_nothing(client, replicas, path, prompt, fields):
    sent(replicas)
    direct = await client.post(path, json=prompt | fields)
    assert direct.status_code == 200, direct.text
    (wanted,) = sent(replicas)
    rendered = await client.post(f"{path}/render", json=prompt | fields)
    assert rendered.status_code == 200, rendered.text
    assert sent(replicas) == [], "nothing is generated"
    (request,) = rendered.json() if path == "/v1/completions" else [rendered.json()]
    TokenRequest.model_validate(request)
    assert request["token_ids"] == wanted["prompt_ids"]
    assert (await client.post("/inference/v1/generate", json=request)).status_code == 200
    assert sent(replicas) == [wanted]


async def test_each_prompt_has_a_request_of_its_own(client):
    body = {"prompt": ["A", "BC"], "request_id": "r", "logprobs": 2, "max_tokens": 1, "skip_special_tokens": False}
    first, second = (await client.post("/v1/completions/render", json=body)).json()
    assert (first["token_ids"], second["token_ids"]) == ([65], [66, 67])
    assert (first["request_id"], second["request_id"]) == ("r-0", "r-1")
    assert first["sampling_params"]["logprobs"] == 2
    assert first["sampling_params"]["skip_special_tokens"] is False


async def test_logprobs_of_a_conversation(client):
    body = {"messages": HI, "max_tokens": 1, "logprobs": True, "top_logprobs": 3, "no_stop_trim": True}
    request = (await client.post("/v1/chat/completions/render", json=body)).json()
    assert request["sampling_params"]["logprobs"] == 3
    assert request["sampling_params"]["include_stop_str_in_output"] is True
    reply = (await client.post("/inference/v1/generate", json=request)).json()
    assert len(reply["choices"][0]["logprobs"]["content"]) == 1


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions/render", {"prompt": "A"}), ("/v1/chat/completions/render", {"messages": HI})]
)
async def test_what_cannot_be_asked_cannot_be_rendered(client, path, body):
    assert (await client.post(path, json={})).status_code == 400
    for unfit in ({"truncate_prompt_tokens": 0}, {"max_tokens": 10_000}, {"allowed_token_ids": [10_000]}):
        assert (await client.post(path, json=body | unfit)).status_code == 400, unfit
    assert (await client.post(path, json=body | {"model": "other"})).status_code == 404
    assert (await client.post(path, json=body | {"response_format": {"type": "json_schema"}})).status_code == 400
    assert (await client.post(path, json=body)).status_code == 200


async def test_names_that_would_be_too_long_are_refused(client):
    body = {"prompt": ["A", "BC"], "max_tokens": 1}
    reply = await client.post("/v1/completions/render", json=body | {"request_id": "r" * 255})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "request_id"
    made = (await client.post("/v1/completions/render", json=body | {"request_id": "r" * 254})).json()
    for request in made:
        TokenRequest.model_validate(request)


async def test_a_length_that_nobody_asked_for_is_what_fits(client):
    body = {"prompt": [65] * (CONTEXT - 3)}
    (request,) = (await client.post("/v1/completions/render", json=body)).json()
    reply = await client.post("/inference/v1/generate", json=request)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"][0]["token_ids"]) == 3

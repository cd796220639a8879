"""Requests word for word as trainers build them that cannot run here: none is refused that asks for what is offered.

slime and AReaL over SGLang's and vLLM's routes, SkyRL over vLLM's, as their own code fills the bodies: with nulls,
switches that are off, and details of output that every one of them sends whether it needs them or not.
"""

from typing import Any

import pytest

from api.schemas.base import MAX_TOP
from tests.unit.api.scripted import CONTEXT

IDS = [65, 66]
SLIME: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 4,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": True,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
TOP_P_SETS = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
"""What slime adds with --rollout-top-p below 1: a server that it has patched answers with each token's top-p set."""
AREAL = {"top_p": 1.0, "top_k": 100_000_000, "temperature": 1.0, "stop_token_ids": [], "ignore_eos": False}
SKYRL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": 1,
    "max_tokens": 4,
    "min_tokens": 1,
    "stop": None,
    "include_stop_str_in_output": True,
    "skip_special_tokens": True,
    "seed": None,
    "detokenize": False,
}


async def post(client, path, body, **headers):
    reply = await client.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("more", [{}, {"sampling_seed": 42}, {"stop": ["</s>"], "stop_token_ids": [7]}])
async def test_slime_samples(client, more):
    body = {"sampling_params": SLIME | more, "return_logprob": True, "input_ids": IDS}
    meta = (await post(client, "/generate", body, **{"X-SMG-Routing-Key": "s-1"}))["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == [67, 68, 69, 70]
    assert meta["finish_reason"]["type"] == "length"
    assert {"weight_version", "cached_tokens", "prompt_tokens", "completion_tokens"} <= meta.keys()


async def test_slime_is_told_what_stands_in_the_way_of_its_top_p_replay(client):
    """Its loss wants the sets, and logprobs over them: without these it would train on other probabilities."""
    body = {"sampling_params": SLIME | TOP_P_SETS, "return_logprob": True, "input_ids": IDS}
    reply = await client.post("/generate", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "custom_params"
    assert "sampling_mask" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"abort_all": True}),
        ("/pause_generation", {}),
        ("/pause_generation", {"mode": "retract"}),
        ("/continue_generation", {}),
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {"tags": None}),
        ("/resume_memory_occupation", {"tags": ["weights", "kv_cache"]}),
    ],
)
async def test_slime_controls(client, path, body):
    await post(client, path, body)


async def test_slime_waits_for_an_engine_with_a_token_of_none(client):
    """It sends `Bearer None` where it was given no key; an open service lets that pass."""
    headers = {"Authorization": "Bearer None", "Content-Type": "application/json; charset=utf-8"}
    for path in ("/health_generate", "/flush_cache", "/get_weight_version"):
        assert (await client.get(path, headers=headers)).status_code == 200, path


async def test_areal_samples_over_either_server(client):
    sampling = AREAL | {"max_new_tokens": 4, "skip_special_tokens": True, "frequency_penalty": 0.0}
    body = {"input_ids": IDS, "image_data": [], "sampling_params": sampling, "return_logprob": True, "stream": False}
    assert (await post(client, "/generate", body))["output_ids"] == [67, 68, 69, 70]
    body = AREAL | {"prompt": IDS, "max_tokens": 4, "logprobs": 0, "use_beam_search": False, "stream": False}
    body |= {"return_tokens_as_token_ids": True, "skip_special_tokens": True}
    (choice,) = (await post(client, "/v1/completions", body))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in (67, 68, 69, 70)]


async def test_skyrl_samples(client):
    model = (await client.get("/v1/models")).json()["data"][0]["id"]
    body = {"sampling_params": SKYRL, "model": model, "token_ids": IDS}
    (choice,) = (await post(client, "/inference/v1/generate", body, **{"X-Session-ID": "1"}))["choices"]
    assert choice["token_ids"] == [67, 68, 69, 70]
    assert len(choice["logprobs"]["content"]) == 4
    asked = {"model": model, "tokens": choice["token_ids"]}
    assert (await post(client, "/detokenize", asked))["prompt"] == "CDEF"


async def test_what_is_left_of_the_context_is_taken(client):
    """A partial rollout asks for the rest: as much as fits, to the token."""
    ids = [65] * (CONTEXT - 3)
    body = {"sampling_params": SLIME | {"max_new_tokens": 3}, "return_logprob": True, "input_ids": ids}
    assert len((await post(client, "/generate", body))["output_ids"]) == 3


@pytest.mark.parametrize("top", [100, MAX_TOP])
async def test_trl_scores_a_teachers_sequences(client, top):
    """Its distillation trainers ask a teacher for 100 logprobs at each token, when nobody says another number."""
    body = {"prompt": [IDS, [67, 68, 69]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top}
    choices = (await post(client, "/v1/completions", body))["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2, 3]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": IDS}, "logprobs"),
        ("/v1/completions", {"prompt": IDS}, "prompt_logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A"}], "logprobs": True}, "top_logprobs"),
        ("/generate", {"input_ids": IDS, "return_logprob": True}, "top_logprobs_num"),
        ("/v1/rollout/generate", {"prompt_ids": IDS}, "logprobs"),
        ("/v1/rollout/generate", {"prompt_ids": IDS}, "prompt_logprobs"),
    ],
)
async def test_every_dialect_reports_equally_many(client, path, body, field):
    assert (await client.post(path, json=body | {field: MAX_TOP})).status_code == 200
    reply = await client.post(path, json=body | {field: MAX_TOP + 1})
    assert reply.status_code == 400
    assert field in reply.json()["error"]["message"]

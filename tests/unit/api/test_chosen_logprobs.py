"""logprob_token_ids of vLLM, token_ids_logprob of SGLang: logprobs of ids that the client chose."""

from typing import Any

import pytest

from worker.messages import Generate

IDS = [70, 71, 66]


async def asked(client, replicas, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    (message,) = [m for replica in replicas for m in replica.got(Generate)]
    assert message.sampling.logprob_token_ids == IDS
    found: dict[str, Any] = reply.json()
    return found


async def test_of_completions(client, replicas):
    body = {"prompt": "A", "max_tokens": 2, "logprobs": 1, "logprob_token_ids": IDS}
    (choice,) = (await asked(client, replicas, "/v1/completions", body))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [
        {"B": -0.5, "F": -2.0, "G": -2.0},
        {"C": -0.5, "F": -2.0, "G": -2.0, "B": -2.0},
    ]


async def test_of_chats(client, replicas):
    messages = [{"role": "user", "content": "A"}]
    body = {"messages": messages, "max_tokens": 1, "logprobs": True, "logprob_token_ids": IDS}
    (choice,) = (await asked(client, replicas, "/v1/chat/completions", body))["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == [entry["token"], "F", "G", "B"]


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
async def test_of_token_ids(client, replicas, more):
    body = {"token_ids": [65], "sampling_params": {"max_tokens": 1, "logprob_token_ids": IDS} | more}
    (choice,) = (await asked(client, replicas, "/inference/v1/generate", body))["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert [top["token_id"] for top in entry["top_logprobs"]] == [66, 70, 71]


async def test_of_sglang(client, replicas):
    body = {"text": "A", "return_logprob": True, "token_ids_logprob": IDS, "sampling_params": {"max_new_tokens": 1}}
    found = await asked(client, replicas, "/generate", body)
    assert found["meta_info"]["output_token_ids_logprobs"] == [[[-2.0, 70, None], [-2.0, 71, None], [-0.5, 66, None]]]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": "A", "logprob_token_ids": [1]}, "logprobs must be"),
        ("/v1/completions", {"prompt": "A", "logprobs": 1, "logprob_token_ids": [999]}, "token id 999"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "A"}], "logprob_token_ids": [1]},
            "logprobs must be true",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "A"}], "top_logprobs": 2},
            "top_logprobs: logprobs must be true",
        ),
        ("/inference/v1/generate", {"token_ids": [65], "sampling_params": {"logprobs": -1}}, "-1 is 300"),
        ("/generate", {"text": "A", "return_logprob": True, "token_ids_logprob": [1], "top_logprobs_num": 1}, "one of"),
        (
            "/generate",
            {"text": "A", "return_logprob": True, "token_ids_logprob": [1], "logprob_start_len": 0},
            "one of",
        ),
    ],
)
async def test_what_they_do_not_go_with(client, path, body, says):
    reply = await client.post(path, json=body)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]

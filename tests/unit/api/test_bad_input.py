"""Whatever a client sends, the answer is a 4xx that says what is wrong, and the service goes on."""

import gzip
import json
from typing import Any

import msgspec
import pytest

from worker.messages import Clear, ResetPrefixCache

NATIVE, COMPLETIONS, CHAT = "/v1/rollout/generate", "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "A"}]

CASES: list[tuple[str, Any, int, str]] = [
    (NATIVE, {}, 400, "exactly one of prompt"),
    (NATIVE, {"prompt": "A", "prompt_ids": [1]}, 400, "exactly one of prompt"),
    (NATIVE, {"prompt": 5}, 400, "prompt"),
    (NATIVE, {"prompt": ""}, 400, "empty"),
    (NATIVE, {"prompt": []}, 400, "at least one"),
    (NATIVE, {"prompt_ids": []}, 400, "empty"),
    (NATIVE, {"prompt_ids": [[]]}, 400, "empty"),
    (NATIVE, {"prompt_ids": [-1]}, 400, "greater than or equal to 0"),
    (NATIVE, {"prompt_ids": [300]}, 400, "token id 300 is not in the vocabulary [0, 300)"),
    (NATIVE, {"prompt_ids": [10**30]}, 400, "prompt_ids"),
    (NATIVE, {"prompt_ids": [1.5]}, 400, "prompt_ids"),
    (NATIVE, {"prompt_ids": [True]}, 400, "prompt_ids"),
    (NATIVE, {"prompt_ids": [[True]]}, 400, "prompt_ids"),
    (NATIVE, {"prompt_ids": [1], "stop_token_ids": [True]}, 400, "stop_token_ids"),
    (COMPLETIONS, {"prompt": [True]}, 400, "prompt"),
    ("/generate", {"input_ids": [True]}, 400, "input_ids"),
    ("/generate", {"prompts": [[True]]}, 400, "prompts"),
    ("/inference/v1/generate", {"token_ids": [True]}, 400, "token_ids"),
    ("/detokenize", {"tokens": [True]}, 400, "tokens"),
    (NATIVE, {"prompt": "A", "max_tokens": 2**70}, 400, "max_tokens: Input should be less than"),
    (NATIVE, {"prompt": "A", "min_tokens": 2**70}, 400, "min_tokens"),
    (NATIVE, {"prompt": "A", "max_staleness": 2**70}, 400, "max_staleness"),
    (CHAT, {"messages": HI, "max_completion_tokens": 2**70}, 400, "max_completion_tokens"),
    ("/generate", {"text": "A", "sampling_params": {"max_new_tokens": 2**70}}, 400, "max_new_tokens"),
    ("/generate", {"text": "A", "logprob_start_len": 2**70}, 400, "logprob_start_len"),
    ("/generate", {"prompts": ["A"], "generation_kwargs": {"max_tokens": 2**70}}, 400, "max_tokens"),
    (NATIVE, {"prompt": ["A"] * 5000}, 400, "at most 4096"),
    (NATIVE, {"prompt": "A", "logit_bias": {str(i): 0 for i in range(1025)}}, 400, "at most 1024"),
    (NATIVE, {"prompt": "A"} | {f"x{i}": 0 for i in range(1000)}, 400, "1001 fields"),
    (COMPLETIONS, {"prompt": "A"} | {f"x{i}": 0 for i in range(1000)}, 400, "1001 fields"),
    ("/weights_checker", {"action": "compare", "baseline": {"a": 1}}, 400, "baseline"),
    (NATIVE, {"prompt_ids": ["x"]}, 400, "prompt_ids"),
    (NATIVE, {"prompt_ids": [1, [2]]}, 400, "prompt_ids"),
    (
        NATIVE,
        {"prompt": "A" * 64},
        400,
        "64 tokens leave no room for output, and this model's maximum context length is 64 tokens",
    ),
    (NATIVE, {"prompt": ["A", "A" * 80]}, 400, "prompt 1 is too long"),
    (NATIVE, {"prompt": "A", "n": 0}, 400, "n: Input should be greater than or equal to 1"),
    (NATIVE, {"prompt": "A", "n": 10**9}, 400, "n: "),
    (NATIVE, {"prompt": ["A"] * 50, "n": 1000}, 400, "4096 sequences"),
    (NATIVE, {"prompt": "A", "temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
    (NATIVE, {"prompt": "A", "top_p": 0}, 400, "top_p"),
    (NATIVE, {"prompt": "A", "top_p": 1.5}, 400, "top_p"),
    (NATIVE, {"prompt": "A", "top_k": -2}, 400, "top_k"),
    (NATIVE, {"prompt": "A", "min_p": 1.01}, 400, "min_p"),
    (NATIVE, {"prompt": "A", "repetition_penalty": 0}, 400, "repetition_penalty"),
    (NATIVE, {"prompt": "A", "repetition_penalty": 1e-300}, 400, "repetition_penalty: Input should be greater"),
    (COMPLETIONS, {"prompt": "A", "repetition_penalty": 1e-40}, 400, "repetition_penalty"),
    ("/generate", {"text": "A", "sampling_params": {"repetition_penalty": 1e-40}}, 400, "repetition_penalty"),
    ("/generate", {"prompts": ["A"], "repetition_penalty": 1e-40}, 400, "repetition_penalty"),
    (NATIVE, {"prompt": "A", "max_tokens": -1}, 400, "max_tokens"),
    (NATIVE, {"prompt": "A", "max_tokens": 1, "min_tokens": 2}, 400, "min_tokens 2 is over max_tokens 1"),
    (NATIVE, {"prompt": "A", "seed": 10**40}, 400, "seed"),
    (NATIVE, {"prompt": "A", "regex": "a+"}, 400, "regex"),
    (COMPLETIONS, {"prompt": "A", "structured_outputs": {"regex": 5}}, 400, "structured_outputs"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format"),
    ("/generate", {"text": "A", "sampling_params": {"regex": 5}}, 400, "regex"),
    (NATIVE, {"prompt": "A", "stop": [""]}, 400, "stop"),
    (NATIVE, {"prompt": "A", "stop": ["x"] * 100}, 400, "stop"),
    (NATIVE, {"prompt": "A", "stop_token_ids": [999]}, 400, "stop_token_ids: token id 999"),
    (NATIVE, {"prompt": "A", "logit_bias": {"999": 1}}, 400, "logit_bias"),
    (NATIVE, {"prompt": "A", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (NATIVE, {"prompt": "A", "allowed_token_ids": []}, 400, "allowed_token_ids is empty"),
    (NATIVE, {"prompt": "A", "temprature": 1}, 400, "temprature"),
    (NATIVE, {"prompt": "A", "min_weight_version": -1}, 400, "min_weight_version"),
    (NATIVE, {"prompt": "A", "min_weight_version": 99, "version_timeout_s": 0.05}, 409, "version 99; live is 0"),
    (NATIVE, b"{", 400, "JSON"),
    (NATIVE, b"", 400, "required"),
    (NATIVE, b"[]", 400, "dictionary"),
    (NATIVE, b'{"prompt": "\xff\xfe"}', 400, "UTF-8"),
    (NATIVE, b'{"prompt": "\\ud800"}', 400, "unicode"),
    (NATIVE, b'{"prompt": "A", "stop": "\xed\xa0\x80"}', 400, "UTF-8"),
    (NATIVE, '{"prompt": "A", "stop": "\\ud800"}'.encode("utf-16-le"), 400, "UTF-8"),
    (NATIVE, '{"prompt": "A", "stop": "\\ud800"}'.encode("utf-32"), 400, "UTF-8"),
    (NATIVE, b'{"prompt": "A", "temperature": NaN}', 400, "temperature"),
    (NATIVE, b'{"prompt": "A", "temperature": Infinity}', 400, "temperature"),
    (NATIVE, b'{"prompt": "A", "n": ' + b"9" * 5000 + b"}", 400, "JSON"),
    (NATIVE, b"[" * 100_000, 400, "JSON"),
    (NATIVE, json.dumps({"prompt": "A" * 10_000_000}).encode(), 413, "over 8388608 bytes"),
    (NATIVE, json.dumps({"prompt": "A" * 8_000_000}).encode(), 400, "too long"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": None}, 400, "prompt"),
    (COMPLETIONS, {"prompt": {}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "empty"),
    (COMPLETIONS, {"prompt": [[1], "A"]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "A", "n": 0}, 400, "n: "),
    (COMPLETIONS, {"prompt": "A", "temperature": -1}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "A", "logprobs": 1000}, 400, "logprobs"),
    (COMPLETIONS, {"prompt": "A", "max_tokens": "many"}, 400, "max_tokens"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "A"}, 400, "messages"),
    (CHAT, {"messages": HI, "n": -1}, 400, "n: "),
    (CHAT, {"messages": [{"content": "no role"}]}, 400, "messages"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template_kwargs"),
    ("/v1/rollout/pause", {"mode": "sleepy"}, 400, "mode"),
    ("/v1/rollout/pause", {"lease_s": -1}, 400, "lease_s"),
    ("/v1/rollout/abort", {"request_ids": "x"}, 400, "request_ids"),
    ("/v1/rollout/weights/load", {"path": ""}, 400, "path"),
    ("/v1/rollout/weights/load", {"path": "/x", "in_flight": "never"}, 400, "in_flight"),
    ("/v1/rollout/memory/release", {"tags": []}, 400, "tags"),
    ("/v1/rollout/memory/release", {"tags": ["gpu"]}, 400, "tags"),
    ("/detokenize", {"tokens": [100_000]}, 400, "token id 100000"),
    ("/detokenize", {"tokens": [1] * 65}, 400, "65 tokens; at most the model's context of 64"),
    ("/tokenize", {}, 400, "exactly one of prompt and messages"),
]

MOST = 32 * 64
LONG = "A" * (MOST + 1)
TOO_LONG = [
    (NATIVE, {"prompt": LONG}),
    (NATIVE, {"prompt": ["A", LONG]}),
    (NATIVE, {"prompt": LONG, "prompt_logprobs": 0, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": LONG}),
    (COMPLETIONS, {"prompt": ["A", LONG], "echo": True}),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
    (CHAT, {"messages": [{"role": "user", "content": "A" * (MOST // 2 + 1)}] * 2}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
    (CHAT, {"messages": HI * 200_000}),
    ("/generate", {"text": LONG}),
    ("/generate", {"text": ["A", LONG]}),
    ("/generate", {"prompts": [LONG]}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
]


@pytest.mark.parametrize(("path", "body"), TOO_LONG, ids=range(len(TOO_LONG)))
async def test_what_cannot_fit_is_not_tokenised_to_find_out(client, model, path, body, monkeypatch):
    def never(text, special=True):
        assert len(text) < 100, "seconds of work for an error"
        return list(text.encode())

    monkeypatch.setattr(model.tokenizer, "encode", never)
    reply = await client.post(path, json=body)
    assert reply.status_code == 400, reply.text[:300]
    error = reply.json()["error"]
    assert "is too long" in error["message"]
    assert "maximum context length is 64 tokens" in error["message"]
    assert error["code"] == "context_length_exceeded"


LONE = '"\\ud800"'
HALVES = [
    (NATIVE, '{"prompt": "A", "stop": %s}'),
    (NATIVE, '{"prompt": "A", "stop": [%s]}'),
    (NATIVE, '{"prompt": "A", "request_id": %s}'),
    (NATIVE, '{"prompt": "A", "session": %s}'),
    (NATIVE, '{"prompt": "A", "cache_salt": %s}'),
    (NATIVE, '{"prompt": "A", %s: 1}'),
    (COMPLETIONS, '{"prompt": "A", "stop": [%s]}'),
    (COMPLETIONS, '{"prompt": "A", "model": %s}'),
    (CHAT, '{"messages": [{"role": "user", "content": "A"}], "chat_template_kwargs": {"a": [%s]}}'),
    (CHAT, '{"messages": [{"role": "user", "content": "A"}], "tools": [{%s: 1}]}'),
    ("/generate", '{"text": "A", "rid": %s}'),
    ("/generate", '{"text": ["A"], "rid": [%s]}'),
    ("/generate", '{"text": "A", "sampling_params": {"stop": %s}}'),
    ("/inference/v1/generate", '{"token_ids": [1], "sampling_params": {"stop": %s}}'),
    ("/tokenize", '{"prompt": %s}'),
    ("/abort_request", '{"rid": %s}'),
    ("/abort_requests", '{"request_ids": [%s]}'),
    ("/v1/rollout/abort", '{"request_ids": [%s]}'),
    ("/v1/rollout/weights/load", '{"path": %s}'),
    ("/v1/rollout/weights/abort", '{"reason": %s}'),
    ("/update_weights", '{"update_info": {"names": [%s]}}'),
    ("/update_weights_from_disk", '{"model_path": %s}'),
    ("/update_weight_version", '{"new_version": %s}'),
    ("/get_weights_by_name", '{"name": %s}'),
    ("/v1/abort_requests", '{"req_ids": [%s]}'),
]


@pytest.mark.parametrize(("path", "body"), HALVES, ids=range(len(HALVES)))
async def test_half_a_character_is_refused_wherever_it_stands(client, path, body):
    reply = await client.post(path, content=(body % LONE).encode())
    assert reply.status_code == 400, reply.text
    assert "lone surrogate" in reply.text


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("\\ud83d\\ude00", 200),
        ("\\uD83D\\uDE00\\ud83d\\ude00", 200),
        ("\\\\ud800", 200),
        ("\\ud7ff\\ue000", 200),
        ("a\\n\\u00e9", 200),
        ("\\ude00\\ud83d", 400),
        ("\\ud83d\\ud83d\\ude00", 400),
        ("\\ud83d\\ude00\\ude00", 400),
        ("\\ud83d\\\\ude00", 400),
        ("\\\\\\ud800", 400),
        ("\\uDBFF", 400),
    ],
)
async def test_pairs_of_surrogates_are_characters(client, text, status):
    content = b'{"prompt": "%s", "max_tokens": 1}' % text.encode()

    async def pieces():
        for i in range(len(content)):
            yield content[i : i + 1]

    assert (await client.post(NATIVE, content=content)).status_code == status
    assert (await client.post(NATIVE, content=pieces())).status_code == status


@pytest.mark.parametrize(("path", "body", "status", "says"), CASES, ids=range(len(CASES)))
async def test_bad_input(client, path, body, status, says):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = await client.post(path, content=content)
    assert reply.status_code == status, reply.text[:500]
    assert says.lower() in reply.json()["error"]["message"].lower()
    assert len(reply.content) < 4000, "an error must not repeat a huge input"
    assert (await client.post(NATIVE, json={"prompt": "A", "max_tokens": 1})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (NATIVE, {"prompt": "A", "y" * 100_000: 1}),
        (NATIVE, {"prompt": "A", "constraint": {"y" * 100_000: 1}}),
        (COMPLETIONS, {"prompt": "A", "logit_bias": {"y" * 100_000: 1}}),
        (NATIVE, {"prompt": "A", "stop": "B", "seed": "y" * 100_000}),
    ],
)
async def test_what_is_wrong_is_told_without_all_of_it(client, path, body):
    reply = await client.post(path, json=body)
    assert reply.status_code == 400
    assert len(reply.content) < 4096


async def test_a_body_that_lies_about_its_length_is_stopped_while_it_arrives(client):
    async def body():
        for _ in range(20):
            yield b" " * 1_000_000

    reply = await client.post(NATIVE, content=body())
    assert reply.status_code == 413
    assert "over 8388608 bytes" in reply.json()["error"]["message"]


async def test_a_prompt_larger_than_the_kv_cache(client, service, replicas, until):
    service.fleet.replicas[0].stats = msgspec.structs.replace(service.fleet.replicas[0].stats, kv_blocks_total=1)
    reply = await client.post(NATIVE, json={"prompt": "A" * 17})
    assert reply.status_code == 400
    assert "17 tokens, the KV cache holds 16" in reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["gzip", "br", "GZIP", "deflate, gzip"])
async def test_a_compressed_body_is_refused_as_that(client, kind):
    reply = await client.post(NATIVE, content=gzip.compress(b"{}"), headers={"content-encoding": kind})
    assert reply.status_code == 415
    assert "compressed" in reply.json()["error"]["message"]
    plain = {"content-encoding": "identity"}
    assert (await client.post(NATIVE, json={"prompt": "A", "max_tokens": 1}, headers=plain)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/v1/models", "/metrics"])
async def test_head_is_get_without_the_body(client, path):
    got, asked = await client.get(path), await client.head(path)
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers["content-type"] == got.headers["content-type"]
    assert (await client.head("/nothing")).status_code == 404
    assert (await client.head(NATIVE)).status_code == 405


async def test_unknown_routes_and_methods(client):
    assert (await client.get("/nothing")).status_code == 404
    assert (await client.get(NATIVE)).status_code == 405
    assert (await client.get("/v1/rollout/weights/wait?version=x")).status_code == 400
    reply = await client.get("/v1/rollout/weights/wait?version=9&timeout_s=0.05")
    assert reply.status_code == 409
    assert "version 9; live is 0" in reply.json()["error"]["message"]


async def test_what_clients_get_away_with(client):
    body = json.dumps({"prompt": "A", "max_tokens": 1})
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        assert (await client.post(NATIVE, content=body, headers={"content-type": kind})).status_code == 200
    assert (await client.post(NATIVE + "/", content=body)).status_code == 200


async def test_a_length_of_thousands_of_digits_is_a_length(client):
    """Python converts no text of so many digits into a number."""
    body = json.dumps({"prompt_ids": [65], "max_tokens": 1})
    for digits, status in ((str(len(body)).zfill(5000), 200), ("9" * 5000, 413)):
        reply = await client.post("/v1/rollout/generate", content=body, headers={"content-length": digits})
        assert reply.status_code == status


async def test_head_changes_nothing(client, replicas):
    """Probes and link checkers send it, to be told only what a GET would say."""
    for path in ("/clear_load_weight", "/update_model_weight", "/flush_cache"):
        assert (await client.head(path)).status_code == 405
    assert not [message for replica in replicas for message in replica.got(Clear) + replica.got(ResetPrefixCache)]

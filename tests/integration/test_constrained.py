"""A real model held to schemas and grammars, over HTTP."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.integration.conftest import running
from tests.integration.json_schemas import SCHEMAS
from tests.integration.live import LiveService

SMOLLM2 = Path("models/SmolLM2-135M-Instruct")
pytestmark = pytest.mark.skipif(not SMOLLM2.is_dir(), reason="models/SmolLM2-135M-Instruct: run `make model`")


@pytest.fixture(scope="module")
def service() -> Iterator[LiveService]:
    yield from running(SMOLLM2, "--dtype", "bfloat16", "--api-workers", "2", "--max-model-len", "2048")


def ask(service: LiveService, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{service.url}{path}", json=body, timeout=120)


def test_there_are_a_hundred() -> None:
    assert len(SCHEMAS) >= 100
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_every_answer_follows_its_schema(service: LiveService) -> None:
    """At temperature 1. What names itself may be nested as deep as the model likes: where an answer of such a schema is
    cut off, others are asked for.
    """

    def answer(item: tuple[str, Any]) -> tuple[str, str]:
        name, schema = item
        seeds = range(1, 5) if "$ref" in json.dumps(schema) else range(1, 2)
        for seed in seeds:
            body = {
                "messages": [{"role": "user", "content": f"Answer with JSON for: {name}."}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
                "seed": seed,
                "temperature": 1.0,
                "max_tokens": 700,
            }
            reply = ask(service, "/v1/chat/completions", body)
            assert reply.status_code == 200, (name, reply.text)
            (choice,) = reply.json()["choices"]
            if choice["finish_reason"] == "stop":
                return name, choice["message"]["content"]
        pytest.fail(f"{name}: no answer ends: {choice['finish_reason']}: {choice['message']['content']}")

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(answer, SCHEMAS.items()))
    assert len(found) == len(SCHEMAS)
    for name, content in found:
        checker = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker())
        checker.validate(json.loads(content))
    assert len({content for _, content in found}) > 80  # they are samples, not the grammars' own texts


def test_logprobs_are_those_of_the_mask(service: LiveService) -> None:
    """Sampled under a grammar, then scored without it: the two differ by the mass that the masks leave."""
    body = {"prompt": "The answer is", "constraint": {"regex": " (yes|no)"}, "sampling_mask": True, "max_tokens": 8}
    (output,) = ask(service, "/v1/rollout/generate", body | {"logprobs": 20, "seed": 3}).json()["outputs"]
    assert output["text"] in (" yes", " no")
    assert output["finish_reason"] == "stop"
    for token, logprob, mask, top in zip(
        output["token_ids"], output["logprobs"], output["sampling_masks"], output["top_logprobs"], strict=True
    ):
        assert token in mask
        shares = {entry["token_id"]: entry["logprob"] for entry in top}
        assert set(shares) <= set(mask)
        assert shares[token] == logprob
        if len(mask) <= 20:  # all of it: it adds up to 1
            assert sum(2.718281828459045**p for p in shares.values()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}),
        ("/v1/completions", {"prompt": "x", "guided_regex": "(["}),
        (
            "/generate",
            {"text": "x", "sampling_params": {"json_schema": '{"type": "integer", "minimum": 3, "maximum": 2}'}},
        ),
        ("/v1/rollout/generate", {"prompt": "x", "constraint": {"grammar": 'start: a\na: a "x"'}}),
    ],
)
def test_what_cannot_be_followed_is_a_400(service: LiveService, path: str, body: Any, stream: bool) -> None:
    reply = ask(service, path, body | {"stream": stream})
    assert reply.status_code == 400, reply.text
    assert "grammar" in reply.json()["error"]["message"]
    assert ask(service, "/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_stream_is_held_too(service: LiveService) -> None:
    body = {"prompt": "Numbers:", "guided_regex": " [0-9]{3}(, [0-9]{3}){2}", "stream": True, "max_tokens": 40}
    reply = ask(service, "/v1/completions", body)
    parts = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    text = "".join(part["choices"][0]["text"] for part in parts)
    assert re.fullmatch(r" [0-9]{3}(, [0-9]{3}){2}", text)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
                "required": ["a", "b"],
            },
        },
    }
]


def test_a_tool_that_has_to_be_called(service: LiveService) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for choice, finish in (("required", "tool_calls"), (named, "stop")):
        body = {"messages": [{"role": "user", "content": "2+3?"}], "tools": TOOLS, "tool_choice": choice}
        reply = ask(service, "/v1/chat/completions", body | {"parallel_tool_calls": False, "max_tokens": 200})
        (made,) = reply.json()["choices"]
        (call,) = made["message"]["tool_calls"]
        assert made["finish_reason"] == finish
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]).keys() == {"a", "b"}


def test_a_conversation_goes_on_from_its_own_ids(service: LiveService) -> None:
    """What a reply said is the beginning of the next prompt, to the token, and it is in the cache."""
    body = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 60}
    reply = ask(service, "/v1/chat/completions", body | {"return_token_ids": True, "ignore_eos": True}).json()
    history = reply["prompt_token_ids"] + reply["choices"][0]["token_ids"]
    said = ask(
        service, "/tokenize", {"prompt": "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"}
    )
    for turn in range(3):
        history += said.json()["tokens"]
        body = {"prompt_ids": history, "max_tokens": 40, "seed": turn, "ignore_eos": True}
        (output,) = ask(service, "/v1/rollout/generate", body).json()["outputs"]
        assert output["cached_tokens"] >= len(history) - len(said.json()["tokens"]) - 32, turn
        history += output["token_ids"]

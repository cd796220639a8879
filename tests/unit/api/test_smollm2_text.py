"""What clients saw of SmolLM2's tokens on every dialect, over its own tokenizer and chat template.

The replica is a stand-in that samples what a test says; where that ends is decided by the worker's own rules.
"""

import json
import re

import pytest

from api.model import Model
from tests.unit.api.test_stop_strings import SMOLLM2, StoppingReplica, smollm2_tokenizer
from worker.tokenizer import Tokenizer

PARTS = [10813, 116, 222]
"""Of the vocabulary: " " with half a unicorn, and the other half in two."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return smollm2_tokenizer()


@pytest.fixture
def model(config, tokenizer) -> Model:
    return Model(config.model_name, SMOLLM2, 49152, 8192, "LlamaForCausalLM", tokenizer, tuple(tokenizer.ends))


@pytest.fixture
def make_replica(config, tokenizer):
    return lambda index: StoppingReplica(config.run_dir, index, tokenizer)


async def _ask(client, replicas, path, script, **body):
    for replica in replicas:
        replica.script = script
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply


async def test_a_stop_string_before_a_unicorn(client, replicas, tokenizer) -> None:
    script = tokenizer.encode(" A: 🦄\nQ: animal?", add_special_tokens=False)
    reply = await _ask(
        client, replicas, "/v1/rollout/generate", script, prompt="Q: animal?", max_tokens=8, stop=["A: "]
    )
    (output,) = reply.json()["outputs"]
    assert (output["text"], output["finish_reason"], output["stop_reason"]) == (" ", "stop", "A: ")
    assert output["token_ids"] == script[: len(output["token_ids"])]


async def test_chat_bytes_join_to_the_text(client, replicas) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    (choice,) = (await _ask(client, replicas, "/v1/chat/completions", PARTS, **body)).json()["choices"]
    content = choice["logprobs"]["content"]
    joined = bytes(byte for entry in content for byte in entry["bytes"])
    assert joined.decode(errors="replace") == choice["message"]["content"]
    assert all(entry["bytes"] != list("\ufffd".encode()) for entry in content)


async def test_completions_keep_the_sampled_tokens_own_logprob(client, replicas) -> None:
    body = {"prompt": "Hi", "max_tokens": 3, "logprobs": 3}
    (choice,) = (await _ask(client, replicas, "/v1/completions", PARTS, **body)).json()["choices"]
    made = choice["logprobs"]
    for token, logprob, top in zip(made["tokens"], made["token_logprobs"], made["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert len(top) == 2  # the stand-in says two: the sampled token, and id 0


async def test_an_sglang_stream_holds_partial_characters_back(client, replicas, tokenizer) -> None:
    script = tokenizer.encode(" 🦄 龘 🦄", add_special_tokens=False)
    reply = await _ask(
        client, replicas, "/generate", script, text="🦄", stream=True, sampling_params={"max_new_tokens": 99}
    )
    texts = [json.loads(event)["text"] for event in re.findall(r"^data: (\{.*\})$", reply.text, re.MULTILINE)]
    shown = ""
    for text in texts:  # as clients read it: what is new begins where the last text ended
        shown += text[len(shown) :]
    assert shown == texts[-1] == " 🦄 龘 🦄"
    assert not any("\ufffd" in text for text in texts)


async def test_a_conversation_with_a_call_and_no_content(client, replicas) -> None:
    """The template adds content to texts: null would not do."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for nothing in ({"content": None}, {}):
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [call]} | nothing,
            {"role": "tool", "content": "5", "tool_call_id": "1"},
        ]
        reply = await _ask(client, replicas, "/tokenize", [], messages=messages)
        text = Tokenizer.load(SMOLLM2).decode(reply.json()["tokens"], skip_special=False)
        assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n5<|im_end|>" in text
        await _ask(client, replicas, "/v1/chat/completions", [1, 2, 3], messages=messages, max_tokens=4)


async def test_an_empty_stop_string_stops_nothing(client, replicas) -> None:
    for stop in ("", [""], None, []):
        reply = await _ask(client, replicas, "/v1/completions", PARTS, prompt="Hi", max_tokens=3, stop=stop)
        assert reply.json()["choices"][0]["finish_reason"] == "length"

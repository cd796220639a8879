"""Chat completions with tools and reasoning: what a client is told beside the ids, whole and streamed."""

import asyncio
import json
from typing import Any

import pytest

from api.model import Model
from api.schemas.openai import ChatResponse
from tests.unit.api.byte_tokenizer import EOS, VOCAB, ByteTokenizer
from tests.unit.api.scripted import CONTEXT
from worker.messages import Generate

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}},
    {"type": "function", "function": {"name": "sub"}},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"replicas": 1}


@pytest.fixture
def model(config) -> Model:
    return Model(
        config.model_name,
        config.model,
        VOCAB,
        10 * CONTEXT,
        "Qwen3ForCausalLM",
        ByteTokenizer(),  # type: ignore[arg-type]
        (EOS,),
        tool_format="hermes",
        reasons=True,
    )


def _body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "1+1?"}], "tools": TOOLS, "max_tokens": 300} | fields


def _script(replicas, text: str, finish: str = "stop") -> list[int]:
    ids = [*text.encode(), *([EOS] if finish == "stop" else [])]
    for replica in replicas:
        replica.script, replica.finish = ids, finish
    return ids


async def _whole(client, **fields: Any) -> dict[str, Any]:
    reply = await client.post("/v1/chat/completions", json=_body(**fields))
    assert reply.status_code == 200, reply.text
    ChatResponse.model_validate(reply.json())
    (choice,) = reply.json()["choices"]
    return choice


async def _streamed(client, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message that the deltas add up to, and the choices of all events."""
    reply = await client.post("/v1/chat/completions", json=_body(stream=True, **fields))
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    message: dict[str, Any] = {}
    for choice in choices:
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                for piece in value:
                    calls = message.setdefault("tool_calls", [])
                    if piece["index"] == len(calls):
                        calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
                    else:
                        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            else:
                message[key] = message.get(key, "") + value
    return message, choices


def _told(message: dict[str, Any]) -> dict[str, Any]:
    """But for the ids of calls."""
    calls = [call["function"] | {"type": call["type"]} for call in message.get("tool_calls", [])]
    assert len({call["id"] for call in message.get("tool_calls", [])}) == len(calls)
    return {key: value for key, value in message.items() if key != "tool_calls"} | ({"calls": calls} if calls else {})


ADD = {"name": "add", "arguments": '{"a": 1}', "type": "function"}
SUB = {"name": "sub", "arguments": "{}", "type": "function"}
THOUGHT = {"reasoning": "hm", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("text", "message", "finish"),
    [
        ("Two.", {"content": "Two."}, "stop"),
        (CALL, {"content": None, "calls": [ADD]}, "tool_calls"),
        (f"Sure.\n{CALL}\n{OTHER}", {"content": "Sure.", "calls": [ADD, SUB]}, "tool_calls"),
        (f"<think>\nhm\n</think>\n\n{CALL}", {"content": None, "calls": [ADD]} | THOUGHT, "tool_calls"),
        ("<think>\nhm\n</think>\n\nTwo.", {"content": "Two."} | THOUGHT, "stop"),
        ("<think>\nhm", {"content": None} | THOUGHT, "stop"),
        ("<tool_call>what", {"content": "<tool_call>what"}, "stop"),
    ],
)
async def test_messages_whole_and_streamed(client, replicas, text, message, finish):
    ids = _script(replicas, text)
    whole = await _whole(client, logprobs=True, return_token_ids=True)
    assert _told(whole["message"]) == {"role": "assistant"} | message
    assert whole["finish_reason"] == finish
    assert whole["token_ids"] == ids
    assert [entry["logprob"] for entry in whole["logprobs"]["content"]] == [-0.5] * len(ids)

    streamed, choices = await _streamed(client, logprobs=True, return_token_ids=True)
    expected = {"role": "assistant"} | message
    assert _told(streamed) == expected | {"content": expected["content"] or ""}
    assert choices[-1]["finish_reason"] == finish
    assert {c["finish_reason"] for c in choices[:-1]} == {None}
    assert [i for c in choices for i in c.get("token_ids", [])] == ids
    assert sum(len(c["logprobs"]["content"]) for c in choices if c.get("logprobs")) == len(ids)


async def test_a_call_that_is_cut_off_ended_by_length(client, replicas):
    _script(replicas, CALL[:49], "length")
    whole = await _whole(client)
    assert whole["finish_reason"] == "length"
    assert _told(whole["message"])["calls"] == [ADD | {"arguments": CALL[:49].partition('"arguments": ')[2]}]


async def test_arguments_are_streamed_as_they_come(client, replicas):
    ids = _script(replicas, CALL)
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)

    async def pace() -> None:
        for _ in ids:
            replicas[0].gate.release()
            await asyncio.sleep(0.002)

    (_, choices), _ = await asyncio.gather(_streamed(client), pace())
    pieces = [call["function"]["arguments"] for c in choices for call in c["delta"].get("tool_calls", [])]
    assert "".join(pieces) == '{"a": 1}'
    assert len(pieces) > 4


async def test_without_parallel_calls_only_the_first_is_told(client, replicas):
    _script(replicas, CALL + OTHER)
    assert _told((await _whole(client, parallel_tool_calls=False))["message"])["calls"] == [ADD]
    assert _told((await _streamed(client, parallel_tool_calls=False))[0])["calls"] == [ADD]


async def test_a_client_that_reads_the_calls_itself(client, replicas):
    _script(replicas, CALL)
    whole = await _whole(client, tool_choice="none")
    assert (whole["message"], whole["finish_reason"]) == ({"role": "assistant", "content": CALL}, "stop")


async def test_where_reasoning_goes(client, replicas):
    _script(replicas, "<think>\nhm\n</think>\n\nTwo.")
    kept = await _whole(client, separate_reasoning=False)
    assert kept["message"] == {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo."}
    left_out = await _whole(client, include_reasoning=False)
    assert left_out["message"] == {"role": "assistant", "content": "Two."}
    message, choices = await _streamed(client, stream_reasoning=False)
    assert message == {"role": "assistant", "content": "Two."} | THOUGHT
    assert sum("reasoning" in c["delta"] for c in choices) == 1


async def test_a_prompt_that_opens_the_reasoning(client, replicas):
    _script(replicas, "hm</think>Two.")
    reply = await client.post("/v1/chat/completions", json=_body(messages=[{"role": "user", "content": "think"}]))
    assert reply.json()["choices"][0]["message"]["content"] == "Two."
    assert reply.json()["choices"][0]["message"]["reasoning"] == "hm"


async def test_a_turn_goes_on_from_token_ids(client, replicas):
    """The prompt is what is sent, to the token, and whether it opened the reasoning is read from its end."""
    _script(replicas, f"hm</think>{CALL}")
    tokens = list(b"whatever came before, and <think>\n")
    reply = await client.post("/v1/chat/completions/tokens", json=_body(tokens=tokens, return_token_ids=True))
    assert reply.status_code == 200, reply.text
    assert reply.json()["prompt_token_ids"] == tokens == replicas[0].got(Generate)[-1].prompt_ids
    message = reply.json()["choices"][0]["message"]
    assert _told(message) == {"role": "assistant", "content": None, "calls": [ADD]} | THOUGHT
    assert (await client.post("/v1/chat/completions/tokens", json=_body(tokens=[]))).status_code == 400
    assert (await client.post("/v1/chat/completions/tokens", json=_body())).status_code == 400


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": None, "tool_choice": "auto"}, "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "no tool is called 'mul'"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tool 0 is no function with a name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "auto"}, "tool 0 is no function with a name"),
    ],
)
async def test_what_cannot_be_chosen(client, fields, said):
    reply = await client.post("/v1/chat/completions", json=_body(**fields))
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]


async def test_tools_reach_the_prompt_whatever_the_choice(client, replicas):
    _script(replicas, "x")
    for choice in ("none", "auto", None):
        await _whole(client, tool_choice=choice)
    assert len({tuple(m.prompt_ids) for r in replicas for m in r.got(Generate)}) == 1

"""Tokens that are parts of characters: told apart, with their own bytes, and never shown as halves."""

import asyncio
import json
import re

import pytest

from api import logprobs
from api.logprobs import TextOffsets, TokenNames
from worker.messages import Chunk, Span

UNICORN = list("🦄".encode())


def test_two_tokens_of_the_same_text_have_an_entry_each(model) -> None:
    """Both are U+FFFD by themselves; the sampled one keeps its own value, and its name."""
    sampled, other, third = 0x9F, 0xA6, 0x84
    top = [(other, -0.3), (sampled, -1.36), (third, -2.08)]
    chunk = Chunk("r", 0, [sampled], [-1.36], [Span(0, 0, 1)], top=[top])
    made = logprobs.completion(chunk, TokenNames(model, as_ids=False), TextOffsets(model, skip_special=True))
    assert made["tokens"] == ["\ufffd"]
    assert made["top_logprobs"] == [{"\ufffd": -1.36, f"token_id:{other}": -0.3, f"token_id:{third}": -2.08}]
    prompt = [[(sampled, -1.5, 2), (other, -0.5, 1)]]
    made = logprobs.completion_prompt(
        [65, sampled], prompt, TokenNames(model, as_ids=False), TextOffsets(model, skip_special=True)
    )
    assert made["top_logprobs"] == [None, {"\ufffd": -1.5, f"token_id:{other}": -0.5}]
    assert made["token_logprobs"] == [None, -1.5]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_are_places_in_the_text(client, replicas, stream, echo) -> None:
    """Parts of a character begin where it begins; a special token takes no room in a text without them."""
    for replica in replicas:
        replica.script = [*"aé".encode(), 256, *"🦄b".encode()]
    body = {"prompt": "é:", "max_tokens": 9, "logprobs": 0, "echo": echo, "stream": stream, "ignore_eos": True}
    reply = await client.post("/v1/completions", json=body)
    events = re.findall(r"^data: (\{.*\})$", reply.text, re.MULTILINE) if stream else [reply.text]
    choices = [json.loads(event)["choices"][0] for event in events]
    text = "".join(choice["text"] for choice in choices)
    offsets = [at for choice in choices for at in choice["logprobs"]["text_offset"]]
    own = [0, 1, 1, 2, 2, 2, 2, 2, 3]
    assert (text, offsets) == (("é:aé🦄b", [0, 0, 1, *(2 + at for at in own)]) if echo else ("aé🦄b", own))


def test_chat_entries_have_the_bytes_of_their_tokens(model) -> None:
    tops = [[(i, -0.1), (65, -3.0)] for i in UNICORN]
    chunk = Chunk("r", 0, UNICORN, [-0.1] * 4, [Span(0, 0, 4)], top=tops)
    for as_ids in (False, True):
        content = logprobs.chat(chunk, TokenNames(model, as_ids=as_ids), 2)["content"]
        assert bytes(b for entry in content for b in entry["bytes"]).decode() == "🦄"
        assert [entry["top_logprobs"][0]["bytes"] for entry in content] == [[i] for i in UNICORN]
        assert content[0]["top_logprobs"][1]["bytes"] == [65]


@pytest.mark.parametrize("stop", [None, "ENDE"])
async def test_an_sglang_stream_shows_no_half_characters_and_no_half_stops(client, replicas, until, stop) -> None:
    """Its text is cumulative, and clients take what is new by its length: nothing shown may change later."""
    script = list("a 🦄 ENDER".encode())
    for replica in replicas:
        replica.script = script[:-1] if stop else script
        replica.finish, replica.stop_reason = ("stop", stop) if stop else ("length", None)
        replica.gate = asyncio.Semaphore(0)
    sampling = {"max_new_tokens": 32} | ({"stop": stop} if stop else {})
    asked = asyncio.create_task(
        client.post("/generate", json={"text": "p", "stream": True, "sampling_params": sampling})
    )
    await until(lambda: any(replica.running for replica in replicas))
    for _ in script:
        for replica in replicas:
            replica.gate.release()
        await asyncio.sleep(0.01)
    reply = await asked
    events = [json.loads(event) for event in re.findall(r"^data: (\{.*\})$", reply.text, re.MULTILINE)]
    texts = [event["text"] for event in events]
    assert texts[-1] == ("a 🦄 " if stop else "a 🦄 ENDER")
    assert all(texts[-1].startswith(text) for text in texts)
    assert events[-1]["output_ids"] == replica.script
    assert len(texts) > 5

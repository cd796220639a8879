"""truncate_prompt_tokens and truncation_side, as vLLM has them."""

from typing import Any

import pytest

from tests.unit.api.scripted import CONTEXT
from worker.messages import Generate

BOS = 257
WORDS = list(b"abcdefgh")


async def prompt_of(client, replicas, path: str = "/v1/completions", **body: Any) -> list[int]:
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    reply = await client.post(path, json={"max_tokens": 1} | body)
    assert reply.status_code == 200, reply.text
    (message,) = [m for replica in replicas for m in replica.got(Generate)]
    return message.prompt_ids


@pytest.fixture
def with_bos(model, monkeypatch):
    """A tokenizer that begins texts with a special token."""
    monkeypatch.setattr(
        model.tokenizer, "encode", lambda text, special=True: [BOS] * bool(special) + list(text.encode())
    )


@pytest.mark.parametrize("prompt", ["abcdefgh", ["abcdefgh"], WORDS, [WORDS]])
@pytest.mark.parametrize(("side", "kept"), [(None, b"fgh"), ("left", b"fgh"), ("right", b"abc")])
async def test_every_kind_of_prompt(client, replicas, prompt, side, kept):
    found = await prompt_of(client, replicas, prompt=prompt, truncate_prompt_tokens=3, truncation_side=side)
    assert bytes(found) == kept


@pytest.mark.parametrize(("side", "kept"), [(None, [BOS, *b"gh"]), ("left", list(b"fgh")), ("right", [BOS, *b"ab"])])
async def test_special_tokens_in_front_stay_unless_a_side_is_said(client, replicas, with_bos, side, kept):
    asked = {"prompt": "abcdefgh", "truncate_prompt_tokens": 3, "truncation_side": side}
    assert await prompt_of(client, replicas, **asked) == kept


async def test_ids_have_no_special_tokens_of_their_own(client, replicas, with_bos):
    assert await prompt_of(client, replicas, prompt=WORDS, truncate_prompt_tokens=3) == list(b"fgh")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_minus_one_leaves_room_for_one_token(client, replicas, path):
    """A prompt over the context is then no error."""
    found = await prompt_of(client, replicas, path, prompt="x" * CONTEXT + "y", truncate_prompt_tokens=-1)
    assert len(found) == CONTEXT - 1


async def test_what_fits_is_left_alone(client, replicas):
    assert bytes(await prompt_of(client, replicas, prompt="abc", truncate_prompt_tokens=3)) == b"abc"


async def test_a_conversation_keeps_its_end(client, replicas):
    found = await prompt_of(client, replicas, "/v1/chat/completions", prompt="abc", truncate_prompt_tokens=4)
    assert bytes(found) == b"c;a:"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"truncate_prompt_tokens": CONTEXT + 1}, f"{CONTEXT + 1} is more than fits"),
        ({"truncate_prompt_tokens": -2}, "greater than or equal to -1"),
        ({"truncate_prompt_tokens": 0, "prompt": [65]}, "empty"),
        ({"truncate_prompt_tokens": 0}, "special tokens alone"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "middle"}, "truncation_side"),
    ],
)
async def test_wrong_truncations(client, with_bos, fields, says):
    reply = await client.post("/v1/completions", json={"prompt": "abcdefgh", "max_tokens": 1} | fields)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


async def test_a_tokenizer_that_ends_texts_wants_a_side(client, model, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "encode", lambda text, special=True: [*text.encode()] + [BOS] * bool(special))
    reply = await client.post("/v1/completions", json={"prompt": "abcdefgh", "truncate_prompt_tokens": 3})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "truncation_side"

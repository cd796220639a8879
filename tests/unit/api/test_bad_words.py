"""bad_words: which ids a word is, on every route that has the field."""

import pytest

from api import bad_words
from api.bad_words import banned
from api.errors import BadInput
from tests.unit.api.test_fields import valid
from worker.messages import Generate


class Spaced:
    """A model whose tokenizer has one token for a word, and others for it after a space; long words are two."""

    async def encode_all(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        assert not add_special_tokens
        words = {"cat": [1], " cat": [11], "dog": [2, 3], " dog": [12, 3], "x": [4], " x": [5, 4], "y": [6], " y": [6]}
        return [words[text] if text.strip() else [] for text in texts]


async def test_a_word_also_after_a_space_where_that_is_another_first_token() -> None:
    assert await banned(["cat", " dog"], Spaced()) == [[1], [11], [2, 3], [12, 3]]  # type: ignore[arg-type]
    assert await banned(["x", "y"], Spaced()) == [[4], [6]]  # type: ignore[arg-type]
    assert await banned(None, Spaced()) == []  # type: ignore[arg-type]


async def test_words_without_tokens_and_too_many(monkeypatch) -> None:
    with pytest.raises(BadInput, match="without a token"):
        await banned(["  "], Spaced())  # type: ignore[arg-type]
    monkeypatch.setattr(bad_words, "MAX_WORDS", 3)
    with pytest.raises(BadInput, match="4 sequences of tokens; at most 3"):
        await banned(["cat", "dog"], Spaced())  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate sampling_params"])
async def test_they_reach_the_worker(client, replicas, part):
    path, body = valid(part, "bad_words", ["and"])
    assert (await client.post(path, json=body)).status_code == 200
    (message,) = [m for replica in replicas for m in replica.got(Generate)]
    assert message.sampling.bad_words == [list(b"and")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rollout/generate", {"prompt": "A", "bad_words": ["and"]}),
        ("/generate", {"prompts": ["A"], "generation_kwargs": {"bad_words": ["and"]}}),
    ],
)
async def test_also_from_the_native_and_the_older_trl_form(client, replicas, path, body):
    assert (await client.post(path, json=body)).status_code == 200
    (message,) = [m for replica in replicas for m in replica.got(Generate)]
    assert message.sampling.bad_words == [list(b"and")]

"""Logprobs of samples in the shapes that clients want. A part is a whole sample, or a chunk of one."""

from collections.abc import Iterable, Sequence
from typing import Any

from api.generation import Sample
from api.lanes import Holes
from api.model import Model
from worker.messages import Chunk

Part = Sample | Chunk
PromptLogprobs = list[list[tuple[int, float, int]]]


class TokenNames:
    """How tokens are spelled: as text, or as token_id:<n>."""

    def __init__(self, model: Model, *, as_ids: bool) -> None:
        self._model = model
        self._as_ids = as_ids or model.tokenizer is None

    def __call__(self, token_id: int) -> str:
        """How a token is called in the reply."""
        if self._as_ids:
            return _by_number(token_id)
        return Holes.name if token_id == Holes.token else self._model.token_text(token_id)

    def bytes_of(self, token_id: int) -> list[int] | None:
        """The token's own bytes: a part of a character, maybe. None without a tokenizer."""
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            return None
        return Holes.spelling if token_id == Holes.token else list(tokenizer.token_bytes(token_id))

    def keyed(self, candidates: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Logprobs by name, one entry per id: where two tokens have the same text, the later one is token_id:<n>."""
        named: dict[str, float] = {}
        for token_id, logprob in dict(candidates).items():
            name = self(token_id)
            named[_by_number(token_id) if name in named else name] = logprob
        return named


def _by_number(token_id: int) -> str:
    return f"token_id:{token_id}"


class TextOffsets:
    """Where tokens begin in the text of a reply: a token that completes a character, where that one begins.

    start: characters before the first token. Without a tokenizer there is no text, and every offset is the start.
    """

    def __init__(self, model: Model, *, skip_special: bool, start: int = 0) -> None:
        self._stream = None if model.tokenizer is None else model.tokenizer.stream(skip_special=skip_special)
        self._at = start

    def of(self, ids: Sequence[int]) -> list[int]:
        """Where the tokens begin that follow those of the calls before."""
        if self._stream is not None and Holes.token in ids:
            return [Holes.offset]
        offsets = []
        for token_id in ids:
            offsets.append(self._at)
            self._at += len(self._stream.push(token_id)) if self._stream is not None else 0
        return offsets

    @property
    def at(self) -> int:
        """Where the next begins."""
        return self._at

    @property
    def at_rest(self) -> bool:
        """Whether a token that is whole moves the next one by its own text."""
        return self._stream is None or self._stream.at_rest


def completion(part: Part, names: TokenNames, offsets: TextOffsets) -> dict[str, Any]:
    """OpenAI's completion logprobs. offsets: after those of the parts before this one."""
    tokens = [names(i) for i in part.token_ids]
    tops = part.top or [[] for _ in tokens]
    return {
        "tokens": tokens,
        "token_logprobs": part.logprobs,
        "top_logprobs": [
            names.keyed([(token_id, logprob), *((i, p) for i, p in top if i != token_id)])
            for token_id, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True)
        ],
        "text_offset": offsets.of(part.token_ids),
    }


def completion_prompt(
    ids: list[int], prompt: PromptLogprobs, names: TokenNames, offsets: TextOffsets
) -> dict[str, Any]:
    """OpenAI's completion logprobs of an echoed prompt; its first token has no logprob."""
    return {
        "tokens": [names(i) for i in ids],
        "token_logprobs": [None, *(candidates[0][1] for candidates in prompt)],
        "top_logprobs": [None, *(names.keyed((i, p) for i, p, _ in candidates) for candidates in prompt)],
        "text_offset": offsets.of(ids),
    }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two completion logprobs, one after the other."""
    return {key: first[key] + second[key] for key in first}


def chat(part: Part, names: TokenNames, top_n: int) -> dict[str, Any]:
    """OpenAI's chat logprobs: one content entry per token."""
    tops = part.top or [[] for _ in part.token_ids]
    return {
        "content": [
            _entry(names, token_id, logprob) | {"top_logprobs": [_entry(names, i, p) for i, p in top[:top_n]]}
            for token_id, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True)
        ]
    }


def _entry(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": names(token_id), "logprob": logprob, "bytes": names.bytes_of(token_id)}


def by_id(part: Part, top_n: int) -> dict[str, Any]:
    """vLLM's token-in token-out shape: exactly one content entry per token, all by id."""
    tops = part.top or [[] for _ in part.token_ids]
    ranks: Sequence[int | None] = part.ranks or [None for _ in part.token_ids]
    return {
        "content": [
            {
                "token": _by_number(token_id),
                "token_id": token_id,
                "logprob": logprob,
                "rank": rank,
                "top_logprobs": [{"token": _by_number(i), "token_id": i, "logprob": p} for i, p in top[:top_n]],
            }
            for token_id, logprob, rank, top in zip(part.token_ids, part.logprobs, ranks, tops, strict=True)
        ]
    }


def prompt_by_id(prompt: PromptLogprobs | None, model: Model) -> list[dict[str, Any] | None] | None:
    """vLLM's prompt_logprobs: null, then id -> {logprob, rank, decoded_token} per token."""
    if prompt is None:
        return None
    names = TokenNames(model, as_ids=False)
    return [None, *({str(i): _ranked(p, rank, names(i)) for i, p, rank in candidates} for candidates in prompt)]


def _ranked(logprob: float, rank: int, token: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": token}

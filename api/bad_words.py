"""vLLM's bad_words as token ids: words that never come out, at the beginning of a text or in the middle of it."""

from api.errors import BadInput
from api.model import Model

MAX_WORDS = 128
"""Sequences of ids, as vLLM has it."""


async def banned(words: list[str] | None, model: Model) -> list[list[int]]:
    """The sequences of ids that spell these words. Raises BadInput.

    A word counts as it is, and after a space where that is as many tokens with another first one. Other ways to spell
    it stay open, as with vLLM: what is banned is ids, not text.
    """
    if not words:
        return []
    bare = [word.lstrip() for word in words]
    as_they_are = await model.encode_all(bare, add_special_tokens=False)
    after_a_space = await model.encode_all([f" {word}" for word in bare], add_special_tokens=False)
    found: list[list[int]] = []
    for plain, spaced in zip(as_they_are, after_a_space, strict=True):
        if not plain:
            raise BadInput("bad_words: a word without a token; every word needs at least one", param="bad_words")
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    if len(found) > MAX_WORDS:
        raise BadInput(f"bad_words: {len(found)} sequences of tokens; at most {MAX_WORDS}", param="bad_words")
    return found

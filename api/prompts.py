"""Prompts as OpenAI's clients send them: text, texts, ids, or lists of ids -> token ids."""

from typing import Any

from api.errors import BadInput
from api.model import Model


async def prompt_ids(prompt: Any, model: Model, *, add_special_tokens: bool) -> list[list[int]]:
    """One list of token ids per prompt. Raises BadInput."""
    if isinstance(prompt, str):
        return [await model.encode(prompt, add_special_tokens=add_special_tokens)]
    if not prompt:
        raise BadInput("prompt is empty: send at least one token")
    if isinstance(prompt[0], int):
        return [prompt]
    if isinstance(prompt[0], str):
        return await model.encode_all(prompt, add_special_tokens=add_special_tokens)
    return list(prompt)

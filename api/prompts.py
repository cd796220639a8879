"""Prompts as OpenAI's clients send them: text, texts, ids, or lists of ids -> token ids."""

from typing import Any, Literal

from api.errors import BadInput
from api.model import Model

Side = Literal["left", "right"]


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


async def truncated(
    prompts: list[list[int]], model: Model, most: int | None, side: Side | None, *, special: bool
) -> list[list[int]]:
    """vLLM's truncate_prompt_tokens: at most `most` tokens of each prompt; -1 = as many as leave room for one more.

    side "left" keeps the last ones, "right" the first. None: the last ones too, but what the tokenizer put before a
    text (special: it did) stays in front, as a tokenizer that truncates does it. Raises BadInput.
    """
    if most is None:
        return prompts
    if most > model.max_model_len:
        raise BadInput(
            f"truncate_prompt_tokens: {most} is more than fits, {model.limit}", param="truncate_prompt_tokens"
        )
    most = model.max_model_len - 1 if most < 0 else most
    front = await model.encode("") if special and side is None else []
    return [ids if len(ids) <= most else _cut(ids, most, side, front) for ids in prompts]


def _cut(ids: list[int], most: int, side: Side | None, front: list[int]) -> list[int]:
    if side == "right":
        return ids[:most]
    if ids[: len(front)] != front:
        raise BadInput(
            "truncation_side: say left or right, for this tokenizer puts tokens behind a text", param="truncation_side"
        )
    if most < len(front):
        raise BadInput(
            f"truncate_prompt_tokens: {len(front)} special tokens alone are more", param="truncate_prompt_tokens"
        )
    return front + ids[len(ids) - most + len(front) :]

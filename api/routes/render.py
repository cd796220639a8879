"""vLLM's /render routes: a conversation or prompts as token ids, in a body that /inference/v1/generate takes.

Trainers that keep token ids themselves have the template written here once, and generate from the ids.
"""

from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from api.auth import require_data
from api.errors import BadInput
from api.generation import Ask
from api.replies import Json
from api.routes import chat, completions
from api.schemas.base import ERRORS, MAX_NAME
from api.schemas.openai import ChatRequest, CompletionRequest
from api.schemas.tokens import TokenRequest, TokenSampling
from api.service import Service, Uses

router = APIRouter(tags=["vllm"], responses=ERRORS, dependencies=[Depends(require_data)])

AS_SENT = ("bad_words", "skip_special_tokens", "include_stop_str_in_output")
"""Fields that the route of token ids takes as they were sent."""


@router.post("/v1/chat/completions/render", response_model=TokenRequest)
async def render_chat(body: ChatRequest, service: Uses) -> Response:
    """The one prompt of a conversation. Nothing is generated."""
    ask = await chat.asked(body, service)
    service.generations.check(ask)
    (ids,) = ask.prompts
    return Json(
        _request(body, ask, ids, ask.request_id, service, logprobs=ask.sampling.logprobs if body.logprobs else None)
    )


@router.post("/v1/completions/render", response_model=list[TokenRequest])
async def render_completions(body: CompletionRequest, service: Uses) -> Response:
    """One for each prompt. Nothing is generated."""
    ask = await completions.asked(body, service)
    service.generations.check(ask)
    names = [ask.request_id and f"{ask.request_id}-{i}" for i in range(len(ask.prompts))]
    if len(names[-1]) > MAX_NAME:
        raise BadInput(
            f"request_id: with {len(names)} prompts each has its number behind it; at most {MAX_NAME} characters",
            param="request_id",
        )
    return Json(
        [
            _request(body, ask, ids, name, service, logprobs=body.logprobs)
            for ids, name in zip(ask.prompts, names, strict=True)
        ]
    )


def _request(
    body: ChatRequest | CompletionRequest,
    ask: Ask,
    ids: list[int],
    request_id: str,
    service: Service,
    *,
    logprobs: int | None,
) -> dict[str, Any]:
    """What is missing has the same meaning on both routes."""
    taken = set(ask.sampling.__struct_fields__) & TokenSampling.model_fields.keys() - {*AS_SENT, "logprobs"}
    sampling = {name: getattr(ask.sampling, name) for name in taken} | {name: getattr(body, name) for name in AS_SENT}
    sampling |= {"logprobs": logprobs}
    if ask.sampling.grammar:
        sampling["structured_outputs"] = {"grammar": ask.sampling.grammar}
    if ask.may_cut and ask.sampling.max_tokens is not None:  # a default, which the other route would take as asked for
        sampling["max_tokens"] = min(ask.sampling.max_tokens, service.model.max_model_len - len(ids))
    if body.no_stop_trim:
        sampling["include_stop_str_in_output"] = True
    request = {
        "model": ask.adapter or body.model,
        "token_ids": ids,
        "sampling_params": {name: value for name, value in sorted(sampling.items()) if value not in (None, [], {})},
        "request_id": request_id or None,
        "stream": bool(body.stream),
        "stream_options": body.stream_options.model_dump() if body.stream_options else None,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "session_id": body.session_id,
        "min_weight_version": body.min_weight_version,
        "max_staleness": body.max_staleness,
        "return_token_ids": body.return_token_ids,
    }
    return {name: value for name, value in request.items() if value is not None}

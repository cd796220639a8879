"""GET /v1/models, POST /tokenize and /detokenize."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Depends

from api.answering import INLINE_TOKENS
from api.auth import require_data
from api.errors import BadInput
from api.schemas.base import ERRORS
from api.schemas.openai import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from api.service import Service, Uses

T = TypeVar("T")

router = APIRouter(tags=["openai"], responses=ERRORS, dependencies=[Depends(require_data)])


@router.get("/v1/models")
async def models(service: Uses) -> ModelList:
    """The served model, and the adapters over it: each may be a request's `model`."""
    adapters = [_adapter_card(service, name) for name in sorted(service.weights.adapters)]
    return ModelList(data=[_card(service), *adapters])


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Uses) -> ModelCard:
    """The served model or an adapter, by its name."""
    adapter = await service.adapters.named(name)
    return _adapter_card(service, adapter) if adapter else _card(service)


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(body: TokenizeRequest, service: Uses) -> TokenizeResponse:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    await service.adapters.named(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadInput("send exactly one of prompt and messages")
    special = body.add_special_tokens
    if body.messages is not None:
        text = await service.model.chat_text(body.messages, **body.template_options())
        ids = await service.model.encode(text, add_special_tokens=bool(special))
    else:
        ids = await service.model.encode(body.prompt or "", add_special_tokens=special is not False)
    strings = None
    if body.return_token_strs:
        strings = await _off_loop(len(ids), lambda: [service.model.token_text(i) for i in ids])
    return TokenizeResponse(count=len(ids), max_model_len=service.model.max_model_len, tokens=ids, token_strs=strings)


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(body: DetokenizeRequest, service: Uses) -> DetokenizeResponse:
    """Text of token ids."""
    await service.adapters.named(body.model)
    if len(body.tokens) > service.model.max_model_len:
        raise BadInput(f"{len(body.tokens)} tokens; at most the model's context of {service.model.max_model_len}")
    service.model.check_ids(body.tokens, "tokens")
    tokenizer = service.model.text
    text = await _off_loop(len(body.tokens), lambda: tokenizer.decode(body.tokens, body.skip_special_tokens))
    return DetokenizeResponse(prompt=text, text=text)


async def _off_loop(tokens: int, work: Callable[[], T]) -> T:
    """What takes long is done on a thread."""
    return work() if tokens <= INLINE_TOKENS else await asyncio.to_thread(work)


def _card(service: Service) -> ModelCard:
    model = service.model
    return ModelCard(
        id=model.name,
        created=int(service.started),
        root=str(model.path),
        max_model_len=model.max_model_len,
        weight_version=service.versions.live,
        weight_digest=service.versions.live_digest,
    )


def _adapter_card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=int(service.started),
        root=name,
        parent=service.model.name,
        max_model_len=service.model.max_model_len,
        weight_version=str(service.weights.adapters[name]),
        weight_digest=service.weights.adapter_digest(name),
    )

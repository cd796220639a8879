"""POST /inference/v1/generate: vLLM's token-in token-out route, which prime-rl, verifiers and TRL speak."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api import logprobs as shapes
from api.answering import end_of, event, replied, streamed, usage, whole
from api.auth import require_data
from api.bad_words import banned
from api.constrained import constrained
from api.errors import BadInput
from api.generation import Ask, Job, Sample
from api.lanes import Words
from api.openapi import IF_ASKED
from api.schemas.base import ERRORS, MAX_TOP
from api.schemas.openai import StreamOptions
from api.schemas.tokens import TokenRequest, TokenResponse
from api.service import Service, SessionHeader, Uses
from worker.messages import Chunk

router = APIRouter(tags=["vllm"], responses=ERRORS, dependencies=[Depends(require_data)])


@router.post("/inference/v1/generate", response_model=TokenResponse, openapi_extra=IF_ASKED)
async def generate(body: TokenRequest, request: Request, service: Uses, x_session_id: SessionHeader = "") -> Response:
    """Continue token ids exactly as they are."""
    adapter = await service.adapters.named(body.model)
    wanted = body.sampling_params
    top_n = service.model.vocab_size if wanted.logprobs == -1 else wanted.logprobs or 0
    if top_n > MAX_TOP and not wanted.logprob_token_ids:
        raise BadInput(f"logprobs: -1 is {top_n}, the whole vocabulary; at most {MAX_TOP}", param="logprobs")
    if wanted.logprob_token_ids:
        top_n = len(wanted.logprob_token_ids) + 1
    params = wanted.params(
        # Ranks come with alternatives only, and an entry has its rank.
        logprobs=max(1, top_n) if wanted.logprobs is not None and not wanted.logprob_token_ids else 0,
        bad_words=await banned(wanted.bad_words, service.model),
        grammar=constrained(wanted.constraint, service.model),
    )
    ask = Ask(
        prompts=[body.token_ids],
        sampling=params,
        request_id=body.request_id or "",
        stream=bool(body.stream),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        adapter=adapter,
        session=body.session_id or x_session_id,
        min_version=body.min_weight_version,
        version_timeout_s=body.version_timeout_s,
        max_staleness=body.max_staleness,
        may_cut=wanted.max_tokens is None,
    )
    if body.stream:
        return streamed(service, [ask], _Events(body, service, top_n))
    job, samples = await whole(request, service, ask)

    def reply() -> dict[str, Any]:
        whole_reply = _envelope(job, [_choice(s, body, service, top_n) for s in samples[0]], service)
        return whole_reply | {"usage": usage(ask.prompts, samples)} | _prompt(body, samples[0][0], service)

    return await replied(samples, reply)


def _envelope(job: Job, choices: list[dict[str, Any]], service: Service) -> dict[str, Any]:
    newest = choices[-1]["weight_version"] if choices else service.versions.live
    return {
        "request_id": job.request_id,
        "model": job.ask.adapter or service.model.name,
        "choices": choices,
        "weight_version": newest,
    }


def _prompt(body: TokenRequest, first: Sample, service: Service) -> dict[str, Any]:
    return {
        "prompt_logprobs": shapes.prompt_by_id(first.prompt_logprobs, service.model),
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
    }


def _choice(part: Sample | Chunk, body: TokenRequest, service: Service, top_n: int) -> dict[str, Any]:
    wanted = body.sampling_params
    return {
        "index": part.index,
        "token_ids": part.token_ids,
        "finish_reason": part.finish,
        "stop_reason": part.stop_reason,
        "logprobs": shapes.by_id(part, top_n) if wanted.logprobs is not None or wanted.logprob_token_ids else None,
        "sampling_mask": part.masks if wanted.sampling_mask else None,
        "weight_version": service.versions.newest(part.spans),
        "weight_versions": service.versions.spans(part.spans),
    }


def _usage(job: Job, made: int | None = None) -> dict[str, Any]:
    return {"usage": usage(job.ask.prompts, [job.flights[0].samples], made)}


class _Events:
    """`Writer` of schemas.tokens.TokenResponse: one for each chunk."""

    def __init__(self, body: TokenRequest, service: Service, top_n: int) -> None:
        self._body = body
        self._service = service
        self._top_n = top_n
        self._options = body.stream_options or StreamOptions()
        self._opened = False
        self._made = 0  # tokens that were told

    def sample(self, job: Job, number: int, index: int) -> Words:
        """See Writer."""

        def said(chunk: Chunk) -> bytes:
            part = _envelope(job, [_choice(chunk, self._body, self._service, self._top_n)], self._service)
            if not self._opened:
                part |= _prompt(self._body, job.flights[0].samples[0], self._service)
                self._opened = True
            self._made += len(chunk.token_ids)
            return event(part | _usage(job, self._made) if self._options.running else part)

        def pattern(chunk: Chunk) -> bytes | None:
            if not self._opened or self._options.running:
                return None
            return event(_envelope(job, [_choice(chunk, self._body, self._service, self._top_n)], self._service))

        def passed(ids: Sequence[int]) -> None:
            self._made += len(ids)

        return Words(said, pattern, passed=passed)

    def end(self, job: Job) -> bytes:
        """See Writer: usage if wanted, then [DONE]."""
        return end_of(self._options, lambda: _envelope(job, [], self._service) | _usage(job))

"""What every data route does around its own names: wait for samples while the client is there, whole or as they come,
and count tokens."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.flight import Sample
from api.generation import Ask, Job
from api.replies import Json
from api.service import Service
from api.sse import TokenStream, Writer, while_connected


async def whole(request: Request, service: Service, ask: Ask) -> tuple[Job, list[list[Sample]]]:
    """Run a request to its end: the job, and its samples per prompt. Given up when the client goes away."""
    with service.generations.submit(ask) as job:
        return job, await while_connected(request.receive, job.samples())


def streamed(service: Service, asks: Sequence[Ask], writer: Writer) -> Response:
    """Run requests, and say what they get as they get it. Given up when the client goes away."""
    return TokenStream(asks, writer, service.generations, service.outlet, lambda: live_header(service))


INLINE_TOKENS = 1024
"""Replies with more tokens are written on a thread: a batch with logprobs takes seconds, and others want answers."""


async def replied(samples: Sequence[Sequence[Sample]], make: Callable[[], Any]) -> Response:
    """The JSON reply of what make() returns, with its X-Weight-Version. make must not change anything."""

    def written() -> Response:
        return Json(make(), headers=version_header(samples))

    tokens = sum(len(s.token_ids) + len(s.prompt_logprobs or ()) for of_prompt in samples for s in of_prompt)
    return written() if tokens <= INLINE_TOKENS else await asyncio.to_thread(written)


def usage(
    prompts: Sequence[Sequence[int]], samples: Sequence[Sequence[Sample]], made: int | None = None
) -> dict[str, Any]:
    """Token counts, as OpenAI has them. made: tokens that a stream has told of; None = all there are."""
    prompt = sum(map(len, prompts))
    completion = sum(len(s.token_ids) for of_prompt in samples for s in of_prompt) if made is None else made
    cached = sum(max((s.cached_tokens for s in of_prompt), default=0) for of_prompt in samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def live_header(service: Service) -> dict[str, str]:
    """X-Weight-Version of a stream: what is live as it begins; its events say what made each token."""
    live = service.weights.live
    return {} if live is None else {"x-weight-version": str(live.version)}


def version_header(samples: Sequence[Sequence[Sample]]) -> dict[str, str]:
    """X-Weight-Version: the newest version that made a token of the reply."""
    versions = [s.spans[-1].version for of_prompt in samples for s in of_prompt if s.spans]
    return {"x-weight-version": str(max(versions, default=0))}

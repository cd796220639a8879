"""What every data route does around its own names: wait for samples while the client is there, and count tokens."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from api.flight import Sample
from api.generation import Ask, Job
from api.service import Service
from api.sse import while_connected


async def whole(request: Request, service: Service, ask: Ask) -> tuple[Job, list[list[Sample]]]:
    """Run a request to its end: the job, and its samples per prompt. Given up when the client goes away."""
    with service.generations.submit(ask) as job:
        return job, await while_connected(request.receive, job.samples())


def usage(prompts: Sequence[Sequence[int]], samples: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Token counts, as OpenAI has them."""
    prompt = sum(map(len, prompts))
    completion = sum(len(sample.token_ids) for of_prompt in samples for sample in of_prompt)
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

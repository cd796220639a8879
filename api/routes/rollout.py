"""The native routes, /v1/rollout/...: ids or text in; ids, text, logprobs and version spans out; and control."""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from api.answering import DONE, HOLE, Frame, replied, streamed, usage, whole
from api.auth import require_admin, require_data
from api.bad_words import banned
from api.constrained import constrained
from api.errors import BadInput, Conflict, NotFound
from api.generation import Ask, Job, Sample
from api.lanes import Holes, Words
from api.model import Model
from api.openapi import IF_ASKED
from api.schemas import rollout as schema
from api.schemas.base import ERRORS, Count, Version
from api.schemas.inspection import ChecksumsResponse
from api.service import Service, SessionHeader, Uses
from api.text import StreamedText, TextOptions, final_text
from api.units import why_away
from worker.messages import Chunk, Span

router = APIRouter(prefix="/v1/rollout", tags=["rollout"], responses=ERRORS)
data = [Depends(require_data)]
admin = [Depends(require_admin)]


@router.post("/generate", dependencies=data, response_model=schema.GenerateResponse, openapi_extra=IF_ASKED)
async def generate(
    body: schema.GenerateRequest, request: Request, service: Uses, x_session_id: SessionHeader = ""
) -> Response:
    """Continue prompts. With `stream`, server-sent events of the same shape, ended by `data: [DONE]`."""
    prompts = await _prompt_ids(body, service.model)
    service.model.check_ids(body.stop_token_ids, "stop_token_ids")
    ask = Ask(
        prompts=prompts,
        sampling=body.sampling(*await _written(body, service.model)),
        request_id=body.request_id or "",
        stream=body.stream,
        priority=body.priority,
        cache_salt=body.cache_salt,
        adapter=await _adapter(body, service),
        session=body.session or x_session_id,
        min_version=body.min_weight_version,
        version_timeout_s=body.version_timeout_s,
        max_staleness=body.max_staleness,
    )
    options = TextOptions(body.skip_special_tokens, body.include_stop, tuple(ask.sampling.stop))
    if body.stream:
        return streamed(service, [ask], _Events(service.model, options))
    job, samples = await whole(request, service, ask)

    def reply() -> dict[str, Any]:
        outputs = [_whole(i, s, service.model, options) for i, of_prompt in enumerate(samples) for s in of_prompt]
        counted = usage(prompts, samples)
        del counted["prompt_tokens_details"]
        return _envelope(job, service.model, outputs) | {"usage": counted}

    return await replied(samples, reply)


@router.post("/score", dependencies=data)
async def score(
    body: schema.ScoreRequest, request: Request, service: Uses, x_session_id: SessionHeader = ""
) -> schema.ScoreResponse:
    """Logprobs of given tokens behind given prompts, bit by bit those that sampling them would report.

    Of a sample whose one span names the version that scores, they are the very numbers that came with it, where the
    replicas are deterministic (docs/numerics.md). `weight_version` may also be the version before the live one, until a
    push begins that needs its memory; then the reply is 409.
    """
    service.model.check_ids(body.stop_token_ids, "stop_token_ids")
    sampling = body.sampling(*await _written(body, service.model))
    wanted = body.weight_version
    ask = Ask(
        prompts=[prompt + tokens for prompt, tokens in zip(body.prompt_ids, body.token_ids, strict=True)],
        sampling=msgspec.structs.replace(sampling, max_tokens=0, prompt_logprobs=0),
        request_id=body.request_id or "",
        priority=body.priority,
        cache_salt=body.cache_salt,
        adapter=await _adapter(body, service),
        session=body.session or x_session_id,
        min_version=max(filter(None, (body.min_weight_version, _to_come(body, service))), default=None),
        version_timeout_s=body.version_timeout_s,
        score_from=[len(prompt) for prompt in body.prompt_ids],
        weight_version=wanted,
        weight_digest=body.weight_digest,
    )
    job, samples = await whole(request, service, ask)
    outputs = [_score(index, of_prompt[0]) for index, of_prompt in enumerate(samples)]
    prompt, completion = (sum(map(len, lists)) for lists in (body.prompt_ids, body.token_ids))
    usage = schema.Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
    return schema.ScoreResponse(
        request_id=job.request_id,
        model=service.model.name,
        logprobs_mode=service.config.logprobs_mode,
        outputs=outputs,
        usage=usage,
    )


def _to_come(body: schema.ScoreRequest, service: Service) -> int | None:
    """The version, if it has to be waited for. Raises Conflict for one that was live and is held no more."""
    live, status, wanted = service.weights.live, service.weights.status, body.weight_version
    before = status.previous if status else None
    is_before = before is not None and before.version == wanted and body.weight_digest in ("", before.digest)
    if wanted is None or is_before:  # which may be above, after a rollback
        return None
    if live is not None and live.version > wanted:
        other = f"{before.version} was before it" if before else "the one before it is held no more"
        raise Conflict(f"weight_version {wanted} is not here: {live.version} is live, and {other}")
    return wanted


def _score(index: int, scored: Sample) -> schema.Score:
    found, by = scored.prompt_logprobs, scored.spans[-1]
    assert scored.finish is not None, "whole samples have ended"
    return schema.Score(
        index=index,
        logprobs=None if found is None else [entries[0][1] for entries in found],
        weight_version=by.version,
        weight_digest=by.digest,
        adapter_version=by.adapter_version,
        adapter_digest=by.adapter_digest or None,
        finish_reason=scored.finish,
        cached_tokens=scored.cached_tokens,
    )


@router.post("/pause", dependencies=admin)
async def pause(service: Uses, body: schema.PauseRequest | None = None) -> schema.PauseState:
    """Stop stepping on every replica; requests that arrive are held. A lease resumes by itself."""
    body = body or schema.PauseRequest()
    await service.control.pause(
        body.mode, lease_s=body.lease_s, clear_cache=body.clear_cache, deadline_s=body.deadline_s
    )
    return _pause_state(service)


@router.post("/resume", dependencies=admin)
async def resume(service: Uses) -> schema.PauseState:
    """Go on. Idempotent."""
    await service.control.resume()
    return _pause_state(service)


@router.get("/pause", dependencies=data)
async def pause_state(service: Uses) -> schema.PauseState:
    """Whether and how the fleet is paused."""
    return _pause_state(service)


@router.post("/abort", dependencies=admin)
async def abort(service: Uses, body: schema.AbortRequest | None = None) -> schema.AbortResponse:
    """End requests by id, or all; each caller gets what its request has so far, with finish reason `abort`.

    Of several APIs all that are reached end theirs; `unreached` names the others. It can be said again.
    """
    ended = await service.generations.abort(body.request_ids if body else None)
    return schema.AbortResponse(aborted=ended.requests, unreached=list(ended.unreached))


@router.post("/memory/release", dependencies=admin)
async def release(service: Uses, body: schema.MemoryRequest | None = None) -> schema.MemoryResponse:
    """Release parameters and/or KV on every rank. Idempotent."""
    released = await service.control.clear(tuple((body or schema.MemoryRequest()).tags))
    return schema.MemoryResponse(released_bytes=released, cleared=sorted(service.fleet.intents.cleared))


@router.post("/memory/resume", dependencies=admin)
async def bring_back(service: Uses, body: schema.MemoryRequest | None = None) -> schema.MemoryResponse:
    """Bring back what was released, at the version that is live. Idempotent."""
    await service.control.reload(tuple((body or schema.MemoryRequest()).tags))
    return schema.MemoryResponse(cleared=sorted(service.fleet.intents.cleared))


@router.post("/prefix_cache/reset", dependencies=admin)
async def reset_prefix_cache(service: Uses) -> schema.PrefixCacheReset:
    """Forget cached prompt prefixes that no sequence holds."""
    return schema.PrefixCacheReset(empty=await service.control.reset_prefix_cache())


@router.get("/weights", dependencies=data)
async def weights(service: Uses) -> schema.WeightsResponse:
    """What is live, what is on its way, who holds what, and what went wrong last."""
    return _weights(service)


@router.get("/weights/wait", dependencies=data)
async def wait_for_version(
    service: Uses, version: Annotated[Version, Query()], timeout_s: Annotated[float, Query(gt=0, le=3600)] = 60.0
) -> schema.WeightsResponse:
    """Answer once this version or a later one is live; 409 after timeout_s."""
    await service.weights.wait_for_version(version, timeout_s=timeout_s)
    return _weights(service)


@router.post("/weights/load", dependencies=admin)
async def load(body: schema.LoadRequest, service: Uses) -> schema.LoadResponse:
    """Make a checkpoint directory live, all or nothing; replies when every replica serves it."""
    report = await service.weights.load(
        body.path, version=body.version, in_flight=body.in_flight, deadline_s=body.deadline_s, force=body.force
    )
    live = service.weights.live
    return schema.LoadResponse(version=report.get("version", live.version if live else None), report=report)


@router.post("/weights/abort", dependencies=admin)
async def abort_push(service: Uses, body: schema.WeightsAbortRequest | None = None) -> schema.Ok:
    """End the push in progress, whoever holds it; what is served does not change."""
    await service.weights.abort_session((body or schema.WeightsAbortRequest()).reason)
    return schema.Ok()


@router.post("/weights/verify", dependencies=admin)
async def verify(service: Uses) -> ChecksumsResponse:
    """Checksum what every rank really holds."""
    found = await service.control.verify()
    sums: dict[tuple[str, str], set[str]] = {}
    for ranks in found.values():
        for rank, parameters in ranks.items():
            for name, digest in parameters.items():
                sums.setdefault((rank, name), set()).add(digest)
    return ChecksumsResponse(
        replicas={str(replica): ranks for replica, ranks in found.items()},
        differing=sorted({name for (_, name), digests in sums.items() if len(digests) > 1}),
    )


@router.post("/replicas/{replica}/restart", dependencies=admin)
async def restart(replica: Count, service: Uses, body: schema.RestartRequest | None = None) -> schema.Ok:
    """Drain a replica, and start it anew; one that was given up is tried again now. Answers once it is ready.

    Requests that it has not finished in `drain_s` begin again elsewhere. 409 with the reason if it does not come back.
    """
    body = body or schema.RestartRequest()
    if replica not in {r.index for r in service.fleet.replicas}:
        raise NotFound(f"there is no replica {replica}")
    await service.units.restart(f"replica-{replica}", drain_s=body.drain_s, ready_s=body.ready_s)
    return schema.Ok()


@router.get("/apis", dependencies=data)
async def apis(service: Uses) -> schema.ApisResponse:
    """Where requests may be sent: here, and with `--ray` to the API of each node, which prefers its own replicas."""
    others = service.others.apis() if service.others is not None else {}
    found = {service.config.place: service.own_url} | others
    return schema.ApisResponse(apis=[schema.ApiPlace(place=place, url=url) for place, url in found.items()])


async def _prompt_ids(body: schema.GenerateRequest, model: Model) -> list[list[int]]:
    if body.prompt is not None:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        return await model.encode_all(texts, add_special_tokens=body.add_special_tokens)
    ids: list[Any] = body.prompt_ids or []
    if not ids:
        raise BadInput("prompt_ids is empty: send at least one token")
    return ids if isinstance(ids[0], list) else [ids]


async def _written(body: schema.GenerateRequest | schema.ScoreRequest, model: Model) -> tuple[list[list[int]], str]:
    """Bad words as ids, and the grammar of the constraint. Raises BadInput."""
    grammar = constrained(body.constraint.constraint if body.constraint else None, model)
    return await banned(body.bad_words, model), grammar


class _Events:
    """`Writer` of schemas.rollout.GenerateResponse: one for each chunk, with its one output."""

    def __init__(self, model: Model, options: TextOptions) -> None:
        self._model = model
        self._options = options

    def sample(self, job: Job, number: int, index: int) -> Words:
        """See Writer."""
        tokenizer, frame = self._model.tokenizer, Frame(_envelope(job, self._model, [HOLE]))
        texts = None if tokenizer is None else StreamedText(tokenizer, self._options)

        def event(chunk: Chunk) -> bytes:
            text = None if texts is None else texts.push(chunk.token_ids, chunk.finish, chunk.stop_reason)
            return frame.event(_output(number, chunk, text))

        def pattern(chunk: Chunk) -> bytes | None:
            if texts is not None and not texts.at_rest:
                return None
            return frame.event(_output(number, chunk, None if texts is None else Holes.text))

        return Words(event, pattern)

    def end(self, job: Job) -> bytes:
        """See Writer."""
        return DONE


class _Span(Struct):
    """schemas.rollout.Span, as it is written."""

    version: int
    start: int
    end: int
    recomputed: bool
    digest: str
    adapter_version: int | UnsetType = UNSET
    adapter_digest: str | UnsetType = UNSET


class _Output(Struct):
    """schemas.rollout.Output, as it is written."""

    prompt_index: int
    index: int
    token_ids: list[int]
    text: str | None
    logprobs: list[float]
    finish_reason: str | None
    stop_reason: int | str | None
    spans: list[_Span]
    cached_tokens: int
    adapter_version: int | UnsetType = UNSET
    top_logprobs: list[Any] | UnsetType = UNSET
    ranks: list[int] | UnsetType = UNSET
    sampling_masks: list[list[int]] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


def _whole(prompt_index: int, sample: Sample, model: Model, options: TextOptions) -> _Output:
    text = None
    if model.tokenizer is not None:
        text = final_text(model.tokenizer, sample.token_ids, sample.finish, sample.stop_reason, options)
    return _output(prompt_index, sample, text)


def _output(prompt_index: int, part: Sample | Chunk, text: str | None) -> _Output:
    spans = part.spans
    output = _Output(
        prompt_index,
        part.index,
        part.token_ids,
        text,
        part.logprobs,
        part.finish,
        part.stop_reason,
        [_span(s) for s in spans],
        part.cached_tokens,
    )
    if spans and (adapter_version := spans[-1].adapter_version) is not None:
        output.adapter_version = adapter_version
    if part.top:
        output.top_logprobs = [[{"token_id": i, "logprob": p} for i, p in tops] for tops in part.top]
        output.ranks = part.ranks
    if part.masks:
        output.sampling_masks = part.masks
    if part.prompt_logprobs is not None:
        output.prompt_logprobs = [
            [{"token_id": i, "logprob": p, "rank": r} for i, p, r in tops] for tops in part.prompt_logprobs
        ]
    return output


def _span(s: Span) -> _Span:
    if s.adapter_version is None:
        return _Span(s.version, s.start, s.end, s.recomputed, s.digest)
    return _Span(s.version, s.start, s.end, s.recomputed, s.digest, s.adapter_version, s.adapter_digest)


async def _adapter(body: schema.GenerateRequest | schema.ScoreRequest, service: Service) -> str:
    return await service.adapters.loaded(body.adapter, param="adapter") if body.adapter else ""


def _envelope(job: Job, model: Model, outputs: list[Any]) -> dict[str, Any]:
    """schemas.rollout.GenerateResponse as plain data."""
    envelope: dict[str, Any] = {"request_id": job.request_id, "model": model.name, "outputs": outputs}
    if job.ask.adapter:
        envelope["adapter"] = job.ask.adapter
    return envelope


def _pause_state(service: Service) -> schema.PauseState:
    paused, left = service.fleet.intents.paused, None
    if paused is not None and paused.lease_until != float("inf"):
        left = max(0.0, paused.lease_until - asyncio.get_running_loop().time())
    return schema.PauseState(
        paused=paused is not None,
        mode=paused.mode if paused else None,
        lease_left_s=left,
        held=service.fleet.held_everywhere,
    )


def _weights(service: Service) -> schema.WeightsResponse:
    status = service.weights.status
    by_store, given_up = status.replicas if status else {}, service.units.given_up()
    return schema.WeightsResponse(
        live=_version(status.live) if status else None,
        previous=_version(status.previous) if status else None,
        session=status.session if status else None,
        replicas=[
            schema.ReplicaWeights(
                replica=r.index,
                state=r.state,
                version=r.version,
                ready=r.serves(service.fleet.live),
                running=service.fleet.load_of(r),
                store=by_store.get(str(r.index)),
                kernels=r.stats.kernels if r.stats else "",
                reason=why_away(given_up, r.index) or r.reason,
                kernels_why=r.stats.kernels_why if r.stats else "",
                deterministic=r.stats.deterministic if r.stats else "",
            )
            for r in service.fleet.replicas
        ],
        last_error=status.last_error if status else None,
        last_push=status.last_push if status else None,
        history=status.history if status else [],
        store_connected=service.weights.link.up,
        relay=status.relay if status else None,
        ahead=status.ahead if status else None,
        lost=_version(status.lost) if status else None,
    )


def _version(live: Any) -> schema.LiveVersion | None:
    if live is None:
        return None
    return schema.LiveVersion(run_id=live.run_id, version=live.version, epoch=live.epoch, digest=live.digest)

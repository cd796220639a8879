"""POST /generate: SGLang's by `text` or `input_ids`, older TRL's by `prompts`."""

import contextlib
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import ValidationError
from starlette.responses import Response

from api import sglang_output
from api.answering import DONE, event, replied, streamed, while_connected
from api.auth import require_data
from api.bad_words import banned
from api.constrained import constrained
from api.constraint import Constraint
from api.errors import BadInput
from api.generation import Ask, Job, Sample
from api.lanes import Words
from api.openapi import IF_ASKED
from api.prompts import prompt_ids
from api.replies import explain
from api.schemas.base import ERRORS
from api.schemas.openai import COMPLETION_TOKENS
from api.schemas.sglang import LegacyTrlOutput, SglangGenerate, SglangOutput, SglangSampling
from api.schemas.vllm_sampling import VllmSampling
from api.service import Service, SessionHeader, Uses
from api.sglang_output import TextSoFar, Wanted
from worker.messages import Chunk

router = APIRouter(tags=["sglang"], responses=ERRORS, dependencies=[Depends(require_data)])


@router.post("/generate", response_model=SglangOutput | list[SglangOutput] | LegacyTrlOutput, openapi_extra=IF_ASKED)
async def generate(body: SglangGenerate, request: Request, service: Uses, x_session_id: SessionHeader = "") -> Response:
    """Continue one prompt or a batch. Several prompts, or n > 1, are answered with a list, prompt by prompt."""
    if body.prompts is not None:
        return await _legacy_trl(body, request, service)
    if (body.text is None) == (body.input_ids is None):
        raise BadInput("send exactly one of text, input_ids and prompts")
    given = body.text if body.text is not None else body.input_ids
    is_batch = bool(given) and isinstance(given, list) and not isinstance(given[0], int)
    prompts = await prompt_ids(given, service.model, add_special_tokens=True)
    wanted = [_wanted(body, i, len(prompts)) for i in range(len(prompts))]
    asks = [
        Ask(
            prompts=[ids],
            sampling=w.params(len(ids), constrained(w.sampling.constraint, service.model)),
            request_id=_rid(body, i, len(prompts)),
            batch=body.rid if isinstance(body.rid, str) and len(prompts) > 1 else "",
            stream=bool(body.stream),
            priority=body.priority or 0,
            cache_salt=w.cache_salt,
            adapter=await service.adapters.loaded(w.adapter, param="lora_path") if w.adapter else "",
            session=body.session_id or x_session_id,
            min_version=body.min_weight_version,
            version_timeout_s=body.version_timeout_s,
            max_staleness=body.max_staleness,
            may_cut="max_new_tokens" not in w.sampling.model_fields_set,
        )
        for i, (ids, w) in enumerate(zip(prompts, wanted, strict=True))
    ]
    as_list = is_batch or any(ask.sampling.n > 1 for ask in asks)
    if body.stream:
        return streamed(service, asks, _Events(asks, wanted, service, as_list))
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(service.generations.submit(ask)) for ask in asks]
        samples = await while_connected(request.receive, _all(jobs))

    def reply() -> Any:
        outputs = [
            sglang_output.output(job, w, sample, sglang_output.whole_text(w, sample, service.model), service)
            for job, w, of_job in zip(jobs, wanted, samples, strict=True)
            for sample in of_job
        ]
        return outputs if as_list else outputs[0]

    return await replied(samples, reply)


async def _all(jobs: list[Job]) -> list[list[Sample]]:
    return [(await job.samples())[0] for job in jobs]


def _wanted(body: SglangGenerate, i: int, count: int) -> Wanted:
    """What the batch's i-th prompt asked for; fields may be given once for all."""

    def pick(value: Any, default: Any) -> Any:
        if not isinstance(value, list):
            return default if value is None else value
        if len(value) != count:
            raise BadInput(f"a list of {len(value)} values came with {count} prompts")
        return value[i]

    return Wanted(
        sampling=pick(body.sampling_params, None) or SglangSampling(),
        logprobs=pick(body.return_logprob, False),
        logprobs_from=pick(body.logprob_start_len, -1),
        top_n=pick(body.top_logprobs_num, 0),
        texts=bool(body.return_text_in_logprobs),
        cache_salt=pick(body.cache_salt, ""),
        adapter=pick(body.lora_path, "") or "",
        ids=tuple(body.token_ids_logprob or ()),
    )


def _rid(body: SglangGenerate, i: int, count: int) -> str:
    if isinstance(body.rid, list):
        if len(body.rid) != count:
            raise BadInput(f"{len(body.rid)} rids came with {count} prompts")
        return body.rid[i]
    return f"{body.rid}_{i}" if body.rid and count > 1 else body.rid or ""


class _Events:
    """`Writer`: an event holds a sample as it is so far, with text, ids and logprobs from the beginning."""

    def __init__(self, asks: list[Ask], wanted: list[Wanted], service: Service, as_list: bool) -> None:
        self._wanted = wanted
        self._service = service
        self._starts = [sum(ask.sampling.n for ask in asks[:i]) for i in range(len(asks))] if as_list else None

    def sample(self, job: Job, number: int, index: int) -> Words:
        """See Writer: jobs have one prompt each."""
        wanted = self._wanted[number]
        text = TextSoFar(wanted, self._service.model)

        def said(chunk: Chunk) -> bytes:
            sample = job.flights[0].samples[index]
            output = sglang_output.output(job, wanted, sample, text.of(sample), self._service)
            if self._starts is not None:
                output["index"] = self._starts[number] + index
            return event(output)

        return Words(said)

    def end(self, job: Job) -> bytes:
        """See Writer."""
        return DONE


async def _legacy_trl(body: SglangGenerate, request: Request, service: Service) -> Response:
    fields = {name: getattr(body, name) for name in ("n", "temperature", "top_p", "top_k", "min_p", "max_tokens")}
    fields |= {"repetition_penalty": body.repetition_penalty} | (body.generation_kwargs or {})
    may_cut = fields["max_tokens"] is None
    fields["max_tokens"] = COMPLETION_TOKENS if may_cut else fields["max_tokens"]
    prompts = await prompt_ids(body.prompts, service.model, add_special_tokens=True)
    try:
        asked = VllmSampling.model_validate(fields)
    except ValidationError as error:
        raise BadInput(f"generation_kwargs: {explain(error.errors())}") from None
    regex = body.structured_outputs_regex or body.guided_decoding_regex
    sampling = asked.params(
        logprobs=0,
        bad_words=await banned(asked.bad_words, service.model),
        grammar=constrained(Constraint("regex", regex) if regex else asked.constraint, service.model),
    )
    ask = Ask(prompts=prompts, sampling=sampling, may_cut=may_cut)
    with service.generations.submit(ask) as job:
        samples = await while_connected(request.receive, job.samples())
    flat = [sample for of_prompt in samples for sample in of_prompt]
    return await replied(
        samples,
        lambda: {
            "prompt_ids": prompts,
            "completion_ids": [sample.token_ids for sample in flat],
            "logprobs": [sample.logprobs for sample in flat],
            "weight_version": service.versions.newest(flat[-1].spans),
            "weight_versions": [service.versions.spans(sample.spans) for sample in flat],
        },
    )

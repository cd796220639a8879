"""POST /v1/completions, OpenAI's with vLLM's extras."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api import logprobs as shapes
from api.answering import end_of, event, replied, streamed, usage, whole
from api.auth import require_data
from api.bad_words import banned
from api.constrained import constrained
from api.generation import Ask, Job, Sample
from api.lanes import Holes, Words
from api.logprobs import TextOffsets, TokenNames
from api.openapi import IF_ASKED
from api.prompts import prompt_ids, truncated
from api.schemas.base import ERRORS
from api.schemas.openai import COMPLETION_TOKENS, CompletionRequest, CompletionResponse
from api.service import Service, SessionHeader, Uses
from api.text import StreamedText, TextOptions, final_text
from worker.messages import Chunk

router = APIRouter(tags=["openai"], responses=ERRORS, dependencies=[Depends(require_data)])


@router.post("/v1/completions", response_model=CompletionResponse, openapi_extra=IF_ASKED)
async def completions(
    body: CompletionRequest, request: Request, service: Uses, x_session_id: SessionHeader = ""
) -> Response:
    """Continue prompts; choices come prompt by prompt. Token ids are exactly the sampled ones."""
    ask = await asked(body, service, session=body.session_id or x_session_id)
    prompts = ask.prompts
    writer = _Writer(body, service, prompts, ask)
    if body.stream:
        return streamed(service, [ask], writer)
    job, samples = await whole(request, service, ask)

    def reply() -> dict[str, Any]:
        choices = [writer.choice(i, s, of_prompt[0]) for i, of_prompt in enumerate(samples) for s in of_prompt]
        return writer.envelope(job, choices) | {"usage": usage(prompts, samples)}

    return await replied(samples, reply)


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or isinstance(prompt[0], str)


async def asked(body: CompletionRequest, service: Service, *, session: str = "") -> Ask:
    """What a body asks for: as many prompts as it has. Raises BadInput, NotFound."""
    adapter = await service.adapters.named(body.model, body.lora_path)
    prompts = await prompt_ids(body.prompt, service.model, add_special_tokens=body.add_special_tokens)
    prompts = await truncated(
        prompts,
        service.model,
        body.truncate_prompt_tokens,
        body.truncation_side,
        special=body.add_special_tokens and _is_text(body.prompt),
    )
    echo_logprobs = body.logprobs if body.echo else None
    return Ask(
        prompts=prompts,
        sampling=body.params(
            logprobs=body.logprobs or 0,
            bad_words=await banned(body.bad_words, service.model),
            grammar=constrained(body.constraint, service.model),
            max_tokens=COMPLETION_TOKENS if body.max_tokens is None else None,
            prompt_logprobs=body.prompt_logprobs if body.prompt_logprobs is not None else echo_logprobs,
        ),
        request_id=body.request_id or body.rid or "",
        stream=bool(body.stream),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        adapter=adapter,
        session=session,
        min_version=body.min_weight_version,
        version_timeout_s=body.version_timeout_s,
        max_staleness=body.max_staleness,
        may_cut=body.max_tokens is None,
    )


@dataclass
class _Writer:
    """Writes one request's reply, whole or as a `Writer`: one event for each chunk."""

    body: CompletionRequest
    service: Service
    prompts: list[list[int]]
    ask: Ask

    def __post_init__(self) -> None:
        self.model = self.service.model
        self.created = int(time.time())
        self.names = TokenNames(self.model, as_ids=bool(self.body.return_tokens_as_token_ids))
        skip = self.body.skip_special_tokens is not False
        stops = tuple(self.ask.sampling.stop)
        keep = bool(self.body.include_stop_str_in_output or self.body.no_stop_trim)
        self.options = TextOptions(skip, keep, stops)
        self.made = 0  # tokens that were told

    def envelope(self, job: Job, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """What surrounds choices."""
        newest = choices[-1]["weight_version"] if choices else self.service.versions.live
        return {
            "id": job.request_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.ask.adapter or self.model.name,
            "choices": choices,
            "weight_version": newest,
        }

    def choice(self, prompt_index: int, sample: Sample, first: Sample) -> dict[str, Any]:
        """A finished sample. first: the prompt's sample 0, which has its logprobs."""
        text = ""
        if self.model.tokenizer is not None:
            text = final_text(self.model.tokenizer, sample.token_ids, sample.finish, sample.stop_reason, self.options)
        prompt_text = self._echoed(prompt_index)
        return self._part(prompt_index, sample, prompt_text + text, self._offsets(prompt_text), first, begins=True)

    def sample(self, job: Job, number: int, index: int) -> Words:
        """See Writer."""
        tokenizer, echoed, wanted = self.model.tokenizer, self._echoed(number), self.body.stream_options
        offsets, begins = self._offsets(echoed), True
        texts = None if tokenizer is None else StreamedText(tokenizer, self.options)

        def said(chunk: Chunk) -> bytes:
            nonlocal begins
            text = echoed if begins else ""
            if texts is not None:
                text += texts.push(chunk.token_ids, chunk.finish, chunk.stop_reason)
            first = job.flights[number].samples[0]
            part = self._part(number, chunk, text, offsets, first, begins=begins)
            begins = False
            self.made += len(chunk.token_ids)
            counted = self._usage(job, self.made) if wanted is not None and wanted.running else {}
            return event(self.envelope(job, [part]) | counted)

        def pattern(chunk: Chunk) -> bytes | None:
            whole = offsets.at_rest and (texts is None or texts.at_rest)
            if begins or not whole or (wanted is not None and wanted.running):
                return None
            text, first = "" if texts is None else Holes.text, job.flights[number].samples[0]
            return event(self.envelope(job, [self._part(number, chunk, text, offsets, first, begins=False)]))

        def passed(ids: Sequence[int]) -> None:
            offsets.of(ids)
            self.made += len(ids)

        return Words(said, pattern, lambda: offsets.at, passed)

    def end(self, job: Job) -> bytes:
        """See Writer: usage if wanted, then [DONE]."""
        return end_of(self.body.stream_options, lambda: self.envelope(job, []) | self._usage(job))

    def _usage(self, job: Job, made: int | None = None) -> dict[str, Any]:
        return {"usage": usage(self.prompts, [flight.samples for flight in job.flights], made)}

    def _echoed(self, prompt_index: int) -> str:
        """The prompt's text, if it is wanted before the sample's."""
        if not self.body.echo or self.model.tokenizer is None:
            return ""
        return self.model.tokenizer.decode(self.prompts[prompt_index], self.options.skip_special_tokens)

    def _offsets(self, before: str) -> TextOffsets:
        return TextOffsets(self.model, skip_special=self.options.skip_special_tokens, start=len(before))

    def _part(
        self, prompt_index: int, part: Sample | Chunk, text: str, offsets: TextOffsets, first: Sample, *, begins: bool
    ) -> dict[str, Any]:
        body, ids = self.body, self.prompts[prompt_index]
        choice: dict[str, Any] = {
            "index": prompt_index * self.ask.sampling.n + part.index,
            "text": text,
            "finish_reason": part.finish,
            "stop_reason": part.stop_reason,
            "logprobs": None,
            "weight_version": self.service.versions.newest(part.spans),
            "weight_versions": self.service.versions.spans(part.spans),
        }
        if body.logprobs is not None:
            made = shapes.completion(part, self.names, offsets)
            if body.echo and begins and first.prompt_logprobs is not None:
                made = shapes.joined(
                    shapes.completion_prompt(ids, first.prompt_logprobs, self.names, self._offsets("")), made
                )
            choice["logprobs"] = made
        if body.return_token_ids:
            choice["token_ids"] = part.token_ids
            if begins:
                choice["prompt_token_ids"] = ids
        if body.prompt_logprobs is not None and begins:
            choice["prompt_logprobs"] = shapes.prompt_by_id(first.prompt_logprobs, self.model)
        return choice

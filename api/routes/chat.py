"""POST /v1/chat/completions, OpenAI's with vLLM's extras. Conversations are written by the checkpoint's template."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api import logprobs as shapes
from api.answering import end_of, event, replied, streamed, usage, whole
from api.auth import require_data
from api.bad_words import banned
from api.constrained import of_chat
from api.errors import BadInput
from api.generation import Ask, Job, Sample
from api.lanes import Holes, Words
from api.logprobs import TokenNames
from api.model import Model
from api.openapi import IF_ASKED
from api.prompts import truncated
from api.reading.calls import FORMATS, MARKS
from api.reading.message import MessageStream, Reading, whole_message
from api.reading.thinking import opened_by
from api.schemas.base import ERRORS
from api.schemas.openai import ChatRequest, ChatResponse, ChatTokensRequest, NamedTool
from api.service import Service, SessionHeader, Uses
from api.text import StreamedText, TextOptions, final_text
from worker.messages import Chunk

router = APIRouter(tags=["openai"], responses=ERRORS, dependencies=[Depends(require_data)])

CHUNK = "chat.completion.chunk"
_TAIL = 64
"""Tokens of a prompt that say whether its answer begins inside reasoning."""


@router.post("/v1/chat/completions", response_model=ChatResponse, openapi_extra=IF_ASKED)
async def chat_completions(
    body: ChatRequest, request: Request, service: Uses, x_session_id: SessionHeader = ""
) -> Response:
    """Answer a conversation. Token ids are exactly the sampled ones."""
    return await _answered(body, request, service, await asked(body, service, session=body.session_id or x_session_id))


@router.post("/v1/chat/completions/tokens", response_model=ChatResponse, openapi_extra=IF_ASKED)
async def chat_completions_of_tokens(
    body: ChatTokensRequest, request: Request, service: Uses, x_session_id: SessionHeader = ""
) -> Response:
    """Chat completions with the prompt as token ids, as prime-rl and verifiers go on from what was sampled before."""
    return await _answered(body, request, service, await asked(body, service, session=body.session_id or x_session_id))


async def _answered(body: ChatRequest, request: Request, service: Service, ask: Ask) -> Response:
    (ids,) = ask.prompts
    writer = _Writer(body, service, ids, ask)
    if body.stream:
        return streamed(service, [ask], writer)
    job, samples = await whole(request, service, ask)

    def reply() -> dict[str, Any]:
        whole_reply = writer.envelope(job, "chat.completion", [writer.choice(s) for s in samples[0]])
        return whole_reply | {"usage": usage([ids], samples)} | writer.prompt(samples[0][0])

    return await replied(samples, reply)


async def asked(body: ChatRequest, service: Service, *, session: str = "") -> Ask:
    """What a body asks for: one prompt, as the template writes the conversation. Raises BadInput, NotFound."""
    adapter = await service.adapters.named(body.model, body.lora_path)
    if body.may_call and service.model.tool_format is None:
        raise BadInput(
            'tool_choice: calls of tools are not read out of the text here; send "none" to have the tools in the '
            "prompt and read the calls yourself, or serve with --tool-call-parser",
            param="tool_choice",
        )
    if isinstance(body, ChatTokensRequest):
        ids = body.tokens
        text = service.model.text.decode(ids[-_TAIL:], skip_special=False)
    else:
        text = await service.model.chat_text(body.messages, **body.template_options())
        ids = await service.model.encode(text, add_special_tokens=body.add_special_tokens)
    (ids,) = await truncated(
        [ids],
        service.model,
        body.truncate_prompt_tokens,
        body.truncation_side,
        special=body.add_special_tokens,
    )
    return Ask(
        prompts=[ids],
        prompt_text=text,
        sampling=body.params(
            logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
            max_tokens=body.max_completion_tokens,
            bad_words=await banned(body.bad_words, service.model),
            grammar=of_chat(body, service.model, opened=_opened(body, service.model, text)),
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
        may_cut=body.max_tokens is None and body.max_completion_tokens is None,
    )


@dataclass
class _Writer:
    """Writes one request's reply, whole or as a `Writer`: one event for each chunk."""

    body: ChatRequest
    service: Service
    ids: list[int]
    ask: Ask

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.names = TokenNames(self.service.model, as_ids=bool(self.body.return_tokens_as_token_ids))
        skip = self.body.skip_special_tokens is not False
        stops = tuple(self.ask.sampling.stop)
        keep = bool(self.body.include_stop_str_in_output or self.body.no_stop_trim)
        self.reading = _reading(self.body, self.service.model, self.ask.prompt_text)
        self.options = TextOptions(skip, keep, stops, frozenset(MARKS) if self.reading.anything else frozenset())
        self.made = 0  # tokens that were told

    def envelope(self, job: Job, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """What surrounds choices."""
        return {
            "id": job.request_id,
            "object": kind,
            "created": self.created,
            "model": self.ask.adapter or self.service.model.name,
            "choices": choices,
            "weight_version": choices[-1]["weight_version"] if choices else self.service.versions.live,
        }

    def prompt(self, first: Sample) -> dict[str, Any]:
        """What was asked for about the prompt."""
        about: dict[str, Any] = {}
        if self.body.return_token_ids:
            about["prompt_token_ids"] = self.ids
        if self.body.return_prompt_text:
            about["prompt_text"] = self.ask.prompt_text
        if self.body.prompt_logprobs is not None:
            about["prompt_logprobs"] = shapes.prompt_by_id(first.prompt_logprobs, self.service.model)
        return about

    def choice(self, sample: Sample) -> dict[str, Any]:
        """A finished sample."""
        tokenizer = self.service.model.text
        ended = sample.token_ids, sample.finish, sample.stop_reason
        if not self.reading.anything:
            message = {"role": "assistant", "content": final_text(tokenizer, *ended, self.options)}
            return {"message": message} | self._part(sample)
        message = whole_message(self.reading, StreamedText(tokenizer, self.options), *ended)
        return {"message": message} | self._part(sample, called=bool(message.get("tool_calls")))

    def sample(self, job: Job, number: int, index: int) -> Words:
        """See Writer: the role goes before what a sample says first."""
        message = MessageStream(self.reading, StreamedText(self.service.model.text, self.options))
        wanted, begins = self.body.stream_options, True

        def said(chunk: Chunk) -> bytes:
            nonlocal begins
            opening, begins = self._opening(job, chunk) if begins else b"", False
            self.made += len(chunk.token_ids)
            delta = message.push(chunk.token_ids, chunk.finish, chunk.stop_reason)
            counted = self._usage(job, self.made) if wanted is not None and wanted.running else {}
            part = self._part(chunk, called=message.calls > 0)
            return opening + event(self.envelope(job, CHUNK, [{"delta": delta} | part]) | counted)

        def pattern(chunk: Chunk) -> bytes | None:
            if begins or not message.at_rest or (wanted is not None and wanted.running):
                return None
            choice = {"delta": {"content": Holes.text}} | self._part(chunk)
            return event(self.envelope(job, CHUNK, [choice]))

        def passed(ids: Sequence[int]) -> None:
            self.made += len(ids)

        return Words(said, pattern, passed=passed)

    def _opening(self, job: Job, chunk: Chunk) -> bytes:
        first = [msgspec.structs.replace(span, start=0, end=0, recomputed=False) for span in chunk.spans[-1:]]
        opening: dict[str, Any] = {
            "index": chunk.index,
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
            "weight_version": self.service.versions.newest(first),
            "weight_versions": self.service.versions.spans(first),
        }
        return event(self.envelope(job, CHUNK, [opening]) | self.prompt(job.flights[0].samples[0]))

    def end(self, job: Job) -> bytes:
        """See Writer: usage if wanted, then [DONE]."""
        return end_of(self.body.stream_options, lambda: self.envelope(job, CHUNK, []) | self._usage(job))

    def _usage(self, job: Job, made: int | None = None) -> dict[str, Any]:
        return {"usage": usage([self.ids], [job.flights[0].samples], made)}

    def _part(self, part: Sample | Chunk, *, called: bool = False) -> dict[str, Any]:
        """called: its message calls tools. Then that is why it ended, but where the request named the tool."""
        of_itself = part.finish == "stop" and called and not isinstance(self.body.tool_choice, NamedTool)
        choice: dict[str, Any] = {
            "index": part.index,
            "finish_reason": "tool_calls" if of_itself else part.finish,
            "stop_reason": part.stop_reason,
            "logprobs": None,
            "weight_version": self.service.versions.newest(part.spans),
            "weight_versions": self.service.versions.spans(part.spans),
        }
        if self.body.logprobs:
            asked = self.body.logprob_token_ids
            top_n = len(asked) + 1 if asked else self.body.top_logprobs or 0
            choice["logprobs"] = shapes.chat(part, self.names, top_n)
        if self.body.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice


def _opened(body: ChatRequest, model: Model, prompt: str) -> bool | None:
    """Whether the answer begins inside reasoning; None: the model does not reason."""
    if not model.reasons:
        return None
    return model.always_reasons or opened_by(prompt, continued=body.continue_final_message)


def _reading(body: ChatRequest, model: Model, prompt: str) -> Reading:
    """What is read out of this request's answers. prompt: as the template wrote it."""
    calls = FORMATS[model.tool_format] if body.may_call and model.tool_format is not None else None
    tools = body.tools or []
    return Reading(
        calls=None if calls is None else lambda: calls(tools),
        opened=None if body.separate_reasoning is False else _opened(body, model, prompt),
        show_reasoning=body.include_reasoning is not False,
        at_once=body.stream_reasoning is False,
        most_calls=1 if body.parallel_tool_calls is False else None,
    )

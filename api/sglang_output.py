"""One sample in SGLang's shape."""

import time
from dataclasses import dataclass
from typing import Any

from api.errors import BadInput
from api.generation import Job, Sample
from api.model import Model
from api.schemas.sglang import SglangSampling
from api.schemas.vllm_sampling import stops_of
from api.service import Service
from api.text import StreamedText, TextOptions, final_text
from worker.messages import SamplingParams


@dataclass(frozen=True)
class Wanted:
    """What one prompt of a batch asked for. logprobs_from: first prompt token with a logprob, -1 = none."""

    sampling: SglangSampling
    logprobs: bool
    logprobs_from: int
    top_n: int
    texts: bool
    cache_salt: str = ""
    adapter: str = ""
    ids: tuple[int, ...] = ()

    @property
    def text_options(self) -> TextOptions:
        """How the text is wanted."""
        sampling = self.sampling
        stops = tuple(stops_of(sampling.stop))
        return TextOptions(sampling.skip_special_tokens is not False, bool(sampling.no_stop_trim), stops)

    def params(self, prompt_tokens: int, grammar: str) -> SamplingParams:
        """As the worker wants it. grammar: of what the output is constrained to."""
        of_prompt = self.logprobs and 0 <= self.logprobs_from < prompt_tokens
        top_n = self.top_n if self.logprobs else 0
        ids = list(self.ids) if self.logprobs else []
        if ids and (top_n or of_prompt):
            raise BadInput(
                "token_ids_logprob: of output tokens only, and not with top_logprobs_num; ask for one of them",
                param="token_ids_logprob",
            )
        of_prompt_n = top_n if of_prompt else None
        return self.sampling.params(top_n=top_n, prompt_logprobs=of_prompt_n, ids=ids, grammar=grammar)


class TextSoFar:
    """Text of a sample that grows: without the half of a character, and without what may become a stop string."""

    def __init__(self, wanted: Wanted, model: Model) -> None:
        self._stream = StreamedText(model.tokenizer, wanted.text_options) if model.tokenizer is not None else None
        self._text = ""
        self._tokens = 0

    def of(self, sample: Sample) -> str:
        """All of it; call once after a sample has ended."""
        if self._stream is not None:
            new = sample.token_ids[self._tokens :]
            self._text += self._stream.push(new, sample.finish, sample.stop_reason)
            self._tokens += len(new)
        return self._text


def whole_text(wanted: Wanted, sample: Sample, model: Model) -> str:
    """Text of a finished sample."""
    if model.tokenizer is None:
        return ""
    return final_text(model.tokenizer, sample.token_ids, sample.finish, sample.stop_reason, wanted.text_options)


def output(job: Job, wanted: Wanted, sample: Sample, text: str, service: Service) -> dict[str, Any]:
    """schemas.sglang.SglangOutput as plain data; an unfinished sample has finish_reason null."""
    flight, model = job.flights[0], service.model
    meta: dict[str, Any] = {
        "id": job.request_id,
        "finish_reason": _finish(sample, model),
        "prompt_tokens": len(flight.request.prompt_ids),
        "completion_tokens": len(sample.token_ids),
        "cached_tokens": sample.cached_tokens,
        "weight_version": service.versions.newest(sample.spans),
        "weight_versions": service.versions.spans(sample.spans),
        "e2e_latency": time.monotonic() - flight.started,
    }
    if wanted.logprobs:
        meta |= _logprobs(wanted, sample, flight.samples[0], flight.request.prompt_ids, model)
    return {"text": text, "output_ids": sample.token_ids, "meta_info": meta}


def _finish(sample: Sample, model: Model) -> dict[str, Any] | None:
    match sample.finish:
        case None:
            return None
        case "stop":
            matched = sample.stop_reason
            if matched is None and sample.token_ids and sample.token_ids[-1] in model.ends:
                matched = sample.token_ids[-1]
            return {"type": "stop", "matched": matched}
        case "length":
            return {"type": "length", "length": len(sample.token_ids)}
        case reason:
            return {"type": reason, "message": sample.error or "aborted"}


def _logprobs(wanted: Wanted, sample: Sample, first: Sample, prompt: list[int], model: Model) -> dict[str, Any]:
    def entry(logprob: float | None, token_id: int) -> list[Any]:
        return [logprob, token_id, model.token_text(token_id) if wanted.texts and model.tokenizer else None]

    made: dict[str, Any] = {
        "output_token_logprobs": [entry(p, i) for p, i in zip(sample.logprobs, sample.token_ids, strict=True)],
        "input_token_logprobs": [],
    }
    if wanted.ids:
        asked = [dict(top) for top in sample.top]
        made["output_token_ids_logprobs"] = [[entry(of[i], i) for i in wanted.ids] for of in asked]
    if wanted.top_n:
        made["output_top_logprobs"] = [[entry(p, i) for i, p in top] for top in sample.top]
        made["input_top_logprobs"] = []
    if first.prompt_logprobs is not None:
        start = wanted.logprobs_from
        found = first.prompt_logprobs[start:]  # of the tokens after `start`, which itself has none here
        made["input_token_logprobs"] = [entry(None, prompt[start])] + [entry(c[0][1], c[0][0]) for c in found]
        if wanted.top_n:
            made["input_top_logprobs"] = [None] + [[entry(p, i) for i, p, _ in c[: wanted.top_n]] for c in found]
    return made

"""Sampling as OpenAI's and vLLM's clients say it: every field may be missing or null."""

from typing import Annotated

from pydantic import Field

from api.schemas.base import (
    MAX_BIASED,
    Count,
    Finite,
    Ids,
    LogitBias,
    RepetitionPenalty,
    RequestId,
    Scheduled,
    Seed,
    Texts,
    TopN,
    sampling_params,
)
from api.schemas.structured import Structured
from worker.messages import SamplingParams

TOP_K_OFF = 100_000_000
"""What some clients send for "off"; so do 0 and -1."""
Stop = str | Texts | None


def top_k_of(top_k: int | None) -> int:
    """top_k as the worker takes it: 0 = off, whichever way the client said that."""
    return top_k if top_k is not None and 0 < top_k < TOP_K_OFF else 0


def stops_of(stop: Stop) -> list[str]:
    """Stop strings as a list, whether one or several were sent; empty ones are left out, as they stop nothing."""
    return [s for s in ([stop] if isinstance(stop, str) else stop or []) if s]


class VllmSampling(Structured):
    """Mixed into the bodies of /v1/completions and /v1/chat/completions, and on its own in /inference/v1/generate."""

    generates = True

    n: Annotated[int, Field(ge=1, le=1024)] | None = 1
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    repetition_penalty: RepetitionPenalty | None = 1.0
    presence_penalty: Annotated[Finite, Field(ge=-100, le=100)] | None = 0.0
    frequency_penalty: Annotated[Finite, Field(ge=-100, le=100)] | None = 0.0
    seed: Seed | None = None
    max_tokens: Count | None = None
    """None: whatever fits the context, but 16 on /v1/completions. More than fits is a 400."""
    min_tokens: Count | None = 0
    stop: Stop = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    logit_bias: LogitBias | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Texts | None = None
    """Words that do not come out in the tokens that the tokenizer spells them with."""
    logprob_token_ids: Annotated[Ids, Field(max_length=MAX_BIASED)] | None = None
    """With logprobs: report these ids instead of the most likely ones."""
    prompt_logprobs: TopN | None = None

    def params(self, *, logprobs: int, bad_words: list[list[int]], grammar: str, **read: int | None) -> SamplingParams:
        """The sampling as the worker takes it. logprobs: likeliest ids to report. bad_words: their token ids. grammar:
        what the output is held to, "" = nothing. read: max_tokens or prompt_logprobs, where the route reads others.
        """
        read = {name: value for name, value in read.items() if value is not None}
        top_k, stop = top_k_of(self.top_k), stops_of(self.stop)
        edits = {"bad_words": bad_words, "grammar": grammar}
        return sampling_params(self, top_k=top_k, stop=stop, logprobs=logprobs, **edits, **read)


class Scheduling(Scheduled):
    """How a request is run, on every data route of this dialect."""

    model: str | None = None
    """May be left out: the service serves one model, and knows it by the names in /v1/models and api.model_aliases."""
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

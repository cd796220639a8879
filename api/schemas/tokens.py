"""Bodies of /inference/v1/generate: token ids in, token ids out."""

from typing import Annotated

from pydantic import Field

from api.schemas.base import MAX_TOP, Ids, Lenient
from api.schemas.openai import PromptLogprobs, StreamOptions, Usage, VersionSpan
from api.schemas.vllm_sampling import Scheduling, VllmSampling
from worker.messages import FinishReason


class TokenSampling(VllmSampling):
    """`sampling_params` of /inference/v1/generate."""

    logprobs: Annotated[int, Field(ge=-1, le=MAX_TOP)] | None = None
    """Top alternatives per token; None = no logprobs at all, -1 = the whole vocabulary, where that is 128 at most."""
    sampling_mask: bool | None = False
    """An extension of ours: also report the ids that a grammar, top-k, top-p and min-p left open."""


class TokenRequest(Scheduling):
    """Body of /inference/v1/generate: token ids to continue, and how."""

    token_ids: Annotated[Ids, Field(min_length=1)]
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class TokenTop(Lenient):
    """One alternative."""

    token: str
    token_id: int
    logprob: float


class TokenEntry(TokenTop):
    """One sampled token; rank 1 = it was the most likely."""

    rank: int | None
    top_logprobs: list[TokenTop]


class TokenLogprobs(Lenient):
    """Exactly one entry per token."""

    content: list[TokenEntry]


class TokenChoice(Lenient):
    """One sample."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None
    sampling_mask: list[list[int]] | None = None
    weight_version: str
    weight_versions: list[VersionSpan]


class TokenResponse(Lenient):
    """Answer of /inference/v1/generate. Each event of a stream is one, too; its choices hold what is new."""

    request_id: str
    model: str
    choices: list[TokenChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    weight_version: str

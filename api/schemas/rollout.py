"""Bodies of the native routes, /v1/rollout/..."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from api.schemas.base import (
    Count,
    Finite,
    Ids,
    LogitBias,
    ManyIds,
    Names,
    Priority,
    RepetitionPenalty,
    RequestId,
    Seed,
    Strict,
    Texts,
    TopN,
    Version,
    sampling_params,
)
from api.schemas.structured import NativeConstraint
from worker.messages import FinishReason, PauseMode, SamplingParams

Probability = Annotated[float, Field(gt=0, le=1)]


class _Edits(Strict):
    """What changes the distribution that tokens are drawn from, beside a temperature and what it is cut to."""

    min_tokens: Count = 0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Finite = Field(default=0.0, ge=-100, le=100)
    frequency_penalty: Finite = Field(default=0.0, ge=-100, le=100)
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: Ids | None = None
    bad_words: Texts = Field(default_factory=list)
    """Words that do not come out in the tokens that the tokenizer spells them with."""
    constraint: NativeConstraint | None = None
    """What the output is held to: a JSON schema, a regular expression, some texts, or a grammar."""
    stop_token_ids: Ids = Field(default_factory=list)
    ignore_eos: bool = False

    def sampling(self, bad_words: list[list[int]], grammar: str) -> SamplingParams:
        """The sampling as the worker takes it. bad_words: their token ids. grammar: that of the constraint, ""
        = none.
        """
        return sampling_params(self, bad_words=bad_words, grammar=grammar)


class _Request(_Edits):
    """How a request is run, whether it generates or scores."""

    request_id: RequestId | None = None
    """A name by which /v1/rollout/abort finds the request. A request with the id of one that still runs joins that."""
    session: str = Field(default="", max_length=256)
    """Requests of one session prefer one replica, which has their prompts cached; also the header X-Session-ID."""
    priority: Priority = 0
    """Requests with a lower number run first."""
    cache_salt: str = Field(default="", max_length=256)
    """Prompts share cached prefixes only under equal salts."""
    adapter: str = Field(default="", max_length=128)
    """Name of the adapter to compute with, "" = the base alone; 404 when it is not loaded."""
    min_weight_version: Version | None = None
    """Wait until this version or a later one is live; 409 after version_timeout_s."""
    version_timeout_s: float = Field(default=60.0, gt=0, le=3600)


class GenerateRequest(_Request):
    """Prompts and how to continue them. Exactly one of prompt and prompt_ids."""

    prompt: str | Texts | None = None
    """Text, or several; needs a checkpoint with a tokenizer."""
    prompt_ids: Ids | ManyIds | None = None
    """Token ids, or several lists of them; continued exactly as they are."""
    add_special_tokens: bool = True
    """For text prompts: let the tokenizer add its begin-of-text token."""
    n: int = Field(default=1, ge=1, le=1024)
    """Samples per prompt; the prompt is computed once."""
    max_tokens: Count | None = None
    """None: whatever fits the context. More than fits is cut to it, and the sample ends with `length`."""
    temperature: Finite = Field(default=1.0, ge=0, le=100)
    """0 = greedy."""
    top_p: Probability = 1.0
    top_k: int = Field(default=0, ge=-1, lt=1 << 31)
    """0 or -1 = off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: Seed | None = None
    """Seed of the request's random numbers: each of the n samples of a prompt has a stream derived from it."""
    stop: Texts | str = Field(default_factory=list)
    logprobs: TopN = 0
    """Top alternatives per token, beside the sampled token's own logprob, which always comes."""
    prompt_logprobs: TopN | None = None
    sampling_mask: bool = False
    """Also report the ids that the constraint, top-k, top-p and min-p left open, per token."""
    skip_special_tokens: bool = True
    include_stop: bool = False
    """Keep the stop string or token in the text; the ids always have it."""
    stream: bool = False
    max_staleness: Count | None = None
    """End with `abort` once the live version is further ahead of the one it started under."""

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.prompt_ids is None):
            raise ValueError("send exactly one of prompt (text) and prompt_ids (token ids)")
        return self

    def sampling(self, bad_words: list[list[int]], grammar: str) -> SamplingParams:
        """The request's sampling as the worker takes it; as for `_Edits`."""
        top_k, stop = max(self.top_k, 0), [self.stop] if isinstance(self.stop, str) else self.stop
        return sampling_params(self, top_k=top_k, stop=stop, bad_words=bad_words, grammar=grammar)


class VersionSpan(Strict):
    """Output tokens [start, end) were sampled under this version. Spans cover the whole output without gaps."""

    version: int
    start: int
    end: int
    recomputed: bool
    """Before the first of them was sampled, the keys and values of all earlier positions, the prompt's too, were
    computed again under this version. False: each is still that of the version that computed it last."""
    digest: str
    """Names the version's bytes, as the report of their push does: a number may have stood for others before."""
    adapter_version: int | None = None
    """Version of the request's adapter that sampled it too; a span begins with another one."""
    adapter_digest: str | None = None
    """Names the bytes of that."""


class TokenLogprob(Strict):
    """One alternative."""

    token_id: int
    logprob: float


class PromptTokenLogprob(Strict):
    """One candidate for a prompt token; rank 1 = most likely."""

    token_id: int
    logprob: float
    rank: int


class Output(Strict):
    """One sample. Lists run parallel to token_ids."""

    prompt_index: int
    index: int
    token_ids: list[int]
    """Exactly what was sampled, the stop token included."""
    text: str | None
    """None when the checkpoint has no tokenizer."""
    logprobs: list[float]
    """One a token, of the distribution that it was sampled from (or as `worker.logprobs_mode` says); always finite."""
    finish_reason: FinishReason | None
    """Why the sample ended; None only in streams, before the end."""
    stop_reason: int | str | None = None
    spans: list[VersionSpan]
    adapter_version: int | None = None
    """The version of the request's adapter that made the last token; None = the request names no adapter."""
    top_logprobs: list[list[TokenLogprob]] | None = None
    ranks: list[int] | None = None
    sampling_masks: list[list[int]] | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[list[PromptTokenLogprob]] | None = None
    """Per prompt token after the first: its own, then the top ones."""


class Usage(Strict):
    """How many tokens a request had in its prompts and in its outputs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateResponse(Strict):
    """All samples, prompt-major. In streams: the samples that moved, with only their new tokens."""

    request_id: str
    model: str
    adapter: str | None = None
    """The adapter that the request names; None = it names none."""
    outputs: list[Output]
    usage: Usage | None = None


class ScoreRequest(_Request):
    """Tokens to be scored, each list behind a prompt of its own, as what a request with this temperature and these
    edits sampled."""

    prompt_ids: ManyIds
    """What came before the scored tokens: one list for each list of token_ids, of one token at least."""
    token_ids: ManyIds
    """The tokens to score: what the token_ids of samples are."""
    temperature: Finite = Field(default=1.0, ge=0, le=100)
    """What they were sampled at. top_p, top_k and min_p change no logprob, and are no fields here."""
    weight_version: Version | None = None
    """Only under this version: that which is live, one that is to come, which is waited for, or the one before the live
    one while its memory has not been given to the next push. 409 when it is not there (any more)."""
    weight_digest: str = Field(default="", pattern="^([0-9a-f]{16})?$")
    """Only under the weights of this digest, as spans and reports of pushes name them. Alone: the live ones or those
    before them, 409 when they are neither; with weight_version: these bytes under that number."""

    @model_validator(mode="after")
    def _in_pairs(self) -> Self:
        if len(self.prompt_ids) != len(self.token_ids):
            raise ValueError(
                f"{len(self.prompt_ids)} prompt_ids for {len(self.token_ids)} token_ids: send one for each"
            )
        for what, lists in (("prompt_ids", self.prompt_ids), ("token_ids", self.token_ids)):
            if not all(lists):
                raise ValueError(f"{what}[{lists.index([])}] is empty: send at least one token")
        return self


class Score(Strict):
    """Logprobs of one list of tokens."""

    index: int
    logprobs: list[float] | None
    """Of each token, -9999 for one that could not have been sampled; None when it was aborted before all were known."""
    weight_version: int
    """The version that computed all of them, and their prompt."""
    weight_digest: str
    """Names its bytes."""
    adapter_version: int | None = None
    """Version of the request's adapter that computed them too."""
    adapter_digest: str | None = None
    """Names the bytes of that."""
    finish_reason: FinishReason
    """length: all tokens were scored. abort: scoring was ended before."""
    cached_tokens: int = 0


class ScoreResponse(Strict):
    """Answer of /v1/rollout/score: one score for each list of the request, in its order."""

    request_id: str
    model: str
    logprobs_mode: Literal["processed", "raw"]
    """What the service reports when it samples, and so here: processed = of the distribution sampled from, before it
    was cut; raw = of the model's own logits, at temperature 1 and without edits."""
    outputs: list[Score]
    usage: Usage


class PauseRequest(Strict):
    """How to pause. All fields have defaults."""

    mode: PauseMode = "abort"
    """abort ends running requests with what they have; wait lets them finish; keep and recompute go on later."""
    lease_s: float | None = Field(default=None, ge=0, le=86400)
    """Resume by itself after this; 0 = only by /v1/rollout/resume, None = as configured (api.pause_lease_s)."""
    clear_cache: bool = True
    deadline_s: float = Field(default=60.0, gt=0, le=3600)
    """Mode wait: how long requests may take to finish; then nothing is paused and the reply is 409."""


class PauseState(Strict):
    """Whether and how the fleet is paused."""

    paused: bool
    mode: PauseMode | None = None
    lease_left_s: float | None = None
    held: int
    """Requests that wait for the pause to end."""


class AbortRequest(Strict):
    """Which requests to end; None = all."""

    request_ids: Names | None = None


class AbortResponse(Strict):
    """How many requests were open, and have been ended."""

    aborted: int
    unreached: list[str] = Field(default_factory=list)
    """Nodes and API processes that did not answer: requests that they have may go on."""


class LoadRequest(Strict):
    """A checkpoint directory, below the configured roots, to make live."""

    path: str = Field(min_length=1, max_length=4096)
    version: Version | None = None
    """Number of the new version; None = one above the live one."""
    in_flight: Literal["keep", "recompute", "abort", "wait"] = "keep"
    """What becomes of running sequences at the commit."""
    deadline_s: float = Field(default=180.0, gt=0, le=3600)
    force: bool = False
    """Accept a version that is not above the live one."""


class LoadResponse(Strict):
    """What the commit that made the directory live has reported."""

    version: int | None
    report: dict[str, Any]


class RestartRequest(Strict):
    """How long a replica may take to end, and to come back."""

    drain_s: float = Field(default=30.0, ge=0, le=3600)
    """For the requests that it runs."""
    ready_s: float = Field(default=60.0, gt=0, le=3600)
    """From its start until it serves the live version."""


class WeightsAbortRequest(Strict):
    """Why the push in progress is to end."""

    reason: str = Field(default="aborted by an operator", max_length=1024)


class ReplicaWeights(Strict):
    """One replica, as the store and the API see it."""

    replica: int
    state: str
    version: int | None
    ready: bool
    running: int
    store: dict[str, Any] | None = None
    """What the store knows of the replica: its epoch, its pids, and when it was last heard of."""
    kernels: str = ""
    """What computes: compiled (full speed), onednn (no C compiler: half of it), paddle; empty until it has said so."""
    reason: str = ""
    """Why it is not ready."""
    kernels_why: str = ""
    """Why a CPU does not run at full speed."""
    deterministic: str = ""
    """on: a token's bits do not depend on what else is in its step; else why not. Empty until it has said so."""


class LiveVersion(Strict):
    """What is being served. epoch counts commits and never repeats."""

    run_id: str
    version: int
    epoch: int
    digest: str


class WeightsResponse(Strict):
    """Everything about weights: live, on the way, per replica, last error, last push."""

    live: LiveVersion | None
    previous: LiveVersion | None
    session: dict[str, Any] | None
    replicas: list[ReplicaWeights]
    last_error: dict[str, Any] | None
    last_push: dict[str, Any] | None
    history: list[dict[str, Any]]
    store_connected: bool
    relay: dict[str, Any] | None = None
    """Stores above and below, for a service that shares its pushes with other hosts."""
    ahead: dict[str, Any] | None = None
    """What is live is in device memory, and shared memory has yet to get it: how, and since when."""
    lost: LiveVersion | None = None
    """Was live so and is gone; an older version is live since. Only the same bytes may have its number in its run."""


class MemoryRequest(Strict):
    """What to release or bring back."""

    tags: list[Literal["weights", "kv_cache"]] = Field(
        default=["weights", "kv_cache"], min_length=1, max_length=16, fail_fast=True
    )


class MemoryResponse(Strict):
    """Bytes released (0 when it was released before), and what is released now."""

    released_bytes: int = 0
    cleared: list[str]


class Ok(Strict):
    """Answer of routes that have nothing to tell but that it is done."""

    ok: bool = True


class ApiPlace(Strict):
    """An API of the fleet. place: its node; url: where it listens."""

    place: str
    url: str


class ApisResponse(Strict):
    """Answer of /v1/rollout/apis: this API first, then those of other nodes."""

    apis: list[ApiPlace]


class PrefixCacheReset(Strict):
    """empty: nothing is cached any more; false while running sequences hold blocks."""

    empty: bool

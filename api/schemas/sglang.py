"""Bodies of SGLang's routes."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from api.schemas.base import (
    MAX_BIASED,
    MAX_SEQUENCES,
    Asked,
    Count,
    Digests,
    Finite,
    Ids,
    Lenient,
    LogitBias,
    LoraName,
    ManyIds,
    Names,
    RepetitionPenalty,
    Rid,
    Scheduled,
    Seed,
    Texts,
    TopN,
    sampling_params,
)
from api.schemas.openai import VersionSpan
from api.schemas.structured import SglangStructured, Text
from api.schemas.vllm_sampling import Stop, stops_of, top_k_of
from worker.messages import SamplingParams

PerPrompt = Field(max_length=MAX_SEQUENCES, fail_fast=True)
"""Bounds of a list that has a value for each prompt of a batch."""
Salt = Annotated[str, Field(max_length=256)]
From = Annotated[int, Field(ge=-1, lt=1 << 31)]


class SglangSampling(SglangStructured):
    """`sampling_params` of SGLang's /generate."""

    generates = True

    max_new_tokens: Count | None = 128
    """Null: whatever fits the context. More than fits is a 400."""
    min_new_tokens: Count | None = 0
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = -1
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    frequency_penalty: Annotated[Finite, Field(ge=-100, le=100)] | None = 0.0
    presence_penalty: Annotated[Finite, Field(ge=-100, le=100)] | None = 0.0
    repetition_penalty: RepetitionPenalty | None = 1.0
    stop: Stop = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    sampling_seed: Seed | None = None
    logit_bias: LogitBias | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = 1

    def params(self, *, top_n: int, prompt_logprobs: int | None, ids: list[int], grammar: str) -> SamplingParams:
        """The sampling as the worker takes it. top_n: likeliest ids to report. ids: or these. grammar: "" = none."""
        return sampling_params(
            self,
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens or 0,
            top_k=top_k_of(self.top_k),
            seed=self.sampling_seed,
            stop=stops_of(self.stop),
            logprobs=top_n,
            logprob_token_ids=ids,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )


class SglangGenerate(Scheduled):
    """/generate: text or input_ids, one or a batch (then a list is answered); or `prompts`, as older TRL sends."""

    text: str | Texts | None = None
    input_ids: Ids | ManyIds | None = None
    sampling_params: SglangSampling | Annotated[list[SglangSampling], PerPrompt] | None = None
    return_logprob: bool | Annotated[list[bool], PerPrompt] | None = False
    logprob_start_len: From | Annotated[list[From], PerPrompt] | None = -1
    """From which prompt token on logprobs are wanted; -1 = only those of the output."""
    top_logprobs_num: TopN | Annotated[list[TopN], PerPrompt] | None = 0
    token_ids_logprob: Annotated[Ids, Field(max_length=MAX_BIASED)] | None = None
    """Ids whose logprobs are reported for every output token; not with top_logprobs_num, nor of prompts."""
    return_text_in_logprobs: bool | None = False
    rid: Rid | Annotated[list[Rid], PerPrompt] | None = None
    cache_salt: Salt | Annotated[list[Salt], PerPrompt] | None = None
    """Prompts share cached prefixes only under equal salts."""
    lora_path: LoraName | Annotated[list[LoraName | None], PerPrompt] | None = None
    """Name of the adapter to compute with, one for all prompts or one each; null: the base alone."""
    prompts: Texts | ManyIds | None = None
    """Prompts as older releases of TRL send them. The fields below count then, and the answer is a `LegacyTrlOutput`.
    """
    n: Annotated[int, Field(ge=1, le=1024)] | None = 1
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = -1
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    repetition_penalty: RepetitionPenalty | None = 1.0
    max_tokens: Count | None = None
    """Most tokens of an output; null = 16."""
    guided_decoding_regex: Text | None = None
    structured_outputs_regex: Text | None = None
    """guided_decoding_regex under its later name."""
    generation_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _of_one_form(self) -> Self:
        """Neither form reads the other's fields; a value of one that is not read would change the answer."""
        wrong = self.model_fields_set - {"prompts"}
        wrong = wrong - OLDER_TRL if self.prompts is not None else wrong & OLDER_TRL
        fields = type(self).model_fields
        wrong = {name for name in wrong if getattr(self, name) not in (None, fields[name].default)}
        if wrong:
            form = "with prompts it is not read" if self.prompts is not None else "it belongs into sampling_params"
            raise ValueError(f"{min(wrong)}: {form}")
        return self


OLDER_TRL = {*("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "generation_kwargs")}
OLDER_TRL |= {"guided_decoding_regex", "structured_outputs_regex"}
"""Fields of `prompts`."""


class MetaInfo(Lenient):
    """What SGLang tells of one sample beside its text. Logprob entries are [logprob, token id, text or null]."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[VersionSpan]
    e2e_latency: float
    output_token_logprobs: list[tuple[float, int, str | None]] | None = None
    output_token_ids_logprobs: list[list[tuple[float, int, str | None]]] | None = None
    output_top_logprobs: list[list[tuple[float, int, str | None]]] | None = None
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    input_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None


class SglangOutput(Lenient):
    """One sample."""

    text: str
    output_ids: list[int]
    index: int | None = None
    meta_info: MetaInfo


class LegacyTrlOutput(Lenient):
    """What `prompts` is answered with: per prompt its ids, per sample ids and one logprob per token."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    weight_version: str
    """Name of the version that made the last token of the last sample."""
    weight_versions: list[list[VersionSpan]]


class SglangPause(Asked):
    """Body of /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class SglangContinue(Asked):
    """Body of /continue_generation; nothing in it makes a difference here."""


class Said(Lenient):
    """Answer of most control routes."""

    message: str
    status: str = "ok"
    success: bool = True


SAFETENSORS = ("auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""Load formats of SGLang that read the same files as are read here."""


class DiskUpdate(Asked):
    """Body of /update_weights_from_disk. A pause in force stays in force; else generation goes on beside the update."""

    model_path: str = Field(min_length=1, max_length=4096)
    load_format: Annotated[str, Field(max_length=64)] | None = None
    abort_all_requests: bool | None = False
    weight_version: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    flush_cache: bool | None = True
    """False: running sequences keep their KV. The cache of prefixes never outlives a version."""

    @field_validator("load_format")
    @classmethod
    def _is_read_here(cls, value: str | None) -> str | None:
        if value is not None and value not in SAFETENSORS:
            raise ValueError(f"{value!r} is not read here: directories hold safetensors; leave it out, or send auto")
        return value


class DiskUpdated(Lenient):
    """Whether the directory went live."""

    success: bool
    message: str
    num_paused_requests: int


class NewVersion(Asked):
    """Body of /update_weight_version: new_version becomes a name of the live version."""

    new_version: str = Field(min_length=1, max_length=256)
    abort_all_requests: bool | None = False


class NewVersionSet(Lenient):
    """Whether the version has got its name."""

    success: bool = True
    message: str = "weight version updated"
    new_version: str


class WeightVersion(Lenient):
    """The name of the live version."""

    weight_version: str


class AbortRid(Asked):
    """Body of /abort_request: ends one request by its exact id, or all."""

    rid: str | None = None
    abort_all: bool | None = False


class Aborted(Said):
    """How many requests were open, and have been ended."""

    aborted: int


class ModelInfo(Lenient):
    """Answer of /model_info."""

    model_path: str
    tokenizer_path: str
    is_generation: bool = True
    weight_version: str
    weight_digest: str | None = None
    preferred_sampling_params: dict[str, Any] | None = None
    model_type: str = ""
    architectures: list[str] = Field(default_factory=list)


class MemoryTags(Asked):
    """Which memory to release or bring back; none or null = all. The tag cuda_graph is accepted and names
    nothing here.
    """

    tags: Annotated[list[Literal["weights", "kv_cache", "cuda_graph"]], Field(max_length=16, fail_fast=True)] | None = (
        None
    )


class WeightsByName(Asked):
    """Body of /get_weights_by_name, which answers the first truncate_size rows."""

    name: str = Field(min_length=1, max_length=1024)
    truncate_size: Annotated[int, Field(ge=1, le=1000)] = 100


class WeightsChecker(Asked):
    """Body of /weights_checker. Nothing is quantised here, so allow_quant_error makes no difference."""

    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    skip_tensor_list: Names | None = None
    """Substrings of names that are left out."""
    selector: Literal["target", "draft", "all"] | None = "all"
    """A drafting layer is part of the model here: there is no other runner to select."""
    baseline: Digests | None = None
    """An extension of ours, for action compare: the checksums of an earlier answer, instead of the snapshot."""


class WeightsChecked(Lenient):
    """Answer of /weights_checker. Without success the status is 400 and the message says what differs. ranks and
    checksums are there for action checksum only.
    """

    success: bool = True
    message: str = ""
    ranks: list[dict[str, Any]] | None = None
    per_engine_checksum: str | None = None
    checksums: dict[str, str] | None = None
    match: bool | None = None
    mismatches: list[str] | None = None


class Loads(Lenient):
    """Load of one replica, in sequences: a request for n counts n."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_running_reqs: int
    num_tokens: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float


class LoadsV1(Lenient):
    """Answer of /v1/loads."""

    loads: list[Loads]

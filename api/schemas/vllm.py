"""Bodies of vLLM's control routes for RL trainers."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from api.schemas.base import Count, Digests, Lenient, Names


class Status(Lenient):
    """Answer of /pause and /resume."""

    status: str


class IsPaused(Lenient):
    """Answer of /is_paused."""

    is_paused: bool


class AbortRequests(Lenient):
    """Body of /abort_requests: exact ids of the requests to end; empty or missing = all."""

    request_ids: Names | None = None


class AbortNamed(Lenient):
    """Requests to abort, by name only."""

    request_ids: Names


class AbortedRequests(Status):
    """How many requests were open, and have been ended. unreached: nodes and API processes that did not answer."""

    aborted: int
    unreached: list[str] = Field(default_factory=list)


class Message(Lenient):
    """What was done, in words."""

    message: str


class InitTransfer(Lenient):
    """/init_weight_transfer_engine: {} or {"backend": "zmq"}. What names another transport is refused by the route.

    A trainer that puts its keys beside init_info, not into it, means them all the same.
    """

    model_config = ConfigDict(extra="allow")

    init_info: dict[str, Any] = Field(default_factory=dict)

    @property
    def asked(self) -> dict[str, Any]:
        """Every key of the body, whether it was sent in init_info or beside it."""
        return {**(self.model_extra or {}), **self.init_info}


class TransferReady(Message):
    """Where the trainer's WeightPublisher connects."""

    backend: Literal["zmq"] = "zmq"
    endpoints: list[str]
    weight_version: str


PACKING = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")
"""How a stock trainer cuts its own buckets: nothing that arrives here depends on it."""
Shape = Annotated[list[Count], Field(max_length=16, fail_fast=True)]


class UpdateInfo(Lenient):
    """The tensors of one bucket. dtypes and shapes are those that the publisher says of its own tensors."""

    names: Annotated[Names, Field(min_length=1)]
    dtype_names: Names | None = None
    shapes: Annotated[list[Shape], Field(max_length=1 << 16, fail_fast=True)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _over_zmq(cls, info: Any) -> Any:
        """Raises ValueError for handles and sparse updates: their bytes would have to come in a way that is not offered
        here.
        """
        other = [key for key in info if key not in {*cls.model_fields, *PACKING}] if isinstance(info, dict) else []
        if given := [key for key in other if info[key] not in (None, False)]:
            raise ValueError(f"{', '.join(given[:5])}: the bytes of tensors arrive over ZMQ, from a WeightPublisher")
        return info


class UpdateWeights(Lenient):
    """A bucket that is being pushed over ZMQ, or a directory to load."""

    update_info: UpdateInfo | None = None
    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = None

    @model_validator(mode="after")
    def _one(self) -> "UpdateWeights":
        if (self.update_info is None) == (self.weight_dir is None):
            raise ValueError("send exactly one of update_info and weight_dir")
        return self


class FinishUpdate(Lenient):
    """What the trainer calls the new version; null = its number."""

    weight_version: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class WeightInfo(Lenient):
    """The name of the live version."""

    weight_version: str


class WeightChecker(Lenient):
    """compare needs the baseline: checksums of an earlier answer. reset is refused."""

    action: Literal["checksum", "compare", "reset"]
    baseline: Digests | None = None


class WeightCheck(Lenient):
    """Answer of /weight_checker. Keys are dp<replica>:tp<rank>:<parameter>."""

    checksums: dict[str, str] | None = None
    match: bool | None = None
    mismatches: list[str] | None = None


class WorldSize(Lenient):
    """Ranks that hold weights."""

    world_size: int


class Sleeping(Status):
    """Answer of /sleep."""

    level: int


class Awake(Status):
    """status: awake, or sleeping while other tags are still released."""

    tags: list[str] | None


class IsSleeping(Lenient):
    """Answer of /is_sleeping."""

    is_sleeping: bool


class Success(Lenient):
    """Answer of /reset_prefix_cache: false while running sequences hold blocks."""

    success: bool


class CollectiveRpc(Lenient):
    """/collective_rpc. The methods that are offered take no arguments."""

    method: str = Field(max_length=1 << 20)
    args: Annotated[list[Any], Field(max_length=0)] | None = None
    kwargs: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Control verbs keep deadlines of their own."""


class RpcResults(Lenient):
    """Answers of the ranks, one each."""

    results: list[dict[str, str] | None]


class Release(Lenient):
    """Answer of /version."""

    version: str


class ServerLoad(Lenient):
    """Answer of /load."""

    server_load: int


class VllmConfig(Lenient):
    """The part of vLLM's configuration that trainers look at."""

    weight_transfer_config: dict[str, Any]
    model_config_: dict[str, Any] = Field(alias="model_config")
    lora_config: dict[str, Any] | None
    parallel_config: dict[str, Any]


class ServerInfo(Lenient):
    """Answer of /server_info: vLLM's nested keys and SGLang's flat ones."""

    vllm_config: VllmConfig
    tp_size: int
    pp_size: int
    dp_size: int
    disaggregation_mode: str
    model_path: str
    tokenizer_path: str
    served_model_name: str
    max_model_len: int
    eos_token_ids: list[int]
    """What ends a generation: of config.json, generation_config.json and the tokenizer together."""
    context_length: int
    dtype: str
    weight_version: str
    weight_digest: str | None = None
    version: str
    internal_states: list[dict[str, Any]]

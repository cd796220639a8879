"""Two kinds of request body, the types of their fields, and the error body every route shares.

Every number and every list that a client sends has a bound: messages to the worker have no place for larger numbers,
and a list is given up at its first wrong item, since an error for each of a million takes minutes to tell.
"""

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from api.fields import check
from worker.messages import SamplingParams

MAX_SEQUENCES = 4096
"""Most sequences of one request: its prompts times n."""
MAX_BIASED = 1024
"""Most tokens with a bias in one request, as vLLM has it."""
MAX_TOP = 128
"""Most alternatives with a logprob per token. TRL asks a teacher for 100."""
MAX_FIELDS = 256
"""Most fields of one body, far more than any route has; a body of more is refused before it is validated."""
T = TypeVar("T")

Count = Annotated[int, Field(ge=0, lt=1 << 31)]
"""A number of tokens, and the like."""
TopN = Annotated[int, Field(ge=0, le=MAX_TOP)]
"""How many of the most likely ids are reported, per token."""
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Version = Annotated[int, Field(ge=0, lt=1 << 63)]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
MAX_NAME = 256
"""Characters of a request's id."""
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Session = Annotated[str, Field(max_length=256)]
Rid = Annotated[str, Field(max_length=256)]
"""SGLang's request id. Empty: none was given."""
LoraName = Annotated[str, Field(min_length=1, max_length=128)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
"""A number, not what could be taken for one: true is not token 1."""
Ids = Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
Names = Annotated[list[str], Field(max_length=1 << 16, fail_fast=True)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
RepetitionPenalty = Annotated[Finite, Field(ge=0.01, le=100)]
"""vLLM wants it above 0; dividing a logit by much less than this would leave float32."""


def _few(value: T) -> T:
    if isinstance(value, dict) and len(value) > MAX_BIASED:
        raise ValueError(f"{len(value)} tokens; at most {MAX_BIASED} may have a bias")
    return value


def _digests(value: T) -> T:
    if isinstance(value, dict) and not all(type(digest) is str for digest in value.values()):
        raise ValueError("a digest is a string of hex digits")
    return value


LogitBias = Annotated[
    dict[Annotated[int, Field(ge=0, lt=1 << 31)], Finite], BeforeValidator(_few), Field(max_length=MAX_BIASED)
]
Digests = Annotated[dict[str, str], BeforeValidator(_digests), Field(max_length=1 << 20)]


class Body(BaseModel):
    """What a request or an answer brings, of a bounded number of fields."""

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > MAX_FIELDS:
            raise ValueError(f"{len(body)} fields; no body has so many")
        return body


class Strict(Body):
    """Native bodies: a misspelt field is an error, not a silent default."""

    model_config = ConfigDict(extra="forbid")


class Lenient(Body):
    """Bodies of other projects' clients: unknown fields are accepted, as those projects do."""

    model_config = ConfigDict(extra="ignore")


class Asked(Lenient):
    """Bodies that say how to generate: a field that would change the answer is done, or refused by its name."""

    generates: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _heeded(cls, body: Any) -> Any:
        check(body, cls.model_fields, generates=cls.generates)
        return body


class Scheduled(Asked):
    """How a request is run, in the dialects of other servers."""

    generates = True

    stream: bool | None = False
    session_id: Session | None = None
    """Requests of one session prefer one replica; also the header X-Session-ID."""
    priority: Priority | None = 0
    min_weight_version: Version | None = None
    """Ours: wait until this version is live; 409 after version_timeout_s."""
    version_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    max_staleness: Count | None = None
    """Ours: end with `abort` once the live version is further ahead of the one it started under."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    code: str
    param: str | None = None
    tensors: list[str] = []


class ErrorBody(BaseModel):
    """Body of every reply that is not 2xx."""

    error: ErrorDetail


ERROR = {"$ref": "#/components/schemas/ErrorBody"}
"""Reference to the schema of `ErrorBody`, which api/openapi.py adds to the OpenAPI document."""
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": said, "content": {"application/json": {"schema": ERROR}}}
    for status, said in {
        "4XX": "The request is wrong, not allowed, or not possible in this state.",
        "5XX": "The service could not do it.",
    }.items()
}
"""For `responses=` of routers. By reference: FastAPI builds a validator for each model on each route, 0.2 s in all."""


def sampling_params(body: BaseModel, **read: Any) -> SamplingParams:
    """The sampling that a body asks for, as the worker takes it.

    Fields that bear the worker's names are taken as they are, null as the worker's default; read: what is called or
    written otherwise in the body, and goes before them.
    """
    names = SamplingParams.__struct_fields__
    same = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    return SamplingParams(**(same | read))

"""Two kinds of request body, and the error body every route shares."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = list[TokenId]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    """Native bodies: a misspelt field is an error, not a silent default."""

    model_config = ConfigDict(extra="forbid")


class Lenient(BaseModel):
    """Bodies of other projects' clients: unknown fields are accepted, as those projects do."""

    model_config = ConfigDict(extra="ignore")


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


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is wrong, not allowed, or not possible in this state."},
    "5XX": {"model": ErrorBody, "description": "The service could not do it."},
}
"""For `responses=` of routers."""

"""Two kinds of request body, and the error body every route shares."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = list[TokenId]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    """Native bodies: a misspelt field is an error, not a silent default."""

    model_config = ConfigDict(extra="forbid")


CONSTRAINTS = (
    *("regex", "json_schema", "ebnf", "structural_tag", "response_format", "structured_outputs"),
    *("structured_outputs_regex", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""Fields by which the clients of other engines ask for output of a form, which is not offered."""


class Lenient(BaseModel):
    """Bodies of other projects' clients: unknown fields are accepted, as those projects do.

    But not what asks for output of a form: without it the answer would be another than the one that was asked for.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _free_form(cls, body: Any) -> Any:
        for name in CONSTRAINTS if isinstance(body, dict) else ():
            asked = body.get(name)
            if asked and asked != {"type": "text"} and name not in cls.model_fields:
                raise ValueError(
                    f"{name}: output constrained by a grammar, schema or regular expression is not offered"
                )
        return body


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

"""Bodies of FastDeploy's routes."""

from typing import Annotated, Any, Literal

from pydantic import Field

from api.schemas.base import Lenient, Names, Seed


class Msg(Lenient):
    """Answer of the two legacy routes."""

    msg: str


class Control(Lenient):
    """Answer of the /v1 control routes that succeeded."""

    status: Literal["success"] = "success"
    request_id: str
    result: Any = None


class ControlError(Lenient):
    """Answer of the /v1 control routes that did not succeed."""

    status: Literal["error"] = "error"
    request_id: str
    message: str


class UpdateWeights(Lenient):
    """/v1/update_weights: load the model's directory again."""

    version: Seed | Annotated[str, Field(max_length=256)] | None = None
    """None: `step` of the directory's version.yaml, or one above the live one."""
    verify_checksum: bool | None = True
    """Every byte is checked on the way to every rank in any case."""
    timeout: Annotated[float, Field(gt=0, le=3600)] = 180.0


class Tags(Lenient):
    """What to release or bring back: "weight", "kv_cache" or both with a comma; missing = both."""

    tags: str | None = None


class AbortRequests(Lenient):
    """Which requests to end: those with these exact ids, or all."""

    abort_all: bool | None = False
    req_ids: Names | None = None

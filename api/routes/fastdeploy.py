"""FastDeploy's control routes: the two legacy ones, and /v1/pause and its family."""

import re
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.auth import require_admin, require_data
from api.errors import ApiError, BadInput, Conflict, TimedOut, status_of
from api.replies import Json, describe, explain, let_go
from api.schemas import fastdeploy as schema
from api.schemas.base import ErrorBody
from api.service import Uses
from worker.messages import Tag

ALL_TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
TAGS: dict[str, Tag] = {"weight": "weights", "weights": "weights", "kv_cache": "kv_cache"}


class ControlRoute(APIRoute):
    """Errors in FastDeploy's shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route, and what its errors become."""
        inner = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await inner(request)
            except ApiError as error:
                return _refused(status_of(error), error.message)
            except RequestValidationError as error:
                let_go(error)
                return _refused(400, explain(error.errors()))
            except HTTPException as error:
                let_go(error)
                return _refused(error.status_code, describe(error))

        return answered


def _refused(status: int, message: str) -> Response:
    return Json({"status": "error", "request_id": _id(), "message": message}, status)


GET_IS_OFF = Json({"msg": "GET is switched off for routes that change something (legacy_get): use POST"}, 404)
# What never reached a route (a token, a body too large) is refused in the shape that all routes share.
REFUSED: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.ControlError | ErrorBody} for status in ("4XX", "5XX")
}
REFUSED_LEGACY: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.Msg | ErrorBody} for status in ("4XX", "5XX")
}
router = APIRouter(tags=["fastdeploy"])
v1 = APIRouter(tags=["fastdeploy"], route_class=ControlRoute, responses=REFUSED)
data = [Depends(require_data)]
admin = [Depends(require_admin)]


@router.get("/clear_load_weight", dependencies=admin, response_model=schema.Msg, responses=REFUSED_LEGACY)
@router.post("/clear_load_weight", dependencies=admin, response_model=schema.Msg, responses=REFUSED_LEGACY)
async def clear_load_weight(request: Request, service: Uses) -> Response:
    """Release parameters and KV. 400: that is running already; 403: the opposite is; 404: timeout or off."""
    if request.method == "GET" and not service.config.legacy_get:
        return GET_IS_OFF
    if service.fleet.intents.cleared >= set(ALL_TAGS) and service.control.transition is None:
        return Json({"msg": "model weight is cleared"})
    return await _legacy(service.control.clear, "clear", "clear model weight successfully")


@router.get("/update_model_weight", dependencies=admin, response_model=schema.Msg, responses=REFUSED_LEGACY)
@router.post("/update_model_weight", dependencies=admin, response_model=schema.Msg, responses=REFUSED_LEGACY)
async def update_model_weight(request: Request, service: Uses) -> Response:
    """Bring back what was released, at the live version. Errors as above."""
    if request.method == "GET" and not service.config.legacy_get:
        return GET_IS_OFF
    if not service.fleet.intents.cleared and service.control.transition is None:
        return Json({"msg": "model weight is updated"})
    return await _legacy(service.control.reload, "reload", "update model weight successfully")


async def _legacy(verb: Callable[..., Coroutine[Any, Any, Any]], name: str, done: str) -> Response:
    try:
        await verb(ALL_TAGS)
    except Conflict as error:
        return Json({"msg": error.message}, 400 if error.code == name else 403)
    except TimedOut as error:
        return Json({"msg": error.message}, 404)
    return Json({"msg": done})


@v1.post("/v1/pause", dependencies=admin)
async def pause(service: Uses) -> schema.Control:
    """What runs ends with `abort`; what comes is held."""
    await service.control.pause("abort")
    return schema.Control(request_id=_id())


@v1.post("/v1/resume", dependencies=admin)
async def resume(service: Uses) -> schema.Control:
    """Go on. Idempotent."""
    await service.control.resume()
    return schema.Control(request_id=_id())


@v1.get("/v1/is_paused", dependencies=data)
async def is_paused(service: Uses) -> schema.Control:
    """Whether somebody paused."""
    return schema.Control(request_id=_id(), result={"is_paused": service.control.paused})


@v1.post("/v1/update_weights", dependencies=admin)
async def update_weights(service: Uses, body: schema.UpdateWeights | None = None) -> schema.Control:
    """Load the model's directory again, while paused; does not resume. result: costs in seconds, per rank."""
    body = body or schema.UpdateWeights()
    if not service.control.paused:
        raise Conflict("pause first: weights are updated while paused")
    directory = service.model.path
    name = str(body.version) if body.version is not None else step_of(directory)
    report = await service.versions.load(str(directory), name=name, in_flight="recompute", deadline_s=body.timeout)
    seconds = report.get("seconds", {})
    costs = {
        "sync_cost": seconds.get("stage", 0.0),
        "update_cost": seconds.get("prepare", 0.0) + seconds.get("commit", 0.0),
        "total_cost": sum(seconds.values()),
        "version": service.versions.live,
    }
    ranks = service.config.tp * len(service.fleet.replicas)
    return schema.Control(request_id=_id(), result=[costs | {"rank": rank} for rank in range(ranks)])


@v1.post("/v1/sleep", dependencies=admin)
async def sleep(
    service: Uses, tags: Annotated[str | None, Query()] = None, body: schema.Tags | None = None
) -> schema.Control:
    """Pause, then release."""
    chosen = _tags(tags, body)
    if not service.control.paused:
        await service.control.pause("abort")
    await service.control.clear(chosen)
    return schema.Control(request_id=_id())


@v1.post("/v1/wakeup", dependencies=admin)
async def wakeup(
    service: Uses, tags: Annotated[str | None, Query()] = None, body: schema.Tags | None = None
) -> schema.Control:
    """Bring back, then resume once nothing is missing."""
    await service.control.reload(_tags(tags, body))
    if not service.fleet.intents.cleared:
        await service.control.resume()
    return schema.Control(request_id=_id())


@v1.post("/v1/abort_requests", dependencies=admin)
async def abort_requests(body: schema.AbortRequests, service: Uses) -> schema.Control:
    """End requests; callers get what there is."""
    if not body.abort_all and not body.req_ids:
        raise BadInput("send abort_all: true, or req_ids")
    ended = await service.generations.abort(None if body.abort_all else body.req_ids)
    return schema.Control(request_id=_id(), result={"aborted": ended.requests, "unreached": list(ended.unreached)})


def _id() -> str:
    return f"control-{uuid.uuid4().hex}"


def _tags(query: str | None, body: schema.Tags | None) -> tuple[Tag, ...]:
    text = query if query is not None else body.tags if body else None
    if text is None:
        return ALL_TAGS
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TAGS]
    if unknown or not names:
        raise BadInput(f"tags {text!r}: write weight, kv_cache, or both with a comma")
    return tuple(dict.fromkeys(TAGS[name] for name in names))


def step_of(directory: Path) -> str | None:
    """`step` of version.yaml, the one line of it that names a disk version; None when there is none."""
    try:
        text = (directory / "version.yaml").read_text()
    except OSError:
        return None
    found = re.search(r"^[^\S\n]*+step\s*+:\s*+[\"']?([\w.-]+)", text, re.MULTILINE)
    return found.group(1) if found else None

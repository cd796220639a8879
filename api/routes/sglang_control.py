"""SGLang's control and info routes, and AReaL's accents of them."""

import asyncio
import contextlib
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from api import info, loads, parameters, weight_checks
from api.auth import require_admin, require_data
from api.errors import ApiError, BadInput, Forbidden, Unavailable, status_of
from api.replies import Json
from api.schemas import sglang as schema
from api.schemas.base import ERRORS, ErrorBody
from api.service import Uses
from rollout_client.protocol import InFlight
from worker.messages import PauseMode, Tag

router = APIRouter(tags=["sglang"], responses=ERRORS)
data = [Depends(require_data)]
admin = [Depends(require_admin)]

NOT_LOADED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": schema.DiskUpdated | ErrorBody, "description": "Nothing changed; success is false."},
    "5XX": {"model": schema.DiskUpdated | ErrorBody, "description": "Nothing changed; success is false."},
}
NOT_RIGHT: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": schema.WeightsChecked | ErrorBody, "description": "Tensors differ, or the request is wrong."}
}
FlushTimeout = Annotated[float, Query(alias="timeout", ge=0, le=3600)]
MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "recompute", "in_place": "keep"}


@router.post("/pause_generation", dependencies=admin)
async def pause_generation(service: Uses, body: schema.SglangPause | None = None) -> schema.Said:
    """abort ends what runs, retract computes its KV anew afterwards, in_place keeps it."""
    mode = (body or schema.SglangPause()).mode
    await service.control.pause(MODES[mode], clear_cache=mode != "in_place")
    return schema.Said(message="generation is paused")


@router.post("/continue_generation", dependencies=admin)
async def continue_generation(service: Uses, body: schema.SglangContinue | None = None) -> schema.Said:
    """Go on. Idempotent."""
    await service.control.resume()
    return schema.Said(message="generation goes on")


@router.post("/areal_pause_generation", dependencies=admin)
async def areal_pause_generation(service: Uses) -> schema.Said:
    """AReaL: what runs ends with `abort` and is sent again by the client."""
    await service.control.pause("abort")
    return schema.Said(message="generation is paused")


@router.post("/areal_continue_generation", dependencies=admin)
async def areal_continue_generation(service: Uses) -> schema.Said:
    """AReaL: go on."""
    return await continue_generation(service)


@router.post("/areal_update_weights", dependencies=admin, response_model=schema.DiskUpdated, responses=NOT_LOADED)
async def areal_update_weights(body: schema.DiskUpdate, service: Uses) -> Response:
    """AReaL: from disk."""
    return await update_weights_from_disk(body, service)


@router.post("/update_weights_from_disk", dependencies=admin, response_model=schema.DiskUpdated, responses=NOT_LOADED)
async def update_weights_from_disk(body: schema.DiskUpdate, service: Uses) -> Response:
    """Make a checkpoint directory live on every replica, or change nothing and say why."""
    in_flight: InFlight = "abort" if body.abort_all_requests else "recompute" if body.flush_cache else "keep"
    waiting = service.fleet.open_everywhere if service.control.paused else 0
    try:
        report = await service.versions.load(body.model_path, name=body.weight_version, in_flight=in_flight)
    except ApiError as error:
        reply = {"success": False, "message": error.message, "num_paused_requests": waiting}
        return Json(reply, status_of(error))
    message = f"version {service.versions.live} is live"
    return Json({"success": True, "message": message, "num_paused_requests": waiting, "report": report})


@router.post("/update_weight_version", dependencies=admin)
async def update_weight_version(body: schema.NewVersion, service: Uses) -> schema.NewVersionSet:
    """Give the live version a name of the trainer's; also vLLM's route."""
    if service.weights.live is None:
        raise BadInput("nothing is live yet")
    if body.abort_all_requests:
        ended = await service.generations.abort(None)
        if ended.unreached:  # what goes on there began under the version's other name
            raise Unavailable(f"not renamed, as requests may go on at {', '.join(ended.unreached)}")
    await service.versions.give(body.new_version)
    return schema.NewVersionSet(new_version=service.versions.live)


@router.get("/get_weight_version", dependencies=data)
@router.get("/weight_version", dependencies=data)
async def get_weight_version(service: Uses) -> schema.WeightVersion:
    """The name of the live version."""
    return schema.WeightVersion(weight_version=service.versions.live)


@router.post("/flush_cache", dependencies=admin, response_model=schema.Said)
async def flush_cache(service: Uses, patience_s: FlushTimeout = 0.0) -> Response:
    """Forget cached prefixes: 200 when done, 400 while requests run, after waiting for them for `timeout` seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(service.fleet.nothing_runs(), patience_s)
    running = service.fleet.running
    if running or not await service.control.reset_prefix_cache():
        return Json({"success": False, "status": "busy", "message": f"not flushed: {running} requests run"}, 400)
    return Json({"success": True, "status": "ok", "message": "cache flushed"})


@router.get("/flush_cache", dependencies=admin, response_model=schema.Said)
async def flush_cache_by_get(service: Uses, patience_s: FlushTimeout = 0.0) -> Response:
    """Flush the cache, as older clients ask for it."""
    if not service.config.legacy_get:
        raise Forbidden("GET is switched off for routes that change something (legacy_get): use POST")
    return await flush_cache(service, patience_s)


@router.post("/abort_request", dependencies=admin)
async def abort_request(service: Uses, body: schema.AbortRid) -> schema.Aborted:
    """End one request by its exact id, or all; callers get what there is."""
    if not body.rid and not body.abort_all:
        raise BadInput("send rid, or abort_all: true")
    ended = await service.generations.abort(None if body.abort_all else [body.rid or ""])
    where = f"; not reached: {', '.join(ended.unreached)}" if ended.unreached else ""
    return schema.Aborted(message=f"{ended.requests} requests ended{where}", aborted=ended.requests)


@router.get("/model_info", dependencies=data)
@router.get("/get_model_info", dependencies=data)
async def model_info(service: Uses) -> schema.ModelInfo:
    """What is served."""
    model = service.model
    return schema.ModelInfo(
        model_path=str(model.path),
        tokenizer_path=str(model.path) if model.tokenizer is not None else "",
        weight_version=service.versions.live,
        weight_digest=service.versions.live_digest,
        architectures=[model.architecture],
    )


@router.post("/release_memory_occupation", dependencies=admin)
async def release_memory_occupation(service: Uses, body: schema.MemoryTags | None = None) -> schema.Said:
    """Release parameters, KV or both on every rank. Again is a clean reply."""
    tags = _tags(body)
    freed = await service.control.clear(tags) if tags else 0
    return schema.Said(message=f"{freed} bytes released")


@router.post("/resume_memory_occupation", dependencies=admin)
async def resume_memory_occupation(service: Uses, body: schema.MemoryTags | None = None) -> schema.Said:
    """Bring back what was released, at the live version. Again is a clean reply."""
    if tags := _tags(body):
        await service.control.reload(tags)
    return schema.Said(message="memory is back")


@router.post("/weights_checker", dependencies=admin, response_model=schema.WeightsChecked, responses=NOT_RIGHT)
async def weights_checker(service: Uses, body: schema.WeightsChecker | None = None) -> Response:
    """Checksum what every rank holds, or keep it as a snapshot to compare with later. What is served is never reset."""
    body = body or schema.WeightsChecker()
    checks, skip = service.weight_checks, body.skip_tensor_list or []
    if body.selector == "draft":
        raise BadInput("selector draft: a drafting layer is part of the model here; send all or target")
    match body.action:
        case "reset_tensors":
            return Json({"success": False, "message": weight_checks.READ_ONLY}, 400)
        case "snapshot":
            version = service.versions.live
            count = await checks.snapshot(version)
            return Json({"success": True, "message": f"{count} digests of version {version} are kept"})
        case "compare" if body.baseline is None:
            wrong = await checks.compare(skip)
            shown = ", ".join(wrong[: weight_checks.SHOWN])
            text = f"{len(wrong)} tensors differ from the snapshot: {shown}" if wrong else "as in the snapshot"
            reply = {"success": not wrong, "message": text, "match": not wrong, "mismatches": wrong}
            return Json(reply, 400 if wrong else 200)
    found = await checks.checksums(skip)
    flat = info.flat_checksums(found)
    if body.action == "compare":
        wrong = info.mismatches(
            flat, {k: v for k, v in (body.baseline or {}).items() if not weight_checks.skipped(k, skip)}
        )
        return Json({"success": True, "message": "", "match": not wrong, "mismatches": wrong})
    ranks = weight_checks.per_rank(found, service.config.tp)
    total = weight_checks.per_engine(ranks)
    return Json({"success": True, "message": "", "ranks": ranks, "per_engine_checksum": total, "checksums": flat})


@router.post("/get_weights_by_name", dependencies=admin)
async def get_weights_by_name(body: schema.WeightsByName, service: Uses) -> list[Any]:
    """The first rows of a live parameter, under any of its names."""
    return await parameters.rows(service.weights, body.name, body.truncate_size)


@router.get("/v1/loads", dependencies=data)
async def v1_loads(
    service: Uses,
    dp_rank: Annotated[int | None, Query(ge=0, lt=1 << 31)] = None,
    form: Annotated[Literal["json"], Query(alias="format")] = "json",
) -> schema.LoadsV1:
    """Load per replica, now; or of one. As JSON only: /metrics has it for Prometheus."""
    found = await loads.now(service.fleet)
    if dp_rank is not None and not (found := [load for load in found if load.dp_rank == dp_rank]):
        raise BadInput(f"dp_rank {dp_rank}: there is no such replica")
    return schema.LoadsV1(loads=found)


@router.get("/get_load", dependencies=data)
async def get_load(service: Uses) -> list[schema.Loads]:
    """Load per replica, as a list."""
    return await loads.now(service.fleet)


def _tags(body: schema.MemoryTags | None) -> tuple[Tag, ...]:
    if body is None or not body.tags:
        return ("weights", "kv_cache")
    return tuple(tag for tag in dict.fromkeys(body.tags) if tag != "cuda_graph")

"""vLLM's control routes for RL trainers: pauses, the four-phase weight update, checks, sleep."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query

from api import info
from api.auth import require_admin, require_data
from api.errors import BadInput
from api.http_push import HttpPush
from api.replies import Json
from api.schemas import vllm as schema
from api.schemas.base import ERRORS
from api.service import Uses
from api.weight_checks import READ_ONLY
from worker.messages import PauseMode, Tag

router = APIRouter(tags=["vllm"], responses=ERRORS)
data = [Depends(require_data)]
admin = [Depends(require_admin)]

UPDATE_S = 300.0
"""How long a bucket may take to arrive, and a commit to go through."""
ALL_TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
Mode = Literal["abort", "wait", "keep"]


async def _push(service: Uses) -> HttpPush:
    return service.http_push


Push = Annotated[HttpPush, Depends(_push)]


@router.post("/pause", dependencies=admin)
async def pause(service: Uses, mode: Mode = "abort", clear_cache: bool = True) -> schema.Status:
    """keep freezes what runs: with clear_cache its KV is computed anew on resume, without it stays."""
    how: PauseMode = "recompute" if mode == "keep" and clear_cache else mode
    await service.control.pause(how, clear_cache=clear_cache, deadline_s=service.config.control_timeout_s)
    return schema.Status(status="paused")


@router.post("/resume", dependencies=admin)
async def resume(service: Uses) -> schema.Status:
    """Go on. Idempotent."""
    await service.control.resume()
    return schema.Status(status="resumed")


@router.get("/is_paused", dependencies=data)
async def is_paused(service: Uses) -> schema.IsPaused:
    """Whether somebody paused."""
    return schema.IsPaused(is_paused=service.control.paused)


@router.post("/abort_requests", dependencies=admin)
async def abort_requests(service: Uses, body: schema.AbortRequests | None = None) -> schema.AbortedRequests:
    """End requests by exact id; none named = all."""
    ids = body.request_ids if body and body.request_ids else None
    return schema.AbortedRequests(status="aborted", aborted=await service.generations.abort(ids))


@router.post("/init_weight_transfer_engine", dependencies=admin)
async def init_weight_transfer_engine(service: Uses, body: schema.InitTransfer | None = None) -> schema.TransferReady:
    """Where to push. Anything but ZMQ is refused: a trainer would wait in a rendezvous that nobody joins."""
    asked = body.init_info if body else {}
    other = [key for key in asked if key != "backend"]
    if other or asked.get("backend", "zmq") != "zmq":
        raise BadInput(
            f"init_info names {', '.join(other[:8]) or 'another backend'}: weights arrive over ZMQ here, not NCCL, "
            f'IPC or RDT. Send {{"init_info": {{"backend": "zmq"}}}} and push with '
            f"rollout_client.WeightPublisher({service.push_endpoint!r}, run_id=...), or through an adapter of "
            "rollout_client.adapters (docs/trainers)"
        )
    return schema.TransferReady(
        message="weight transfer is ready",
        endpoints=[service.push_endpoint],
        weight_version=service.versions.live,
    )


@router.post("/start_weight_update", dependencies=admin)
async def start_weight_update(push: Push) -> schema.Message:
    """Open an update; 409 while one is open."""
    push.start()
    return schema.Message(message="weight update started")


@router.post("/update_weights", dependencies=admin)
async def update_weights(body: schema.UpdateWeights, push: Push) -> schema.Message:
    """Answers once this bucket has arrived over ZMQ and is intact; or takes a directory to load."""
    if body.weight_dir is not None:
        await push.update_from(body.weight_dir, timeout_s=UPDATE_S)
    elif body.update_info is not None:
        await push.update(body.update_info.names, timeout_s=UPDATE_S)
    return schema.Message(message="weights updated")


@router.post("/finish_weight_update", dependencies=admin)
async def finish_weight_update(push: Push, body: schema.FinishUpdate | None = None) -> schema.Message:
    """The version moves here, on every replica or on none."""
    await push.finish(body.weight_version if body else None, timeout_s=UPDATE_S)
    return schema.Message(message="weight update finished")


@router.post("/shutdown_weight_transfer_engine", dependencies=admin)
async def shutdown_weight_transfer_engine(push: Push) -> schema.Message:
    """Forget an update that is open."""
    push.close()
    return schema.Message(message="weight transfer is shut down")


@router.get("/weight_info", dependencies=data)
async def weight_info(service: Uses) -> schema.WeightInfo:
    """The name of the live version."""
    return schema.WeightInfo(weight_version=service.versions.live)


@router.post("/weight_checker", dependencies=admin, response_model_exclude_none=True)
async def weight_checker(service: Uses, body: schema.WeightChecker) -> schema.WeightCheck:
    """Checksum what every rank holds, or compare it to an earlier answer."""
    if body.action == "reset":
        raise BadInput(READ_ONLY)
    if body.action == "compare" and body.baseline is None:
        raise BadInput("compare needs a baseline: the checksums of an earlier answer")
    found = info.flat_checksums(await service.control.verify())
    if body.baseline is None or body.action == "checksum":
        return schema.WeightCheck(checksums=found)
    wrong = info.mismatches(found, body.baseline)
    return schema.WeightCheck(match=not wrong, mismatches=wrong)


@router.get("/get_world_size", dependencies=data)
async def get_world_size(service: Uses, include_dp: bool = True) -> schema.WorldSize:
    """Ranks of all replicas, or of one."""
    return schema.WorldSize(world_size=info.world_size(service) if include_dp else service.config.tp)


@router.post("/sleep", dependencies=admin)
async def sleep(service: Uses, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Mode = "abort") -> schema.Sleeping:
    """Pause; from level 1 on, release parameters and KV too. The live version stays with the store."""
    await service.control.pause(mode, deadline_s=service.config.control_timeout_s)
    if level:
        await service.control.clear(ALL_TAGS)
    return schema.Sleeping(status="sleeping", level=level)


@router.post("/wake_up", dependencies=admin)
async def wake_up(service: Uses, tags: Annotated[list[Tag] | None, Query(max_length=16)] = None) -> schema.Awake:
    """Bring back what the tags name, or everything; generation goes on once nothing is missing."""
    await service.control.reload(tuple(tags) if tags else ALL_TAGS)
    if service.fleet.cleared:
        return schema.Awake(status="sleeping", tags=list(tags) if tags else None)
    await service.control.resume()
    return schema.Awake(status="awake", tags=list(tags) if tags else None)


@router.get("/is_sleeping", dependencies=data)
async def is_sleeping(service: Uses) -> schema.IsSleeping:
    """Whether anything is released."""
    return schema.IsSleeping(is_sleeping=bool(service.fleet.cleared))


@router.post("/reset_prefix_cache", dependencies=admin)
async def reset_prefix_cache(service: Uses) -> schema.Success:
    """Forget cached prefixes; success false while running sequences hold some."""
    return schema.Success(success=await service.control.reset_prefix_cache())


@router.get("/server_info", dependencies=data, response_model=schema.ServerInfo)
@router.get("/get_server_info", dependencies=data, response_model=schema.ServerInfo)
async def server_info(service: Uses, config_format: str = "json") -> Json:
    """One JSON for vLLM's and SGLang's clients."""
    return Json(info.server_info(service))

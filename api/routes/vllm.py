"""vLLM's control routes for RL trainers: pauses, the four-phase weight update, checks, sleep."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query

from api import info
from api.auth import require_admin, require_data
from api.errors import BadInput
from api.generation import Aborted
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
WakeTag = Literal["weights", "kv_cache", "scheduling"]


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
    return _aborted(await service.generations.abort(ids))


@router.post("/inference/v1/abort_requests", dependencies=data)
async def abort_own_requests(service: Uses, body: schema.AbortNamed) -> schema.AbortedRequests:
    """End requests by the exact ids that their client gave them. All of them: /abort_requests, for operators."""
    return _aborted(await service.generations.abort(body.request_ids))


def _aborted(ended: Aborted) -> schema.AbortedRequests:
    return schema.AbortedRequests(status="aborted", aborted=ended.requests, unreached=list(ended.unreached))


@router.post("/init_weight_transfer_engine", dependencies=admin)
async def init_weight_transfer_engine(service: Uses, body: schema.InitTransfer | None = None) -> schema.TransferReady:
    """Where to push. Anything but ZMQ is refused: a trainer would wait in a rendezvous that nobody joins."""
    asked = body.asked if body else {}
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
async def wake_up(service: Uses, tags: Annotated[list[WakeTag] | None, Query(max_length=16)] = None) -> schema.Awake:
    """Bring back what the tags name, or everything; generation goes on once nothing is missing.

    The tag scheduling names no memory: it is all that there is to bring back after level 0.
    """
    memory: tuple[Tag, ...] = tuple(tag for tag in tags if tag != "scheduling") if tags else ALL_TAGS
    if memory:
        await service.control.reload(memory)
    if service.fleet.intents.cleared:
        return schema.Awake(status="sleeping", tags=list(tags) if tags else None)
    await service.control.resume()
    return schema.Awake(status="awake", tags=list(tags) if tags else None)


@router.get("/is_sleeping", dependencies=data)
async def is_sleeping(service: Uses) -> schema.IsSleeping:
    """Whether anything is released."""
    return schema.IsSleeping(is_sleeping=bool(service.fleet.intents.cleared))


@router.post("/reset_prefix_cache", dependencies=admin)
async def reset_prefix_cache(
    service: Uses, reset_running_requests: bool = False, reset_external: bool = False
) -> schema.Success:
    """Forget cached prefixes; success false while running sequences hold some. There is no external cache to reset."""
    if reset_running_requests:
        raise BadInput(
            "reset_running_requests: running sequences keep their KV; POST /pause?mode=keep&clear_cache=true, then "
            "/resume, have it computed again"
        )
    return schema.Success(success=await service.control.reset_prefix_cache())


@router.post("/release_kv_cache_memory", dependencies=admin)
async def release_kv_cache_memory(service: Uses) -> schema.Status:
    """Release the KV cache on every rank; /wake_up?tags=kv_cache brings it back. Requests are held meanwhile."""
    await service.control.clear(("kv_cache",))
    return schema.Status(status="kv_cache_released")


@router.post("/collective_rpc", dependencies=admin)
async def collective_rpc(service: Uses, body: schema.CollectiveRpc) -> schema.RpcResults:
    """What every rank answers to one of two methods. Workers run no other code of a caller's choice."""
    match body.method:
        case "check_health":
            await service.control.verify_loops()
            return schema.RpcResults(results=[None] * info.world_size(service))
        case "compute_weight_checksums":
            found = (await service.control.verify()).items()
            ranks = [{replica: {rank: names}} for replica, held in found for rank, names in held.items()]
            return schema.RpcResults(results=[info.flat_checksums(rank) for rank in ranks])
    raise BadInput(
        f"method {body.method[:80]!r} is not offered: workers run check_health and compute_weight_checksums only, and "
        "no code of a client's. Weights arrive over ZMQ: push with rollout_client.WeightPublisher"
        f"({service.push_endpoint!r}, run_id=...), or load a directory with /update_weights. For the rest there are "
        "/pause, /resume, /sleep, /wake_up, /reset_prefix_cache and /abort_requests"
    )


@router.get("/version", dependencies=data)
async def version() -> schema.Release:
    """The version of this service: vLLM's clients ask for its own."""
    return schema.Release(version=info.SERVER_VERSION)


@router.get("/load", dependencies=data)
async def load(service: Uses) -> schema.ServerLoad:
    """Requests that run or are held."""
    return schema.ServerLoad(server_load=service.generations.open)


@router.get("/server_info", dependencies=data, response_model=schema.ServerInfo)
@router.get("/get_server_info", dependencies=data, response_model=schema.ServerInfo)
async def server_info(service: Uses, config_format: str = "json") -> Json:
    """One JSON for vLLM's and SGLang's clients."""
    return Json(info.server_info(service))

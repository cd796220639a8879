"""LoRA adapters, /v1/rollout/adapters: what is loaded; load, unload and roll back. Pushes go to the weight store."""

from fastapi import APIRouter, Depends

from api.auth import require_admin, require_data
from api.schemas import adapters as schema
from api.schemas.base import ERRORS
from api.schemas.rollout import Ok
from api.service import Uses

router = APIRouter(prefix="/v1/rollout/adapters", tags=["rollout"], responses=ERRORS)
admin = [Depends(require_admin)]


@router.get("", dependencies=[Depends(require_data)])
async def adapters(service: Uses) -> schema.AdaptersResponse:
    """Every adapter that is loaded, or is being pushed for the first time."""
    return schema.AdaptersResponse(adapters=service.adapters.described())


@router.post("/load", dependencies=admin)
async def load(body: schema.AdapterLoadRequest, service: Uses) -> schema.AdapterReport:
    """Make a directory the adapter's next version, on every replica or on none; the first time loads it."""
    report = await service.weights.load_adapter(
        body.name,
        body.path,
        version=body.version,
        in_flight=body.in_flight,
        deadline_s=body.deadline_s,
        force=body.force,
    )
    return schema.AdapterReport(name=body.name, version=report["version"], report=report)


@router.post("/unload", dependencies=admin)
async def unload(body: schema.AdapterUnloadRequest, service: Uses) -> Ok:
    """Begin nothing under this name any more, on every replica; what runs ends on the version it has."""
    await service.weights.unload_adapter(body.name, deadline_s=body.deadline_s)
    return Ok()


@router.post("/rollback", dependencies=admin)
async def rollback(body: schema.AdapterRollbackRequest, service: Uses) -> schema.AdapterReport:
    """Make the adapter's previous version live again; 409 when it is not kept any more."""
    report = await service.weights.rollback_adapter(body.name, in_flight=body.in_flight, deadline_s=body.deadline_s)
    return schema.AdapterReport(name=body.name, version=report["version"], report=report)


@router.post("/abort", dependencies=admin)
async def abort(body: schema.AdapterAbortRequest, service: Uses) -> Ok:
    """End the push of this adapter that is in progress; what is served does not change."""
    await service.weights.abort_session(body.reason, adapter=body.name)
    return Ok()

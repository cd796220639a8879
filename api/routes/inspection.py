"""What the live slot holds, by digest or by value, and the way back to the previous version. Admin only."""

import base64
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from api.auth import require_admin
from api.schemas import inspection as schema
from api.schemas.base import ERRORS
from api.service import Uses

router = APIRouter(
    prefix="/v1/rollout/weights", tags=["rollout"], responses=ERRORS, dependencies=[Depends(require_admin)]
)


@router.post("/rollback")
async def rollback(service: Uses, body: schema.RollbackRequest | None = None) -> schema.RollbackResponse:
    """Make the previous version live again; 409 when it is not kept any more, and while a push runs."""
    body = body or schema.RollbackRequest()
    report = await service.weights.rollback(in_flight=body.in_flight, deadline_s=body.deadline_s)
    return schema.RollbackResponse(version=report["version"], report=report)


@router.post("/checksums")
async def checksums(service: Uses, body: schema.ChecksumsRequest | None = None) -> schema.SlotChecksums:
    """Digests of what the store holds, per rank and tensor, compared with a baseline if there is one.

    `/v1/rollout/weights/verify` asks the ranks instead, for what they really compute with.
    """
    found = await service.weights.checksums((body or schema.ChecksumsRequest()).baseline)
    return schema.SlotChecksums.model_validate(found)


@router.get("/tensor")
async def tensor(
    service: Uses,
    name: Annotated[str, Query(max_length=1024)],
    offset: Annotated[int, Query(ge=0, le=1 << 50)] = 0,
    limit: Annotated[int, Query(ge=1, le=4 << 20)] = 1 << 20,
) -> schema.TensorBytes:
    """Bytes of one live tensor, under any of its names; at most 4 MiB at a time."""
    found = await service.weights.tensor(name, offset=offset, limit=limit)
    data = base64.b64encode(found.pop("bytes")).decode()
    return schema.TensorBytes(**found, data=data)

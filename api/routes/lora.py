"""Loading and unloading adapters in the words of vLLM and of SGLang; trainers push theirs (docs/lora.md)."""

from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import PlainTextResponse, Response

from api.auth import require_admin
from api.errors import ApiError, BadInput, NotFound, status_of
from api.replies import Json
from api.schemas import lora as schema
from api.schemas.base import ERRORS, ErrorBody
from api.service import Service, Uses

router = APIRouter(responses=ERRORS, dependencies=[Depends(require_admin)])

NOT_DONE: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.AdapterUpdated | ErrorBody, "description": "Nothing changed."} for status in ("4XX", "5XX")
}


@router.post("/v1/load_lora_adapter", tags=["vllm"], response_class=PlainTextResponse)
async def load(body: schema.LoadVllmAdapter, service: Uses) -> str:
    """Make a directory that PEFT saved an adapter's next version; answered when every replica serves it.

    load_inplace: of an adapter that is loaded; its sequences go on with the new version, and a span begins.
    """
    await service.adapters.check_new(body.lora_name, in_place=body.load_inplace)
    await service.weights.load_adapter(body.lora_name, body.lora_path)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@router.post("/v1/unload_lora_adapter", tags=["vllm"], response_class=PlainTextResponse)
async def unload(body: schema.UnloadAdapter, service: Uses) -> str:
    """Unload an adapter: its name is unknown from now on, what runs with it goes on to its end."""
    try:
        await service.weights.unload_adapter(body.lora_name)
    except NotFound as error:
        message = f"The lora adapter '{body.lora_name}' cannot be found."
        raise NotFound(message, code=error.code, param="lora_name") from None
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


@router.post("/load_lora_adapter", tags=["sglang"], response_model=schema.AdapterUpdated, responses=NOT_DONE)
async def load_sglang(body: schema.LoadSglangAdapter, service: Uses) -> Response:
    """Load an adapter for SGLang's clients. A name that is loaded has to be unloaded first."""
    try:
        await service.adapters.check_new(body.lora_name, in_place=False)
        await service.weights.load_adapter(body.lora_name, body.lora_path)
    except ApiError as error:
        return _updated(service, error)
    return _updated(service)


@router.post("/unload_lora_adapter", tags=["sglang"], response_model=schema.AdapterUpdated, responses=NOT_DONE)
async def unload_sglang(body: schema.UnloadAdapter, service: Uses) -> Response:
    """Unload an adapter for SGLang's clients."""
    try:
        await service.weights.unload_adapter(body.lora_name)
    except ApiError as error:
        return _updated(service, error)
    return _updated(service)


def _updated(service: Service, error: ApiError | None = None) -> Json:
    """SGLang answers what it cannot do with 400; what may be tried again keeps its own status here."""
    names = {name: name for name in sorted(service.weights.adapters)}
    said = {"success": error is None, "error_message": error and error.message, "loaded_adapters": names}
    if error is None:
        return Json(said)
    return Json(said, 400 if isinstance(error, BadInput | NotFound) else status_of(error))

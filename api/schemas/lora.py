"""Bodies of the routes by which clients of vLLM and SGLang load and unload adapters."""

from typing import Annotated, Literal

from pydantic import Field

from api.schemas.base import Asked, Lenient, LoraName

Directory = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadVllmAdapter(Asked):
    """Body of vLLM's /v1/load_lora_adapter."""

    lora_name: LoraName
    lora_path: Directory
    """A directory that PEFT saved, below the roots that the operator allows."""
    load_inplace: bool = False
    """True: replace the adapter of this name. False: a name that is loaded is refused."""
    is_3d_lora_weight: Literal[False] = False
    """Experts of an adapter are named one by one, as PEFT saves them."""


class UnloadAdapter(Asked):
    """Body of vLLM's /v1/unload_lora_adapter, and of SGLang's /unload_lora_adapter."""

    lora_name: LoraName


class LoadSglangAdapter(Asked):
    """Body of SGLang's /load_lora_adapter."""

    lora_name: LoraName
    lora_path: Directory
    """A directory that PEFT saved, below the roots that the operator allows."""
    pinned: bool = False
    """Every adapter stays loaded until it is unloaded: this changes nothing."""


class AdapterUpdated(Lenient):
    """Whether the adapter was loaded or unloaded, and which are loaded now."""

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]
    """Names of the loaded adapters, each mapped to itself: SGLang has the path there."""

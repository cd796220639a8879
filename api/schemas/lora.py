"""Bodies of the routes by which clients of vLLM and SGLang load and unload adapters."""

from typing import Annotated, Literal

from pydantic import Field

from api.schemas.base import Asked, Lenient, LoraName

Directory = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadVllmAdapter(Asked):
    """/v1/load_lora_adapter."""

    lora_name: LoraName
    lora_path: Directory
    """A directory that PEFT saved, below the roots that the operator allows."""
    load_inplace: bool = False
    """Replace the one of this name; without it a name that is loaded is refused."""
    is_3d_lora_weight: Literal[False] = False
    """Experts of an adapter are named one by one, as PEFT saves them."""


class UnloadAdapter(Asked):
    """/v1/unload_lora_adapter, and SGLang's /unload_lora_adapter."""

    lora_name: LoraName


class LoadSglangAdapter(Asked):
    """/load_lora_adapter."""

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
    """Every name, to itself."""

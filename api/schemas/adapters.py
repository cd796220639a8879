"""LoRA adapters over the native routes: what is loaded, and how to load, unload and go back."""

from typing import Annotated, Any, Literal

from pydantic import Field

from api.schemas.base import Strict, Version

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Name of an adapter: what requests give as their model."""
AdapterInFlight = Literal["keep", "recompute", "abort", "wait", "finish"]


class Adapter(Strict):
    """One adapter, as the store says. version None: its first push is still on its way."""

    name: str
    run_id: str | None
    version: int | None
    epoch: int | None
    """Number of the commit that made it live, in the one row of numbers that the model's and all adapters' commits
    have.
    """
    digest: str | None
    rank: int
    """The largest rank among its modules."""
    modules: int
    dtype: str
    bytes: int
    """Size of one version."""
    shared_memory_bytes: int
    """Size of all versions that are kept."""
    previous: dict[str, Any] | None
    """What a rollback goes back to."""
    session: dict[str, Any] | None
    """The push of this adapter that is in progress; None = there is none."""
    last_error: dict[str, Any] | None
    last_push: dict[str, Any] | None
    replicas: dict[str, int | None]
    """Replica -> epoch that the name stands for there; None: nothing."""


class AdaptersResponse(Strict):
    """Every adapter that is loaded, or is being pushed for the first time, by name."""

    adapters: list[Adapter]


class AdapterLoadRequest(Strict):
    """A directory that PEFT saved (adapter_config.json, adapter_model.safetensors), below the configured roots."""

    name: AdapterName
    path: str = Field(min_length=1, max_length=4096)
    version: Version | None = None
    """Number of the new version; None = one above the live one."""
    in_flight: AdapterInFlight = "keep"
    """What becomes of running sequences of this adapter; finish: they stay on the version they began with."""
    deadline_s: float = Field(default=60.0, gt=0, le=3600)
    force: bool = False
    """Accept a version that is not above the live one."""


class AdapterUnloadRequest(Strict):
    """The adapter to unload."""

    name: AdapterName
    deadline_s: float = Field(default=60.0, gt=0, le=3600)


class AdapterRollbackRequest(Strict):
    """The adapter to roll back, and what becomes of its running sequences."""

    name: AdapterName
    in_flight: AdapterInFlight = "keep"
    deadline_s: float = Field(default=60.0, gt=0, le=3600)


class AdapterAbortRequest(Strict):
    """The adapter whose push is to end, and why."""

    name: AdapterName
    reason: str = Field(default="aborted by an operator", max_length=1024)


class AdapterReport(Strict):
    """What the commit that made a version of the adapter live has reported."""

    name: str
    version: int
    report: dict[str, Any]

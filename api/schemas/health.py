"""Bodies of the health routes."""

from pydantic import BaseModel


class ReplicaHealth(BaseModel):
    """One replica."""

    replica: int
    state: str
    version: int | None
    digest: str = ""
    ready: bool
    reason: str = ""
    kernels: str = ""
    """What computes: compiled (full speed), onednn (no C compiler: half of it), paddle; empty until it has said so."""
    kernels_why: str = ""
    """Why a CPU does not run at full speed."""
    deterministic: str = ""
    """on: a token's bits do not depend on what else is in its step; else why not. Empty until it has said so."""


class Health(BaseModel):
    """The service. ready: some replica serves what is live (or would, were it not paused)."""

    status: str
    ready: bool
    paused: bool
    weight_version: int | None
    weight_digest: str | None = None
    store_connected: bool
    fenced: bool = False
    """The fleet of weight stores may have gone on without this one's: it must catch up first."""
    in_arena: bool = True
    """False: what is served is in the memory of devices only, for as long as shared memory has not got it yet."""
    lost_version: int | None = None
    """Was served from device memory and is gone with it: an older version is served until a next one comes."""
    replicas: list[ReplicaHealth]


class Alive(BaseModel):
    """Answer of /live: the process answers."""

    status: str = "ok"
    uptime_s: float


class GenerateHealth(BaseModel):
    """generated: a token was made; false while paused, cleared or too busy, when only the loops were asked."""

    status: str = "ok"
    generated: bool

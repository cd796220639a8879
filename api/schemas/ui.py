"""What the status page is sent: everything it shows, once a second."""

from typing import Any

from pydantic import BaseModel

from api.schemas.adapters import Adapter
from api.schemas.rollout import LiveVersion


class RankView(BaseModel):
    """One process of a replica."""

    rank: int
    pid: int | None
    alive: bool
    rss_bytes: int


class ReplicaView(BaseModel):
    """One replica; numbers are 0 until it has been heard of."""

    replica: int
    state: str
    reason: str
    version: int | None
    digest: str
    ready: bool
    running: int
    waiting: int
    held: int
    kv_blocks_used: int
    kv_blocks: int
    lost: int
    """How many times its connection was lost."""
    ranks: list[RankView]


class PauseView(BaseModel):
    """A pause in force."""

    mode: str
    since: float
    """Seconds since 1970."""
    lease_left_s: float | None
    """None: until somebody resumes, or the replicas hold the lease."""


class PlotView(BaseModel):
    """Seconds from `start` (since 1970) on, one number each."""

    start: int
    tokens: list[float]
    wasted: list[float]
    stall_ms: list[float]


class TroubleView(BaseModel):
    """Something that went wrong; times: in a row."""

    time: float
    source: str
    message: str
    times: int


class Snapshot(BaseModel):
    """The service as the status page shows it."""

    time: float
    name: str
    model: str
    uptime_s: float
    ready: bool
    store_connected: bool
    live: LiveVersion | None
    live_since: float | None
    """Seconds since 1970; None: not known."""
    skew: int
    pause: PauseView | None
    cleared: list[str]
    held: int
    """Requests that wait in the API."""
    open: int
    """Requests held or running."""
    generation_tokens: float
    wasted_tokens: float
    replicas: list[ReplicaView]
    session: dict[str, Any] | None
    """The push in progress, as in /v1/rollout/weights."""
    history: list[dict[str, Any]]
    """Versions that went live, newest last, with seconds per phase and stall per replica."""
    adapters: list[Adapter]
    """LoRA adapters, by name."""
    names: dict[str, str]
    """What trainers call versions of the history, where that is not their number; by number and digest, "7 0123..."."""
    plot: PlotView
    troubles: list[TroubleView]
    """Newest first."""

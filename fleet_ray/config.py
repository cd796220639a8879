"""What the fleet's process is told: the "fleet" part of run_dir/config.json."""

import json
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field


class FleetConfig(BaseModel):
    """Settings of the fleet's process; only there with `serve --ray`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "default"
    """Name of the service."""
    run_dir: Path
    """Run directory of the service, on the head."""
    address: str = Field(default="auto", pattern=r"^[^/]+$")
    """Address of the Ray cluster, host:port; auto = the one that this host belongs to. The head is one of its nodes."""
    replicas: int = Field(default=1, ge=0, le=4096)
    """How many there are to be at first; `paddle-rollout scale` changes it."""
    tp: int = Field(default=1, ge=1, le=64)
    """Ranks of a replica."""
    cpus_per_rank: float = Field(default=1.0, ge=0, le=1024)
    """CPUs that Ray sets aside for a rank; also its compute threads, unless worker.threads is set."""
    gpus_per_rank: float = Field(default=0.0, ge=0, le=64)
    """GPUs that Ray sets aside for a rank; 1 with --device gpu."""
    fan_out: int = Field(default=2, ge=0, le=1024)
    """How many stores a store feeds; with more nodes the stores form a tree. 1 = a chain; 0 = the head feeds all.
    docs/scaling.md says which is for what."""
    node_apis: bool = True
    """An API on every node that has a replica, so that its tokens need not pass the head (docs/scaling.md). Where
    others can reach the node, only with a data token."""
    api_port: int = Field(default=0, ge=0, le=65535)
    """HTTP port of those; 0 = any free one. GET /v1/rollout/apis says where they are."""
    head_host: str = ""
    """Where nodes reach the head; empty = its address in the Ray cluster."""
    drain_s: float = Field(default=10.0, ge=0, le=600)
    """How long running requests of a replica that leaves may take; worker.drain_s."""
    log_level: str = "info"
    """Least level of the JSON lines on stderr."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises OSError, or ValueError saying what is wrong."""
        document = json.loads(path.read_bytes())
        if not isinstance(document, dict) or not document.get("fleet"):
            raise ValueError(f'{path} has no "fleet" part')
        return cls.model_validate(document["fleet"])

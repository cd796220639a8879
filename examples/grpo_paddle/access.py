"""How a trainer reaches a service: two addresses, two tokens, and what the service serves at first."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Access:
    """One service, started here or by somebody else."""

    url: str
    """HTTP: rollouts come from here."""
    push_endpoint: str
    """ZMQ: weights go there."""
    data_token: str | None = None
    """Bearer token of the HTTP data routes."""
    push_token: str = ""
    """Shared secret of trainers."""
    transport: Literal["auto", "shm", "zmq"] = "auto"
    """How weights travel; auto = shared memory where the arena can be reached, ZMQ frames elsewhere."""
    run_id: str = "grpo-demo"
    """Names the training run; versions rise within it."""
    serves_ours: bool = True
    """Version 0 is the checkpoint that this trainer wrote; False = unknown weights that the first push replaces."""

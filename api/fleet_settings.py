"""What the fleet is told by the configuration."""

from dataclasses import dataclass

from rollout_client.curve import TrainerKeys


@dataclass
class FleetSettings:
    """Deadlines in seconds; see ApiConfig for what they mean to a user."""

    quiet_s: float = 6.0
    silence_s: float = 20.0
    stuck_s: float = 180.0
    unready_hold_s: float = 120.0
    paused_hold_s: float = 3600.0
    request_timeout_s: float = 3600.0
    keys: TrainerKeys | None = None
    """Of this process, for replicas on other hosts."""

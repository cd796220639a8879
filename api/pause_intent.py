"""That the fleet is to be paused, how, and until when."""

import time
from dataclasses import dataclass, field

from worker.messages import PauseMode


@dataclass
class PauseIntent:
    """The fleet is to be paused. lease_until: loop time, inf = until somebody resumes.

    adopted: learned from a replica by a restarted API; the replicas hold its lease.
    """

    mode: PauseMode
    clear_cache: bool = True
    lease_until: float = float("inf")
    since: float = field(default_factory=time.time)
    adopted: bool = False

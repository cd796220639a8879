"""What operators asked of the fleet, against the state in which a replica is first heard.

A restarted API learns from its replicas that they are paused or cleared. But what it was asked itself wins: a replica
whose link was down when the fleet was resumed or reloaded still stands as it stood, and must not teach the others.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worker.messages import Clear, Pause, PauseMode, Reload, Resume, Stats

if TYPE_CHECKING:
    from api.replica import Replica
    from api.replicas import Fleet


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


def meet(fleet: "Fleet", replica: "Replica", stats: Stats, now: float) -> None:
    """The first word on a replica's link. now: loop time."""
    paused = stats.state == "paused"
    if paused and fleet.paused is None:
        if fleet.resumed:
            replica.link.post(Resume(call="late"))
        else:
            fleet.paused = PauseIntent(mode=stats.pause_mode or "abort", adopted=True)
    elif fleet.paused is not None and not paused:
        lease_s = 0.0 if fleet.paused.lease_until == float("inf") else max(0.1, fleet.paused.lease_until - now)
        replica.link.post(Pause(call="late", mode=fleet.paused.mode, lease_s=lease_s))
    if stats.state != "cleared":
        return  # one that serves is cleared by `Fleet.changed`
    released, asked = set(stats.released), fleet.cleared - fleet.returning
    if not fleet.reloaded:
        fleet.cleared |= released
        asked = fleet.cleared
    elif released - asked:
        replica.link.post(Reload(call="late", tags=tuple(sorted(released - asked))))
    if asked - released:
        replica.link.post(Clear(call="late", tags=tuple(sorted(asked - released))))

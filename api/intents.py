"""What operators asked of all replicas, a pause and what is released, against how the replicas stand.

`Control` asks; this keeps it. Replicas that come back are brought to it, the other processes of the API hear of it, and
a lease of a pause that runs out ends it. A restarted API learns from its replicas that they are paused or cleared. But
what it was asked itself wins: a replica whose link was down when the fleet was resumed or reloaded still stands as it
stood, and must not teach the others.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from worker.messages import Clear, Pause, PauseMode, Reload, Resume, Stats, Tag

if TYPE_CHECKING:
    from api.processes.peers import Peers
    from api.replicas import Fleet, Replica

log = logging.getLogger(__name__)


@dataclass
class PauseIntent:
    """The fleet is to be paused. lease_until: loop time, inf = until somebody resumes.

    since: seconds since 1970, for people. began: the same by the system's monotonic clock, which nobody sets back.
    adopted: learned from a replica by a restarted API.
    """

    mode: PauseMode
    clear_cache: bool = True
    lease_until: float = float("inf")
    since: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    adopted: bool = False

    @property
    def age_s(self) -> float:
        """How long the fleet has been paused: to the end of the lease, whenever who looks finds that it is over."""
        return min(time.monotonic(), self.lease_until) - self.began

    def going_on_from(self, before: "PauseIntent | None") -> "PauseIntent":
        """This pause in the place of one that is in force: the fleet has been paused since that began."""
        return self if before is None else replace(self, since=before.since, began=before.began)


class Intents:
    """The pause and the releases in force, as one process of the API knows them."""

    def __init__(self, fleet: "Fleet", peers: "Peers | None", *, of_node: bool) -> None:
        """peers: the other API processes, if there are any. of_node: another API, on the head, decides."""
        self.returning: set[Tag] = set()  # of what is cleared, on its way back
        self.resumed = self.reloaded = False  # somebody asked for it since this process began
        self.lease_expiries = 0
        self._fleet = fleet
        self._peers = peers
        self._of_node = of_node
        self._paused: PauseIntent | None = None
        self._cleared: set[Tag] = set()
        self._paused_before = 0.0  # seconds of pauses that are over
        self._say()

    @property
    def leads(self) -> bool:
        """Whether this process decides what is asked of the fleet; the others do what it says (api/processes), or on
        other nodes what they see that it has asked of the replicas (api/nodes)."""
        return not self._of_node and (self._peers is None or self._peers.leads)

    @property
    def paused(self) -> PauseIntent | None:
        """The pause that was asked for."""
        return self._paused

    @paused.setter
    def paused(self, intent: PauseIntent | None) -> None:
        if intent is None:
            self._paused_before = self.paused_seconds
        self._paused = intent
        self._say()

    @property
    def cleared(self) -> set[Tag]:
        """What was released. Assign it, also what `|=` makes of it: the others have to be told."""
        return self._cleared

    @cleared.setter
    def cleared(self, tags: set[Tag]) -> None:
        self._cleared = tags
        self._say()

    @property
    def paused_seconds(self) -> float:
        """Time spent paused, the pause in force included."""
        return self._paused_before + (self.paused.age_s if self.paused else 0.0)

    def unpause(self) -> None:
        """The pause is over: held requests go."""
        self.resumed = True
        self.paused = None
        self._fleet.release_held()

    def heed(self, paused: PauseIntent | None, cleared: set[Tag], paused_before: float | None = None) -> None:
        """Take over what the lead says now. paused_before: seconds of the pauses that are over; None = it says none."""
        over = self._paused is not None and paused is None
        if paused_before is not None:
            self._paused_before = paused_before
        elif over:
            self._paused_before = self.paused_seconds
        self._paused, self._cleared = paused, cleared
        if over:
            self._fleet.count_unready_from_now()

    def look(self) -> bool:
        """Take over what the lead has said since the last look. Returns whether there was anything."""
        return self._peers is not None and not self._peers.leads and self._peers.look(self)

    def sweep(self, now: float) -> bool:
        """What the lead has said, and the pause's lease. now: loop time. Returns whether held requests may go."""
        news = self.look()
        if self.paused is None or now < self.paused.lease_until:
            return news
        if not self.leads:  # the replicas go on by themselves, whether there is a lead or not
            self.heed(None, self.cleared)
            return True
        log.warning("the lease of pause (%s) ran out: going on", self.paused.mode)
        self.lease_expiries += 1
        self.unpause()
        for replica in self._fleet.replicas:
            if replica.link.up:
                replica.link.post(Resume(call="lease"))
        return news

    def meet(self, replica: "Replica", stats: Stats) -> None:
        """The first word on a replica's link: bring it to what was asked of the others, or learn that from it."""
        if not self.leads:
            return
        paused = stats.state == "paused" or stats.pause_mode is not None  # which one that is cleared has, too
        if paused and self.paused is None:
            if self.resumed:
                replica.link.post(Resume(call="late"))
            else:
                left = float("inf") if stats.pause_left_s is None else stats.pause_left_s
                until = asyncio.get_running_loop().time() + left
                self.paused = PauseIntent(stats.pause_mode or "abort", lease_until=until, adopted=True)
        elif self.paused is not None and not paused:
            left = self.paused.lease_until - asyncio.get_running_loop().time()
            lease_s = 0.0 if left == float("inf") else max(0.1, left)
            replica.link.post(Pause("late", self.paused.mode, lease_s, self.paused.clear_cache))
        if stats.state != "cleared":
            return  # one that serves is cleared by `replicas_changed`
        released, asked = set(stats.released), self.cleared - self.returning
        if not self.reloaded:
            self.cleared |= released
            asked = self.cleared
        elif released - asked:
            replica.link.post(Reload(call="late", tags=tuple(sorted(released - asked))))
        if asked - released:
            replica.link.post(Clear(call="late", tags=tuple(sorted(asked - released))))

    def replicas_changed(self) -> None:
        """A replica's state moved: a pause a restarted API had learned may be over, one that came back is cleared."""
        states = {replica.state for replica in self._fleet.replicas}
        if not self.leads:
            if self._of_node:
                self._see(states)
            return
        stand_still = states & {"paused", "cleared"}
        if self.paused is not None and self.paused.adopted and "serving" in states and not stand_still:
            self.unpause()
        if self.cleared and not self.returning:
            for replica in self._fleet.replicas:
                if replica.state == "serving" and replica.link.up:  # it came back after the others were cleared
                    replica.link.post(Clear(call="late", tags=tuple(sorted(self.cleared))))

    def _see(self, states: set[str]) -> None:
        """The head of the fleet has paused or cleared all replicas, or has them go on: they say so themselves."""
        serving = "serving" in states
        stands = "paused" in states and not serving
        paused = PauseIntent("keep", adopted=True).going_on_from(self._paused) if stands else None
        released: set[Tag] = {"weights", "kv_cache"} if "cleared" in states and not serving else set()
        if (paused is None, released) != (self._paused is None, self._cleared):
            self.heed(paused, released)

    def _say(self) -> None:
        if self._peers is not None and self._peers.leads:
            self._peers.say(self._paused, self._cleared, self._paused_before)

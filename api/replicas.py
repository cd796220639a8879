"""Which replica serves what: readiness, least-loaded and sticky routing, held requests, lost replicas.

Everything here runs on the event loop and never awaits, so a decision and its effect cannot be separated
by another request. `Fleet.pump` is the one place where a flight is given to a replica; it runs whenever
something that could let one go has changed.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from api.errors import Conflict, EngineFailed, Unavailable
from api.flight import Flight
from api.intents import PauseIntent, meet
from api.link import LinkDown
from api.members import Members
from api.processes.board import home
from api.processes.peers import Peers
from api.replica import Replica
from rollout_client.curve import TrainerKeys
from weight_manager.messages import Live
from worker.messages import Clear, Resume, Stats, Tag


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
    place: str = ""
    """Name of this API among several of a fleet; "" = there are no others."""
    near: str | None = None
    """This API is a node's: it decides nothing, and prefers the replicas on this host; None = it is the head's."""


log = logging.getLogger(__name__)

SWEEP_S = 0.25
"""How late a deadline may be noticed."""
ELSEWHERE_S = 0.05
"""How late it may be noticed that no process of the API has anything running."""
RETRIED = "retried"
"""Name of that counter where several processes count."""
IDLE_SWEEP_S = 1.0
"""The same while no request is here and nothing is paused: only a pause that begins meanwhile may wait for it."""
LAST_WORD_S = 10.0
"""How long a replica may take to hand over what it has of a request that took too long."""
STICKY_SESSIONS = 65536
"""Sessions remembered for stickiness; the least recently used go first."""


class Fleet:
    """All replicas, the requests that wait for them, and what operators asked of all of them."""

    def __init__(self, endpoints: dict[int, str], settings: FleetSettings, peers: Peers | None = None) -> None:
        """peers: the other API processes, if there are any."""
        self.settings = settings
        self.peers = peers
        self.members = Members(self._replica, endpoints)
        self.held: deque[Flight] = deque()
        self.flights: set[Flight] = set()
        self.live: Live | None = None
        self._paused: PauseIntent | None = None
        self._cleared: set[Tag] = set()
        self.closing = False
        self.returning: set[Tag] = set()  # of what is cleared, on its way back
        self.resumed = self.reloaded = False  # somebody asked for it since this process began
        self.retried = self.lease_expiries = 0
        self._came = asyncio.Event()
        self._paused_before = 0.0  # seconds of pauses that are over
        self.on_stats: Callable[[Replica, Stats], None] = lambda replica, stats: None
        self.on_landed: Callable[[Flight], None] = lambda flight: None
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._say()

    async def run(self) -> None:
        """Keep every link going and every deadline kept, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.members.run())
            group.create_task(self._keep_time())

    @property
    def replicas(self) -> list[Replica]:
        """Those there are now, by index."""
        return self.members.replicas

    def set_members(self, endpoints: Mapping[int, str]) -> None:
        """From now on there are these (see members.py)."""
        if self.members.set(endpoints):
            self.changed()

    def _replica(self, index: int, endpoint: str) -> Replica:
        kept = self.settings
        waits = {"quiet_s": kept.quiet_s, "silence_s": kept.silence_s, "stuck_s": kept.stuck_s}
        name = kept.place if self.peers is None else f"{kept.place or 'api'}-{self.peers.index}"
        return Replica(index, endpoint, self, **waits, keys=kept.keys, name=name)

    # What operators asked of all replicas, and what other processes of the API must know

    @property
    def leads(self) -> bool:
        """Whether this process decides what is asked of the fleet; the others do what it says (api/processes), or on
        other nodes what they see that it has asked of the replicas (api/nodes)."""
        return self.settings.near is None and (self.peers is None or self.peers.leads)

    @property
    def paused(self) -> PauseIntent | None:
        """The pause that was asked for."""
        return self._paused

    @paused.setter
    def paused(self, intent: PauseIntent | None) -> None:
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

    def _say(self) -> None:
        if self.peers is not None and self.peers.leads:
            self.peers.say(self._paused, self._cleared)

    def heed(self, paused: PauseIntent | None, cleared: set[Tag]) -> None:
        """The lead says this now."""
        over = self._paused is not None and paused is None
        self._paused, self._cleared = paused, cleared
        if over:
            now = asyncio.get_running_loop().time()
            for flight in self.held:
                flight.unready_since = now

    def _look(self) -> bool:
        return self.peers is not None and not self.peers.leads and self.peers.look(self)

    def _count(self) -> None:
        if self.peers is not None:
            self.peers.board.count_requests(len(self.flights), len(self.held))
            self.peers.publish_loads(self.replicas)

    @property
    def open_everywhere(self) -> int:
        """Prompts held or running, in all processes of the API."""
        return len(self.flights) + (self.peers.board.open_elsewhere if self.peers else 0)

    @property
    def held_everywhere(self) -> int:
        """Those of them that no replica has got."""
        return len(self.held) + (self.peers.board.held_elsewhere if self.peers else 0)

    def load_of(self, replica: Replica) -> int:
        """Sequences that a replica works on, for all processes of the API."""
        return replica.load + (self.peers.board.load_elsewhere(replica.index) if self.peers else 0)

    async def _keep_time(self) -> None:
        while True:
            if self.peers is not None:
                self.peers.board.beat()
            if self.flights or self.paused is not None:
                await asyncio.sleep(SWEEP_S)
            else:
                self._came.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._came.wait(), IDLE_SWEEP_S)
            try:
                self.sweep(asyncio.get_running_loop().time())
            except Exception:  # deadlines are kept from here on, whatever this one met
                log.exception("deadlines could not be kept")

    @property
    def kv_tokens(self) -> float:
        """Tokens that the smallest replica's KV cache can hold; infinite before any has said."""
        sizes = [r.stats.kv_blocks_total * r.stats.block_size for r in self.replicas if r.stats is not None]
        return min(sizes, default=float("inf"))

    # Requests

    @property
    def running(self) -> int:
        """Requests that a replica has got, of all processes of the API."""
        own = sum(1 for flight in self.flights if not flight.held_since)
        board = self.peers.board if self.peers else None
        return own + (max(0, board.open_elsewhere - board.held_elsewhere) if board else 0)

    async def nothing_runs(self) -> None:
        """Return when no replica has a request any more, if only for a moment."""
        while True:
            while running := [flight.done.wait() for flight in self.flights if not flight.held_since]:
                await asyncio.gather(*running)
            if not self.running:
                return
            await asyncio.sleep(ELSEWHERE_S)

    def submit(self, flight: Flight) -> None:
        """Take a flight; it runs now or is held. Raises Unavailable while the service leaves."""
        if self.closing:
            raise Unavailable("the service is stopping; the request never ran")
        flight.started = asyncio.get_running_loop().time()
        self.flights.add(flight)
        self._came.set()
        flight.held_since = flight.unready_since = flight.started
        self.held.append(flight)
        self.pump()
        self._count()

    def close(self) -> None:
        """Take nothing more, and send away what is held: it never ran, so its clients may try elsewhere."""
        self.closing = True
        for flight in self.held:
            flight.fail(Unavailable("the service is stopping; the request never ran"))
            self.landed(flight)
        self.held.clear()
        self._count()

    def hold_again(self, flight: Flight) -> None:
        """Its replica died unseen: it is first in the line."""
        if self.closing:
            flight.fail(Unavailable("the service is stopping, and the replica is gone"))
            self.landed(flight)
            return
        self.retried += 1
        if self.peers is not None:
            self.peers.counts.add(RETRIED)
        flight.held_since = flight.unready_since = asyncio.get_running_loop().time()
        flight.start_version = None
        self.held.appendleft(flight)

    def cancel(self, flight: Flight) -> None:
        """End a flight: at once when it is held, otherwise as soon as its replica says so."""
        if flight.done.is_set():
            return
        if flight in self.held:
            self.held.remove(flight)
            flight.end_aborted(self.live.version if self.live else 0)
            self.landed(flight)
            return
        for replica in self.replicas:
            replica.cancel(flight)

    def heard(self, replica: Replica, stats: Stats) -> None:
        """New statistics of a replica."""
        self.on_stats(replica, stats)

    def cancel_all(self) -> None:
        """Every flight ends with what it has."""
        for flight in list(self.flights):
            self.cancel(flight)

    def drop(self, flight: Flight) -> None:
        """Nobody waits for it any more."""
        if flight.done.is_set():
            return
        if flight in self.held:
            self.held.remove(flight)
        for replica in self.replicas:
            replica.forget(flight)
        flight.end_aborted(self.live.version if self.live else 0)
        self.landed(flight)

    def landed(self, flight: Flight) -> None:
        """A flight ended, however it did."""
        self.flights.discard(flight)
        self._count()
        self.on_landed(flight)

    def pump(self) -> None:
        """Give every held flight that may run to a replica, in order."""
        if not self.held:
            return
        self._look()
        if self._paused is not None:
            return
        waiting: list[Flight] = []
        try:
            while self.held:
                if not self._started(flight := self.held.popleft()):
                    waiting.append(flight)
        finally:
            self.held.extendleft(reversed(waiting))
            self._count()

    def _started(self, flight: Flight) -> bool:
        """Whether the flight is off the line: it runs, or cannot be sent to anybody, which is its own failure alone."""
        try:
            replica = self._choose(flight)
            if replica is None:
                return False
            replica.send(flight)
        except LinkDown:
            return False
        except Exception as error:
            log.exception("a request could not be sent to a replica")
            flight.fail(EngineFailed(f"the request could not be sent to a replica: {type(error).__name__}"))
            self.landed(flight)
            return True
        flight.held_since = 0.0
        return True

    def _choose(self, flight: Flight) -> Replica | None:
        ready = [r for r in self.replicas if r.serves(self.live)]
        if flight.min_version is not None:
            ready = [r for r in ready if r.version is not None and r.version >= flight.min_version]
        if not ready:
            return None
        if self.peers is not None or self.settings.place:
            if flight.session:
                at = home(flight.session, (r.index for r in ready))
                return next(r for r in ready if r.index == at)
            near = [r for r in ready if r.host == self.settings.near] if self.settings.near else []
            return min(near or ready, key=lambda r: (r.in_long_step, self._busy(r)))
        if flight.session and (at_home := self._sessions.get(flight.session)) is not None:
            for replica in ready:
                if replica.index == at_home:
                    self._sessions.move_to_end(flight.session)
                    return replica
        best = min(ready, key=lambda r: (r.in_long_step, r.load))
        if flight.session:
            self._sessions[flight.session] = best.index
            if len(self._sessions) > STICKY_SESSIONS:
                self._sessions.popitem(last=False)
        return best

    def _busy(self, replica: Replica) -> int:
        """APIs of other nodes do not share what they know: a replica says what it has for all of them."""
        own = self.load_of(replica)
        return max(own, replica.said_load) if self.settings.place else own

    # What changes around them

    def set_live(self, live: Live | None) -> None:
        """The store says what is live. Ends flights that have become staler than they allow."""
        if live is None or live == self.live:
            return
        self.live = live
        for flight in list(self.flights):
            if flight.max_staleness is None or flight.start_version is None:
                continue
            if live.version - flight.start_version > flight.max_staleness:
                self.cancel(flight)
        self.changed()

    def joined(self, replica: Replica, stats: Stats) -> None:
        """First word of a replica: bring it to what was asked of the others, or learn that from it."""
        if self.leads:
            meet(self, replica, stats, asyncio.get_running_loop().time())

    def changed(self) -> None:
        """Something moved: a pause a restarted API had learned may be over, and held flights may go."""
        states = {replica.state for replica in self.replicas}
        if not self.leads:
            if self.settings.near is not None:
                self._see(states)
            self.pump()
            return
        if self.paused is not None and self.paused.adopted and "paused" not in states and "serving" in states:
            self.unpause()
        if self.cleared and not self.returning:
            for replica in self.replicas:
                if replica.state == "serving" and replica.link.up:  # it came back after the others were cleared
                    replica.link.post(Clear(call="late", tags=tuple(sorted(self.cleared))))
        self.pump()

    def _see(self, states: set[str]) -> None:
        """The head of the fleet has paused or cleared all replicas, or has them go on: they say so themselves."""
        serving = "serving" in states
        paused = PauseIntent("keep", adopted=True) if "paused" in states and not serving else None
        released: set[Tag] = {"weights", "kv_cache"} if "cleared" in states and not serving else set()
        if (paused is None, released) != (self._paused is None, self._cleared):
            self.heed(paused, released)

    @property
    def paused_seconds(self) -> float:
        """Time spent paused, the pause in force included."""
        return self._paused_before + (time.time() - self.paused.since if self.paused else 0.0)

    def unpause(self) -> None:
        """The pause is over."""
        self.resumed = True
        self._paused_before, self.paused = self.paused_seconds, None
        self.release_held()

    def release_held(self) -> None:
        """Let held flights go; from now on it counts against the replicas if they cannot take them."""
        now = asyncio.get_running_loop().time()
        for flight in self.held:
            flight.unready_since = now
        self.pump()

    def sweep(self, now: float) -> None:
        """Deadlines: the pause lease, held flights, running flights."""
        if self._look():
            self.pump()
        if not self.leads:
            if self.paused is not None and now >= self.paused.lease_until:
                self.heed(None, self.cleared)  # the replicas go on by themselves, whether there is a lead or not
                self.pump()
        elif self.paused is not None and now >= self.paused.lease_until:
            log.warning("the lease of pause (%s) ran out: going on", self.paused.mode)
            self.lease_expiries += 1
            self.unpause()
            for replica in self.replicas:
                if replica.link.up:
                    replica.link.post(Resume(call="lease"))
        for flight in [f for f in self.held if self._overdue(f, now)]:
            self.held.remove(flight)
            self.landed(flight)
        for flight in [f for f in self.flights if now - f.started >= self.settings.request_timeout_s]:
            if not flight.overdue:
                flight.overdue = True
                self.cancel(flight)  # its partial result is on the way
            elif now - flight.started >= self.settings.request_timeout_s + LAST_WORD_S:
                self.drop(flight)

    def _overdue(self, flight: Flight, now: float) -> bool:
        held_s = now - flight.held_since
        if flight.min_version is not None and now >= flight.deadline:
            current = self.live.version if self.live else None
            flight.fail(Conflict(f"waited for weight version {flight.min_version}; live is {current}"))
        elif self.paused is not None or self.cleared:
            if held_s < self.settings.paused_hold_s:
                return False
            what = "paused" if self.paused else "cleared"
            flight.fail(Unavailable(f"rollout is {what}; the request was held for {held_s:.0f} s and never ran"))
        elif now - flight.unready_since >= self.settings.unready_hold_s:
            why = "; ".join(f"replica {r.index} is {r.state}, {r.down_reason}" for r in self.replicas)
            flight.fail(Unavailable(f"no replica is ready ({why}); the request never ran"))
        else:
            return False
        return True

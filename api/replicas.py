"""Which replica serves what: each replica as the API sees it; least-loaded and sticky routing, held requests, deaths.

Everything here runs on the event loop and never awaits, so a decision and its effect cannot be separated
by another request. A flight is given to a replica when it comes, or by `Fleet.pump`, which runs whenever
something that could let one go has changed: that another one comes is no reason to look at those that are held.
"""

import asyncio
import contextlib
import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from api.config import ApiConfig
from api.errors import Conflict, EngineFailed, NotFound, Unavailable
from api.generation import Flight
from api.intents import Intents
from api.lanes import Lanes
from api.link import Link, LinkDown
from api.members import Members
from api.processes.board import home
from api.processes.peers import Peers
from rollout_client.curve import TrainerKeys
from weight_manager.messages import Live
from worker import messages
from worker.messages import Abort, CallFailed, Chunks, GetStats, StateChanged, Stats, ToApi, Tokens

log = logging.getLogger(__name__)

SWEEP_S = 0.25
"""How late a deadline may be noticed."""
ELSEWHERE_S = 0.05
"""How late it may be noticed that no process of the API has anything running."""
RETRIED = "retried"
"""Name of that counter where several processes count."""
IDLE_SWEEP_S = 1.0
"""How late a deadline may be noticed while no request is here and nothing is paused: a pause that begins meanwhile."""
LAST_WORD_S = 10.0
"""How long a replica may take to hand over what it has of a request that took too long."""
STICKY_SESSIONS = 65536
"""Sessions remembered for stickiness; the least recently used go first."""
UNREACHABLE = "unreachable"
REFUSED_FOR_S = 0.5
"""A replica that refused a request gets no other for this long."""


class Replica:
    """One replica as the API sees it."""

    def __init__(
        self,
        index: int,
        endpoint: str,
        fleet: "Fleet",
        config: ApiConfig,
        *,
        keys: TrainerKeys | None = None,
        name: str = "",
    ) -> None:
        """keys, name: of this process; for replicas on other hosts, and where several of the API talk to them."""
        self.index = index
        self._fleet = fleet
        self.state = UNREACHABLE
        self.version: int | None = None
        self.digest = ""  # of the version
        self.draining = False  # it admits nothing more and will exit
        self.host = urlsplit(endpoint).hostname if endpoint.startswith("tcp://") else None
        self.stats: Stats | None = None
        self.flights: dict[str, Flight] = {}
        self.load = 0  # sequences it is working on for us
        self.down_reason = "not there yet"
        self._full: asyncio.TimerHandle | None = None  # it has refused a request; until then
        self._members: list[tuple[str, int]] = []  # sequences of the last `Tokens`
        self._handles = array("q")  # of their lanes
        self._quiet_s = min(6.0, config.silence_s / 3)
        self.link: Link[ToApi] = Link(
            endpoint,
            self,
            encode=messages.encode,
            decode=messages.decode_to_api,
            quiet_s=self._quiet_s,
            silence_s=config.silence_s,
            stuck_s=max(config.stuck_s, config.silence_s),
            keys=keys if endpoint.startswith("tcp://") else None,
            name=name,
        )

    @property
    def lost(self) -> int:
        """Times that a replica of this number went away, wherever it was."""
        return self._fleet.lost[self.index]

    @property
    def said_load(self) -> int:
        """Sequences that it had, for whomever, when it last said so."""
        return 0 if self.stats is None else self.stats.running + self.stats.waiting + self.stats.held

    @property
    def in_long_step(self) -> bool:
        """Its process is there, and its loop has not been heard for longer than a step should take."""
        return self.link.up and self.link.silent_s >= self._quiet_s * 2

    @property
    def reason(self) -> str:
        """Why it is not there, or does not answer; empty when all is well."""
        if self.state == UNREACHABLE:
            return self.down_reason
        return f"in a long step: not heard for {self.link.silent_s:.0f} s" if self.in_long_step else ""

    def serves(self, live: Live | None) -> bool:
        """Ready: serving, and what it serves is what the store says is live (when the store has said so)."""
        if self.state != "serving" or self.version is None or self.draining or self._full is not None:
            return False
        return self._holds(live)

    def is_ready(self, live: Live | None) -> bool:
        """Whether it serves what is live, or would, were it not paused: requests are accepted then, and held."""
        return self.serves(live) or (self.state == "paused" and self._holds(live))

    def _holds(self, live: Live | None) -> bool:
        """A number alone may stand for other weights than the live ones."""
        return live is None or (self.version, self.digest) == (live.version, live.digest)

    def send(self, flight: Flight) -> None:
        """Start a flight here. Raises LinkDown."""
        message = flight.new_attempt()
        self.link.post(message)
        flight.start_version = self.version
        self.flights[message.request_id] = flight
        self.load += flight.open

    def cancel(self, flight: Flight) -> None:
        """Ask the replica to end it; its partial result comes as ordinary chunks."""
        if flight.attempt_id in self.flights and self.link.up:
            self.link.post(Abort(call="", request_ids=[flight.attempt_id]))

    def forget(self, flight: Flight) -> None:
        """End a flight that nobody waits for, and ignore what still comes of it."""
        self.cancel(flight)
        if self.flights.pop(flight.attempt_id, None) is not None:
            self.load -= flight.open

    def on_up(self) -> None:
        """Connected. Whatever still runs there belongs to a connection that is gone: end it."""
        log.info("replica %d: connected", self.index, extra={"replica": self.index})
        self.down_reason = "not at the live version"
        self.link.post(Abort(call="", request_ids=None))
        self.link.post(GetStats(call="hello"))

    def on_quiet(self) -> None:
        """Ask for a sign of life."""
        self.link.post(GetStats(call="ping"))

    def on_message(self, message: ToApi) -> None:
        """Chunks to their flights; state and statistics to the fleet."""
        match message:
            case Chunks(items=items):
                for chunk in items:
                    flight = self.flights.get(chunk.request_id)
                    if flight is None:
                        continue  # aborted, or of an attempt that was given up
                    before = flight.open
                    flight.add(chunk)
                    self.load -= before - flight.open
                    if flight.open == 0:
                        del self.flights[chunk.request_id]
                        self._fleet.landed(flight)
            case Tokens():
                self._go_on(message)
            case StateChanged():
                said = {"replica": self.index, "version": message.version, "state": message.state}
                why = f": {message.reason}" if message.reason else ""
                log.info("replica %d: %s%s", self.index, message.state, why, extra=said)
                self._moved(message)
            case Stats():
                first, self.stats = self.stats is None, message
                if first:
                    self._fleet.intents.meet(self, message)
                self._fleet.on_stats(self, message)
                self._moved(message)
            case CallFailed(call=call, code="unknown_adapter", message=text) if call in self.flights:
                flight = self.flights.pop(call)
                self.load -= flight.open
                flight.fail(NotFound(text, code="adapter_not_found", param="model"))
                self._fleet.landed(flight)
            case CallFailed(call=call, message=text) if call in self.flights:
                self._refused(self.flights.pop(call), text)
            case CallFailed(call=call, code=code, message=text) if not call.startswith("c"):
                said = {"replica": self.index, "code": code}
                log.error("replica %d refused %s: %s", self.index, call or "a message", text, extra=said)
            case _:
                pass

    def on_down(self, reason: str) -> None:
        """The link is down: flights nobody has seen a token of start over elsewhere, the others end as they are."""
        said = {"replica": self.index, "version": self.version, "requests": len(self.flights)}
        log.warning("replica %d lost: %s", self.index, reason, extra=said)
        flights, self.flights = self.flights, {}
        version, digest = self.version, self.digest
        self.version, self.digest = None, ""
        self.draining = False
        self.state, self.stats, self.load, self.down_reason = UNREACHABLE, None, 0, reason
        self._fleet.lost[self.index] += 1
        for flight in flights.values():
            self._start_over(flight, version, digest)
        self._fleet.changed()

    def _go_on(self, message: Tokens) -> None:
        lanes, (tokens, logprobs) = self._fleet.lanes, message.drawn()
        if message.members is not None:
            self._members = message.members
            if lanes is not None:
                self._handles = lanes.handles(self.flights.get(request_id) for request_id, _ in self._members)
        if not len(self._members) == len(tokens) == len(logprobs):
            raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} logprobs of {len(self._members)} sequences")
        news: Iterable[tuple[tuple[str, int], int, float]] = zip(self._members, tokens, logprobs, strict=True)
        if lanes is not None and lanes.any_open:
            left = lanes.take_in(self._handles, message, logprobs)
            news = ((self._members[place], tokens[place], logprobs[place]) for place in left)
        for (request_id, index), token, logprob in news:
            flight = self.flights.get(request_id)
            if flight is not None:
                flight.go_on(index, token, logprob)

    def _refused(self, flight: Flight, why: str) -> None:
        """Nothing was begun (it drains, or holds too many): another may take the flight, this one not for a while."""
        log.info("replica %d refused a request: %s", self.index, why, extra={"replica": self.index})
        self.load -= flight.open
        self.down_reason = why
        if self._full is not None:
            self._full.cancel()
        self._full = asyncio.get_running_loop().call_later(REFUSED_FOR_S, self._has_room)
        self._start_over(flight, self.version, self.digest)
        self._fleet.changed()

    def _start_over(self, flight: Flight, version: int | None, digest: str) -> None:
        """A flight runs here no more: another replica may take it, or it ends as it is, under this version."""
        if flight.can_restart():
            self._fleet.hold_again(flight)
        else:
            flight.end_aborted(version or 0, digest)
            self._fleet.landed(flight)

    def _has_room(self) -> None:
        """It may get requests again: those that are held do not wait for anything else to happen."""
        self._full = None
        self._fleet.changed()

    def _moved(self, message: StateChanged | Stats) -> None:
        now = message.state.lower(), message.version, message.digest, message.draining
        if now == (self.state, self.version, self.digest, self.draining):
            return
        self.state, self.version, self.digest, self.draining = now
        self._fleet.changed()


class Fleet:
    """All replicas, and the requests that wait for them."""

    def __init__(self, config: ApiConfig, peers: Peers | None = None, lanes: Lanes | None = None) -> None:
        """peers: the other API processes, if there are any. lanes: tokens that may go that way do."""
        self._config = config
        self._keys = TrainerKeys.read(config.replica_keys) if config.replica_keys else None
        self._place = config.place if config.replicas_file else ""  # of this API among several; "" = no others
        self._near = config.host if config.head_url else None  # a node's API prefers the replicas on its host
        self.peers = peers
        self.lanes = lanes
        self.lost: dict[int, int] = {}  # replica -> times it went away; of those that there were, too
        self.members = Members(self._replica, config.replica_endpoints)
        self.intents = Intents(self, peers, of_node=bool(config.head_url))
        self.held: deque[Flight] = deque()
        self.flights: set[Flight] = set()
        self.live: Live | None = None
        self.closing = False
        self.retried = 0
        self.on_stats: Callable[[Replica, Stats], None] = lambda replica, stats: None
        self._came = asyncio.Event()
        self._sessions: OrderedDict[str, int] = OrderedDict()

    async def run(self) -> None:
        """Keep every link going and every deadline kept, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.members.run())
            group.create_task(self._keep_time())

    @property
    def replicas(self) -> list[Replica]:
        """The replicas that there are now, by index."""
        return self.members.replicas

    def set_members(self, endpoints: Mapping[int, str]) -> None:
        """Set the replicas that there are from now on: index -> endpoint (see members.py)."""
        if self.members.set(endpoints):
            self.changed()

    def _replica(self, index: int, endpoint: str) -> Replica:
        self.lost.setdefault(index, 0)
        name = self._place if self.peers is None else f"{self._place or 'api'}-{self.peers.index}"
        return Replica(index, endpoint, self, self._config, keys=self._keys, name=name)

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
        """Prompts that no replica has got, in all processes of the API."""
        return len(self.held) + (self.peers.board.held_elsewhere if self.peers else 0)

    def load_of(self, replica: Replica) -> int:
        """Sequences that a replica works on, for all processes of the API."""
        return replica.load + (self.peers.board.load_elsewhere(replica.index) if self.peers else 0)

    async def _keep_time(self) -> None:
        while True:
            if self.peers is not None:
                self.peers.board.beat()
            if self.flights or self.intents.paused is not None:
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
        if self.intents.look():  # those before it may go, too
            self.held.append(flight)
            self.pump()
        elif self.intents.paused is not None or not self._started(flight):
            self.held.append(flight)
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
        """Put a flight first in the line: its replica is gone, and nobody has seen a token of it."""
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
        flight.cancelled = True
        if flight in self.held:
            self.held.remove(flight)
            self._end_aborted(flight)
            self.landed(flight)
            return
        for replica in self.replicas:
            replica.cancel(flight)

    def cancel_all(self) -> None:
        """Every flight ends with what it has."""
        for flight in list(self.flights):
            self.cancel(flight)

    def drop(self, flight: Flight) -> None:
        """End a flight that nobody waits for any more."""
        if flight.done.is_set():
            return
        if flight in self.held:
            self.held.remove(flight)
        for replica in self.replicas:
            replica.forget(flight)
        self._end_aborted(flight)
        self.landed(flight)

    def _end_aborted(self, flight: Flight) -> None:
        live = self.live
        flight.end_aborted(*((live.version, live.digest) if live else (0, "")))

    def landed(self, flight: Flight) -> None:
        """A flight ended, however it did."""
        self.flights.discard(flight)
        self._count()

    def pump(self) -> None:
        """Give every held flight that may run to a replica, in order."""
        if not self.held:
            return
        self.intents.look()
        if self.intents.paused is not None:
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
        if self.peers is not None or self._place:
            if flight.session:
                at = home(flight.session, (r.index for r in ready))
                return next(r for r in ready if r.index == at)
            near = [r for r in ready if r.host == self._near] if self._near else []
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
        return max(own, replica.said_load) if self._place else own

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

    def changed(self) -> None:
        """A replica's state, or what is live, has moved: held flights may go."""
        self.intents.replicas_changed()
        self.pump()

    def count_unready_from_now(self) -> None:
        """Held flights begin to wait for a ready replica anew: what came before was the operator's pause."""
        now = asyncio.get_running_loop().time()
        for flight in self.held:
            flight.unready_since = now

    def release_held(self) -> None:
        """Let held flights go."""
        self.count_unready_from_now()
        self.pump()

    def sweep(self, now: float) -> None:
        """Deadlines: the pause lease, held flights, running flights."""
        if self.intents.sweep(now):
            self.pump()
        for flight in [f for f in self.held if self._overdue(f, now)]:
            self.held.remove(flight)
            self.landed(flight)
        for flight in [f for f in self.flights if now - f.started >= self._config.request_timeout_s]:
            if not flight.overdue:
                flight.overdue = True
                self.cancel(flight)  # its partial result is on the way
            elif now - flight.started >= self._config.request_timeout_s + LAST_WORD_S:
                self.drop(flight)

    def _overdue(self, flight: Flight, now: float) -> bool:
        held_s = now - flight.held_since
        if flight.min_version is not None and now >= flight.deadline:
            current = self.live.version if self.live else None
            flight.fail(Conflict(f"waited for weight version {flight.min_version}; live is {current}"))
        elif self.intents.paused is not None or self.intents.cleared:
            if held_s < self._config.paused_hold_s:
                return False
            what = "paused" if self.intents.paused else "cleared"
            flight.fail(Unavailable(f"rollout is {what}; the request was held for {held_s:.0f} s and never ran"))
        elif now - flight.unready_since >= self._config.unready_hold_s:
            why = "; ".join(f"replica {r.index} is {r.state}, {r.down_reason}" for r in self.replicas)
            flight.fail(Unavailable(f"no replica is ready ({why}); the request never ran"))
        else:
            return False
        return True

"""One replica as the API sees it: its state, what runs there for us, and what happens when it goes away."""

import asyncio
import logging
from typing import Protocol
from urllib.parse import urlsplit

from api.errors import NotFound
from api.flight import Flight
from api.link import Link
from rollout_client.curve import TrainerKeys
from weight_manager.messages import Live
from worker import messages
from worker.messages import Abort, CallFailed, Chunks, GetStats, StateChanged, Stats, ToApi, Tokens

log = logging.getLogger(__name__)

UNREACHABLE = "unreachable"
REFUSED_FOR_S = 0.5
"""A replica that refused a request gets no other for this long."""


class Owner(Protocol):
    """What a replica tells its fleet."""

    def joined(self, replica: "Replica", stats: Stats) -> None:
        """First word after it connected."""

    def heard(self, replica: "Replica", stats: Stats) -> None:
        """New statistics."""

    def changed(self) -> None:
        """Its state or version moved."""

    def landed(self, flight: Flight) -> None:
        """A flight ended."""

    def hold_again(self, flight: Flight) -> None:
        """A flight that nobody has seen a token of needs another replica."""


class Replica:
    """One replica as the API sees it."""

    def __init__(
        self,
        index: int,
        endpoint: str,
        fleet: Owner,
        *,
        quiet_s: float,
        silence_s: float,
        stuck_s: float,
        keys: TrainerKeys | None = None,
        name: str = "",
    ) -> None:
        """name: of this process, where several of the API talk to the replica."""
        self.index = index
        self._fleet = fleet
        self.state = UNREACHABLE
        self.version: int | None = None
        self.draining = False  # it admits nothing more and will exit
        self.host = urlsplit(endpoint).hostname if endpoint.startswith("tcp://") else None
        self.stats: Stats | None = None
        self.flights: dict[str, Flight] = {}
        self.load = 0  # sequences it is working on for us
        self.lost = 0  # times it went away
        self.down_reason = "not there yet"
        self._full_until = 0.0
        self._members: list[tuple[str, int]] = []  # sequences of the last `Tokens`
        self._quiet_s = quiet_s
        self.link: Link[ToApi] = Link(
            endpoint,
            self,
            encode=messages.encode,
            decode=messages.decode_to_api,
            quiet_s=quiet_s,
            silence_s=silence_s,
            stuck_s=stuck_s,
            keys=keys if endpoint.startswith("tcp://") else None,
            name=name,
        )

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
        if (
            self.state != "serving"
            or self.version is None
            or self.draining
            or self._full_until > asyncio.get_running_loop().time()
        ):
            return False
        return live is None or self.version == live.version

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
        """Nobody waits for it: end it, and ignore what still comes."""
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
                log.info("replica %d: %s: %s", self.index, message.state, message.reason, extra=said)
                self._moved(message)
            case Stats():
                first, self.stats = self.stats is None, message
                if first:
                    self._fleet.joined(self, message)
                self._fleet.heard(self, message)
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
        """Gone: flights nobody has seen a token of start over elsewhere, the others end with what they have."""
        said = {"replica": self.index, "version": self.version, "requests": len(self.flights)}
        log.warning("replica %d lost: %s", self.index, reason, extra=said)
        flights, self.flights = self.flights, {}
        version, self.version = self.version, None
        self.draining = False
        self.state, self.stats, self.load, self.down_reason = UNREACHABLE, None, 0, reason
        self.lost += 1
        for flight in flights.values():
            if flight.can_restart():
                self._fleet.hold_again(flight)
            else:
                flight.end_aborted(version or 0)
                self._fleet.landed(flight)
        self._fleet.changed()

    def _go_on(self, message: Tokens) -> None:
        if message.members is not None:
            self._members = message.members
        for (request_id, index), token, logprob in zip(self._members, *message.drawn(), strict=True):
            flight = self.flights.get(request_id)
            if flight is not None:
                flight.go_on(index, token, logprob)

    def _refused(self, flight: Flight, why: str) -> None:
        """It began nothing (draining, or too many held): another may take the flight, this one not for a while."""
        log.info("replica %d refused a request: %s", self.index, why, extra={"replica": self.index})
        self.load -= flight.open
        self.down_reason = why
        self._full_until = asyncio.get_running_loop().time() + REFUSED_FOR_S
        self._fleet.hold_again(flight)
        self._fleet.changed()

    def _moved(self, message: StateChanged | Stats) -> None:
        now = message.state.lower(), message.version, message.draining
        if now == (self.state, self.version, self.draining):
            return
        self.state, self.version, self.draining = now
        self._fleet.changed()

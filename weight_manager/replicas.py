"""The replicas of this service as the store sees them: who is registered and alive, and what each says."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weight_manager.config import StoreConfig
from weight_manager.errors import PushRefused
from weight_manager.messages import (
    AdaptersHeld,
    Adopt,
    Adopted,
    Beat,
    Finalize,
    Finalized,
    Flipped,
    FromReplica,
    HeldAdapter,
    InPlace,
    Leaving,
    Live,
    Prepared,
    Refused,
    Register,
    Registered,
    RolledBack,
    ToReplica,
)
from weight_manager.metrics import Counters
from weight_manager.relay.lease import Lease
from weight_manager.watching import Watching

if TYPE_CHECKING:
    from weight_manager.adapters.lines import Lines  # which are made after us
    from weight_manager.coordinator import Coordinator  # which makes us

log = logging.getLogger(__name__)


@dataclass
class Replica:
    """A registered replica. epoch: what every rank holds, 0 = nothing (yet, or cleared)."""

    number: int
    identity: bytes
    pids: list[int]
    seen: float
    pidfds: list[int] = field(default_factory=list)
    epoch: int = 0
    digest: str = ""  # of the same; a store without its history may have given the epoch to other bytes
    adopting: int = 0  # epoch it was told to adopt and has not answered for
    untold: bool = False  # it was to adopt what is live, and its queue took no more
    error: str = ""
    leaving: bool = False  # it was told to stop, and said so
    adapters: dict[str, int] = field(default_factory=dict)  # name -> epoch that it stands for, as it has said
    told: set[str] = field(default_factory=set)  # names that it was told to serve, and has not said anything since
    held: list[HeldAdapter] = field(default_factory=list)  # versions that are read there
    adapter_error: str = ""
    copies_ahead: bool = False  # tell it of bytes that are there
    adapters_ahead: bool = False  # and of an adapter's

    def holds(self, live: Live) -> bool:
        """It is this version that every rank holds."""
        return (self.epoch, self.digest) == (live.epoch, live.digest)


class Replicas:
    """Registration, liveness and adoption. Votes in a commit are passed on to the ballot."""

    def __init__(
        self,
        config: StoreConfig,
        coordinator: "Coordinator",
        *,
        send: Callable[[bytes, ToReplica], bool],
        lease: Lease | None,
        watching: Watching,
        counters: Counters,
    ) -> None:
        """send: queue a message; False if nobody of that identity is there. lease: from the store above, without
        which nothing may be served here; None at the root."""
        self._config = config
        self._coordinator = coordinator
        self._send = send
        self._lease = lease
        self._watching = watching
        self._counters = counters
        self._replicas: dict[int, Replica] = {}
        self._by_identity: dict[bytes, Replica] = {}
        self._held: dict[int, tuple[bytes, Register]] = {}  # until the running commit is settled
        self.lines: Lines | None = None  # of adapters, which are made after us

    def numbers(self) -> set[int]:
        """The numbers of all registered replicas."""
        return set(self._replicas)

    def voters(self) -> set[int]:
        """Replicas that vote on the model's weights: none while nothing is live; they adopt the first version."""
        return self.numbers() if self._coordinator.history.live else set()

    def held(self) -> Iterator[HeldAdapter]:
        """Every version of any adapter that one of them holds."""
        for replica in self._replicas.values():
            yield from replica.held

    def serving(self, name: str) -> set[int]:
        """Replicas that begin sequences under an adapter's name."""
        return {number for number, r in self._replicas.items() if name in r.adapters or name in r.told}

    def request(self, peer: bytes, message: FromReplica) -> None:
        """Take one message of a replica."""
        now, coordinator = time.monotonic(), self._coordinator
        coordinator.changes += not isinstance(message, Beat)
        if isinstance(message, Register):
            self._register(peer, message, now)
            return
        replica = self._by_identity.get(peer)
        if replica is None:
            self._send(peer, Refused("this connection is not registered; register first"))
            return
        replica.seen = now
        line = self.lines.of_session(getattr(message, "session", "")) if self.lines is not None else None
        coordinator = line.coordinator if line is not None else coordinator
        ballot, number = coordinator.ballot, replica.number
        match message:
            case Beat():
                self._beat(replica, message)
            case Leaving():
                replica.leaving = True
            case Adopted():
                self._adopted(replica, message)
            case AdaptersHeld():
                replica.adapters, replica.held, replica.adapter_error = message.live, message.held, message.error
                replica.told.clear()
            case Prepared() if ballot:
                coordinator.prepared(number, message, now)
            case Flipped() if ballot:
                ballot.flipped_by(number, message, now)
            case Finalized() if ballot:
                ballot.finalized(number, message, now)
            case RolledBack() if ballot:
                ballot.rolled_back(number, message, now)
            case _:
                pass
        coordinator.drive(now)

    def admit_held(self, now: float) -> None:
        """The commit is settled: take in whoever registered meanwhile."""
        held, self._held = self._held, {}
        for identity, request in held.values():
            self._welcome(identity, request, now)

    def send(self, number: int, message: ToReplica) -> None:
        """Send to a replica by number; one that is not there simply does not answer."""
        replica = self._replicas.get(number)
        if replica is not None:
            if isinstance(message, Finalize) and message.adapter:
                replica.told.add(message.adapter)
            self._send(replica.identity, message)

    def in_place(self, slot: int, write_epoch: int, spans: list[tuple[int, int]]) -> None:
        """Tell those that serve a version and copy the next one while it arrives. A queue that takes no more is none
        the worse for it: what is not heard of is copied later.
        """
        for replica in self._replicas.values():
            if replica.copies_ahead and replica.epoch:
                self._send(replica.identity, InPlace(slot, write_epoch, spans))

    def adapter_in_place(self, message: InPlace) -> None:
        """The same of an adapter, to those that have its live version."""
        for replica in self._replicas.values():
            if replica.adapters_ahead and message.adapter in replica.adapters:
                self._send(replica.identity, message)

    def drop(self, number: int, why: str) -> None:
        """A replica did not answer: it must register again."""
        replica = self._replicas.get(number)
        if replica is not None:
            self._counters.add("replicas_silent")
            self._send(replica.identity, Refused(f"replica {number} {why}; register again"))
            self._remove(replica, why)

    def went_live(self, live: Live, *, voted: bool) -> None:
        """A version was recorded. Voters hold it already; when nobody voted, everybody is told to adopt it."""
        for replica in self._replicas.values():
            if not voted:
                self._adopt(replica, live)
            elif replica.epoch:
                replica.epoch, replica.digest = live.epoch, live.digest

    def drop_silent(self, now: float) -> None:
        """Drop replicas that have not been heard of for too long; not during a commit."""
        for replica in list(self._replicas.values()):
            if now - replica.seen >= self._config.silent_s:
                self.drop(replica.number, f"was silent for {self._config.silent_s:g} s")

    def next_silence(self) -> float | None:
        """When `drop_silent` may have something to do."""
        return min((r.seen + self._config.silent_s for r in self._replicas.values()), default=None)

    def status(self, now: float) -> dict[str, dict[str, Any]]:
        """Per replica, as the API shows it."""
        live = self._coordinator.history.live
        return {
            str(r.number): {
                "epoch": r.epoch,
                "ready": live is not None and r.holds(live),
                "pids": r.pids,
                "beat_age_s": round(now - r.seen, 3),
                "error": r.error or r.adapter_error,
                "adapters": {"live": r.adapters, "held": sorted(held.epoch for held in r.held)},
            }
            for r in sorted(self._replicas.values(), key=lambda r: r.number)
        }

    def close(self) -> None:
        """Let go of the processes watched."""
        for replica in list(self._replicas.values()):
            self._unwatch(replica)

    @property
    def _settled(self) -> bool:
        """What is live is what replicas are to serve, it is where they can map it, and they may serve it now."""
        settled = self._coordinator.settled and not self._coordinator.awaits_arena
        return settled and not (self._lease is not None and self._lease.closed)

    def _register(self, identity: bytes, request: Register, now: float) -> None:
        """Take a replica in, or hold it until the running commit is settled.

        Its earlier registration ends, which may settle that commit, unless it is the very same processes asking during
        a commit what became of it: they go on voting and get their answer when everybody does.
        """
        known = self._replicas.get(request.replica)
        if known is not None and (self._settled or (known.identity, known.pids) != (identity, request.pids)):
            self._remove(known, "registered anew")
        layout = self._coordinator.layout.digest
        if request.layout_digest != layout:
            message = (
                f"replica {request.replica} lays weights out as {request.layout_digest}, the store as {layout}: "
                "model config, dtype and tp must be the same"
            )
            log.error(message, extra={"replica": request.replica})
            self._send(identity, Refused(message))
        elif not self._settled:
            self._held[request.replica] = identity, request
        else:
            self._welcome(identity, request, now)

    def _beat(self, replica: Replica, held: Beat) -> None:
        """What a replica holds. One that holds another version than the live one is told to adopt that.

        One that holds nothing has let go of it by order, unless it could not be told.
        """
        if self.lines is not None:
            self.lines.remind(replica.number, replica.adapters)
        if not self._settled:
            return
        self._coordinator.history.pass_over(held.epoch)
        self._coordinator.changes += (replica.epoch, replica.digest) != (held.epoch, held.digest)
        replica.epoch, replica.digest = held.epoch, held.digest
        live = self._coordinator.history.live
        if live is not None and not replica.holds(live) and (held.epoch or replica.untold):
            self._adopt(replica, live)

    def _adopted(self, replica: Replica, answer: Adopted) -> None:
        """A replica mapped what it was told to, or could not: the status says why."""
        replica.adopting = 0
        extra = {"replica": replica.number, "epoch": answer.epoch}
        if answer.ok:
            live = self._coordinator.history.live
            replica.epoch, replica.error = answer.epoch, ""
            replica.digest = live.digest if live is not None and live.epoch == answer.epoch else ""
            log.info("replica %d holds the live version", replica.number, extra=extra)
            return
        rank = f"replica {replica.number} rank {answer.rank}"
        replica.error = f"{rank} cannot map the live version: {answer.error}"
        log.error(replica.error, extra=extra)
        self._coordinator.note_error(PushRefused("refused", replica.error, rank=rank), extra)

    def _welcome(self, identity: bytes, request: Register, now: float) -> None:
        replica = Replica(
            *(request.replica, identity, request.pids, now),
            held=request.adapters,
            copies_ahead=request.copies_ahead,
            adapters_ahead=request.adapters_ahead,
        )
        known = self._replicas.pop(request.replica, None)
        if known is not None:
            self._unwatch(known)
        for rank, pid in enumerate(request.pids):
            try:
                fd = os.pidfd_open(pid)
            except OSError as error:
                self._unwatch(replica)
                message = f"replica {request.replica} rank {rank}: no process {pid} to watch ({error.strerror})"
                log.warning(message, extra={"replica": request.replica})
                self._send(identity, Refused(message))
                return
            replica.pidfds.append(fd)
            self._watching.watch(fd, lambda r=replica, k=rank: self._died(r, k))  # type: ignore[misc]
        self._replicas[replica.number] = replica
        self._by_identity[identity] = replica
        live, arena = self._coordinator.history.live, self._coordinator.slots.arena
        self._coordinator.history.pass_over(max((held.epoch for held in request.adapters), default=0))
        replica.adopting = live.epoch if live else 0
        adapters = self.lines.live if self.lines is not None else []
        replica.told = {adapter.name for adapter in adapters}
        self._send(identity, Registered(str(arena.path), live, self._config.beat_s, adapters))
        log.info("replica %d registered", replica.number, extra={"replica": replica.number, "pids": request.pids})

    def _adopt(self, replica: Replica, live: Live) -> None:
        if replica.adopting != live.epoch:
            replica.untold = not self._send(replica.identity, Adopt(live))  # then it is told at its next beat
            replica.adopting = 0 if replica.untold else live.epoch

    def _died(self, replica: Replica, rank: int) -> None:
        if replica.leaving:
            self._remove(replica, "has stopped", logging.INFO)
            return
        self._counters.add("replicas_died")
        self._remove(replica, f"died: the process of rank {rank} (pid {replica.pids[rank]}) ended")

    def _remove(self, replica: Replica, why: str, level: int = logging.WARNING) -> None:
        self._unwatch(replica)
        self._replicas.pop(replica.number, None)
        self._by_identity.pop(replica.identity, None)
        log.log(level, "replica %d %s", replica.number, why, extra={"replica": replica.number})
        self._coordinator.replica_gone(replica.number, why)
        if self.lines is not None:
            self.lines.replica_gone(replica.number, why)

    def _unwatch(self, replica: Replica) -> None:
        for fd in replica.pidfds:
            self._watching.unwatch(fd)
            os.close(fd)
        replica.pidfds.clear()

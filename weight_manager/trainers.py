"""The trainers' side of the store: connections, who may push, and which session a message belongs to."""

import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence

from rollout_client.protocol import (
    PROTOCOL,
    Abort,
    Ahead,
    Begin,
    Chunk,
    Commit,
    Committed,
    Error,
    ErrorCode,
    Hello,
    Merge,
    Renew,
    Reply,
    Request,
    Seal,
    Unload,
    Unloaded,
    Welcome,
    Written,
    encode,
)
from rollout_client.versions import MAX_VERSION
from weight_manager.adapters.calls import AdapterCalls
from weight_manager.adapters.line import AdapterGroup
from weight_manager.adapters.lines import Lines
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.data_plane import DataPlane
from weight_manager.errors import PushRefused
from weight_manager.history import Intent
from weight_manager.known_plans import KnownPlans
from weight_manager.messages import MergeAdapter
from weight_manager.metrics import Counters
from weight_manager.trainer_group import SessionRequest, TrainerGroup
from weight_manager.wire import Router

log = logging.getLogger(__name__)

PEERS = 4096
"""Connections remembered; the one unheard of for longest is forgotten and must say Hello again."""
SESSIONS = 32
"""Sessions remembered beside those that run, so that late messages get the reason and not just "unknown"."""


class Trainers:
    """Answers every trainer. Messages of one session go to its TrainerGroup."""

    def __init__(
        self,
        config: StoreConfig,
        coordinator: Coordinator,
        router: Router,
        counters: Counters,
        data: DataPlane,
        lines: Lines,
        adapters: AdapterCalls,
    ) -> None:
        """coordinator, data: of the model's weights. lines, adapters: of LoRA adapters, and what is no push of one."""
        self._config = config
        self._coordinator = coordinator
        self._router = router
        self._counters = counters
        self._data = data
        self._lines = lines
        self._adapters = adapters
        self._store_id = secrets.token_hex(8)
        self._peers: OrderedDict[bytes, Hello] = OrderedDict()
        self._groups: OrderedDict[str, TrainerGroup] = OrderedDict()
        self._plans = KnownPlans()

    def request(self, peer: bytes, request: Request) -> None:
        """Take any message but a chunk."""
        now = time.monotonic()
        if peer in self._peers:
            self._peers.move_to_end(peer)
        try:
            match request:
                case Hello():
                    self._answer(peer, self._hello(peer, request))
                case Begin():
                    self._answer(peer, self._begin(peer, request, now))
                case Written():
                    group = self._group(peer, request.session)
                    if group is None:
                        self._counters.add("stray_messages")
                    elif group.outcome is None:
                        group.written(peer, request, now)
                case Ahead() | Renew() | Seal() | Commit() | Abort():
                    self._of_session(peer, request, now)
                case Merge():
                    self._merge(peer, request)
                case Unload():
                    self._unload(peer, request, now)
        except PushRefused as refusal:
            self._answer(peer, refusal.to_wire())

    def chunk(self, peer: bytes, chunk: Chunk) -> Sequence[memoryview] | None:
        """Where its payload goes; None = nowhere."""
        group = self._group(peer, chunk.session)
        if group is None:
            self._counters.add("stray_messages")
            return None
        return group.chunk(peer, chunk, time.monotonic()) if group.outcome is None else None

    def received(self, peer: bytes, chunk: Chunk) -> None:
        """A chunk's payload is in its place."""
        group = self._group(peer, chunk.session)
        if group is not None and group.outcome is None:
            group.received(peer, chunk)

    def malformed(self, peer: bytes, code: ErrorCode, message: str, session: str = "") -> None:
        """Answered at once; a member's running session ends, since what it sent is not what it meant."""
        log.warning("bad message from a trainer: %s", message, extra={"code": code, "session": session})
        self._answer(peer, Error(code, message, session))
        group = self._group(peer, session)
        if group is not None and group.outcome is None:
            group.refuse(PushRefused(code, message), time.monotonic())

    def expire(self, now: float) -> None:
        """End sessions whose lease ran out."""
        for group in self._running():
            group.expire(now)

    def next_expiry(self) -> float | None:
        """When `expire` may have something to do."""
        times = [group.next_expiry() for group in self._running()]
        return min((t for t in times if t is not None), default=None)

    def _hello(self, peer: bytes, hello: Hello) -> Welcome:
        if hello.protocol != PROTOCOL:
            message = f"protocol {hello.protocol} was asked for, this store speaks {PROTOCOL}: use the same release"
            raise PushRefused("unsupported", message)
        if not hmac.compare_digest(hello.token.encode(), (self._config.token or "").encode()):
            self._counters.add("unauthorized")
            log.warning("a trainer's token is wrong", extra={"run_id": hello.run_id, "client": hello.client})
            raise PushRefused("unauthorized", "the token is wrong or missing")
        if not hello.run_id:
            raise PushRefused("bad_message", "run_id must not be empty")
        self._peers[peer] = hello
        if len(self._peers) > PEERS:
            self._peers.popitem(last=False)
        live, arena, manifest = (
            self._coordinator.history.live,
            self._coordinator.slots.arena,
            self._coordinator.layout.manifest,
        )
        return Welcome(
            self._store_id,
            manifest.model,
            manifest.dtype,
            live.run_id if live else "",
            live.version if live else None,
            str(arena.path),
            arena.nonce,
            self._config.max_frame,
            self._config.lease_s,
            data_port=self._data.port,
            adapters={a.name: (a.live.run_id, a.live.version) for a in self._lines.live},
            tied=tuple(name for p in manifest.parameters if p.aliases for name in (p.name, *p.aliases)),
        )

    def _begin(self, peer: bytes, begin: Begin, now: float) -> Reply:
        hello = self._peers.get(peer)
        if hello is None:
            raise PushRefused("unauthorized", "say Hello first")
        self._coordinator.check_root()
        begin = self._plans.complete(begin)
        self._check(begin)
        line = self._lines.for_push(begin.adapter, begin.parts) if begin.adapter is not None else None
        coordinator = self._coordinator if line is None else line.coordinator
        live = coordinator.history.live
        if live is not None and (live.run_id, live.version) == (hello.run_id, begin.version) and not begin.force:
            coordinator.check_moved()
            coordinator.check_arena()
            if not coordinator.stranded:
                return Committed(live.version, live.digest, 0, {}, {}, already=True)
        intent = Intent(
            *(hello.run_id, begin.version, "push", hello.client, begin.in_flight, begin.transport, begin.force),
            adapter=line.name if line is not None else "",
        )
        group = _group_of(coordinator)
        try:
            if group is not None and group.same_push(intent):
                return group.join(peer, begin, now)
            if line is None:
                group = TrainerGroup(self._config, coordinator, self._answer, self._counters, self._data)
            else:
                group = AdapterGroup(self._config, line, self._lines.planner, self._answer, self._counters)
            placement = group.open(peer, begin, intent, now)
        except PushRefused as refusal:
            self._counters.add("begins_refused")
            if not refusal.retryable:
                coordinator.note_error(refusal, {"run_id": intent.run_id, "version": intent.version})
            raise
        self._groups[group.id] = group
        over = [session for session, group in self._groups.items() if group.outcome is not None]
        for session in over[: max(0, len(over) - SESSIONS)]:
            del self._groups[session]
        named = self._plans.name(begin, placement)
        group.plan = named.plan
        return named

    def _merge(self, peer: bytes, request: Merge) -> None:
        hello = self._peers.get(peer)
        if hello is None:
            raise PushRefused("unauthorized", "say Hello first")
        live = self._coordinator.history.live
        if live is not None and (live.run_id, live.version) == (hello.run_id, request.version):
            self._answer(peer, Committed(live.version, live.digest, 0, {}, {}, already=True))
            return

        def done(outcome: Committed | PushRefused) -> None:
            self._answer(peer, outcome if isinstance(outcome, Committed) else outcome.to_wire())

        asked = (request.adapter, request.version, hello.run_id, request.in_flight, request.deadline_s)
        self._adapters.merge(MergeAdapter("", *asked), done)

    def _unload(self, peer: bytes, request: Unload, now: float) -> None:
        if peer not in self._peers:
            raise PushRefused("unauthorized", "say Hello first")

        self._coordinator.check_root()

        def done(refusal: PushRefused | None) -> None:
            self._answer(peer, Unloaded(request.adapter) if refusal is None else refusal.to_wire())

        self._lines.unload(request.adapter, now + self._config.patience(request.deadline_s), done)

    def _check(self, begin: Begin) -> None:
        if begin.in_flight == "finish" and begin.adapter is None:
            message = "in_flight='finish' is for adapters: of the model itself, one version is served at a time"
            raise PushRefused("bad_message", message)
        if not 0 <= begin.version <= MAX_VERSION or not 0 <= begin.rank < begin.world:
            message = f"version {begin.version}, rank {begin.rank} of {begin.world}: out of range"
            raise PushRefused("bad_message", message)
        for what, count, cap in (
            ("parts", len(begin.parts), self._config.max_parts),
            ("trainer ranks", begin.world, self._config.max_world),
        ):
            if count > cap:
                raise PushRefused("too_large", f"{count} {what} in one push, at most {cap} are taken")

    def _of_session(self, peer: bytes, request: SessionRequest, now: float) -> None:
        group = self._group(peer, request.session)
        if group is None:
            self._counters.add("stray_messages")
            message = f"session {request.session!r} is not known here as yours; the store may have restarted"
            self._answer(peer, Error("unknown_session", message, request.session))
            return
        group.take(peer, request, now)

    def _group(self, peer: bytes, session: str) -> TrainerGroup | None:
        group = self._groups.get(session)
        return group if group is not None and peer in group.ranks else None

    def _running(self) -> list[TrainerGroup]:
        coordinators = [self._coordinator, *(line.coordinator for line in self._lines.all())]
        return [group for c in coordinators if (group := _group_of(c)) is not None]

    def _answer(self, peer: bytes, reply: Reply) -> None:
        self._router.send(peer, encode(reply))


def _group_of(coordinator: Coordinator) -> TrainerGroup | None:
    """The trainers whose push runs there."""
    session = coordinator.session
    return session.owner if session is not None and isinstance(session.owner, TrainerGroup) else None

"""What the API asks of the store: status, loading a directory, ending a push. One answer per call."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from weight_manager.adapters.calls import AdapterCalls
from weight_manager.adapters.lines import Lines
from weight_manager.background import Background
from weight_manager.checkpoint import below_roots
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.disk import read_checkpoint
from weight_manager.errors import IllegalTransition, PushRefused
from weight_manager.history import Intent
from weight_manager.inspect import checksums, read_tensor
from weight_manager.life import Event, Refused
from weight_manager.messages import (
    AbortSession,
    Checksums,
    CommitSession,
    FromApi,
    GetStatus,
    LoadAdapter,
    LoadDisk,
    MergeAdapter,
    ReadTensor,
    Result,
    RollbackAdapter,
    RollbackWeights,
    SessionTensors,
    Status,
    ToApi,
    UnloadAdapter,
)
from weight_manager.metrics import Counters
from weight_manager.own_sessions import DiskLoad, Outcome, RollbackToPrevious, named
from weight_manager.push_session import PushSession
from weight_manager.replicas import Replicas

log = logging.getLogger(__name__)

HISTORY_SHOWN = 32
UNTOLD_S = 0.02
"""While something is pushed, subscribers hear of what has changed so late at most: a small push is through by then."""
SUBSCRIBERS = 64


class Operator:
    """Answers the API. send returns False when the peer is gone."""

    def __init__(
        self,
        config: StoreConfig,
        coordinator: Coordinator,
        *,
        replicas: Replicas,
        lines: Lines,
        adapters: AdapterCalls,
        files: Background,
        counters: Counters,
        relay: Callable[[float], dict[str, Any] | None],
        send: Callable[[bytes, ToApi], bool],
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._replicas = replicas
        self._lines = lines
        self._adapters = adapters
        self._files = files
        self._counters = counters
        self._relay = relay
        self._send = send
        self._subscribers: list[bytes] = []
        self._shown = 0
        self._tell_by: float | None = None  # when subscribers have to hear of what has changed
        self._commits: list[tuple[bytes, str, PushSession]] = []  # who waits for which

    def request(self, peer: bytes, request: FromApi) -> None:
        """Take one call of the API."""
        try:
            match request:
                case GetStatus():
                    if request.subscribe and peer not in self._subscribers:
                        self._subscribers = [*self._subscribers, peer][-SUBSCRIBERS:]
                    self._send(peer, self.status(request.call))
                case LoadDisk():
                    self._load(peer, request)
                case RollbackWeights():
                    self._rollback(peer, request)
                case Checksums():
                    read = functools.partial(checksums, baseline=request.baseline)
                    self._inspect(peer, request.call, read)
                case ReadTensor():
                    read = functools.partial(read_tensor, name=request.name, offset=request.offset, limit=request.limit)
                    self._inspect(peer, request.call, read)
                case AbortSession():
                    self._abort(peer, request)
                case SessionTensors():
                    self._tensors(peer, request)
                case CommitSession():
                    self._commit(peer, request)
                case LoadAdapter():
                    self._adapters.load(request, self._done(peer, request))
                case UnloadAdapter():
                    self._adapters.unload(request, self._done(peer, request))
                case MergeAdapter():
                    self._adapters.merge(request, self._done(peer, request))
                case RollbackAdapter():
                    self._adapters.rollback(request, self._done(peer, request))
        except PushRefused as refusal:
            self._send(peer, answer(request.call, refusal))
        except IllegalTransition:
            raise  # nobody knows what is live any more
        except Exception as error:  # a call that is not answered waits for its whole deadline
            log.exception("a %s could not be carried out", type(request).__name__)
            self._send(peer, answer(request.call, PushRefused("internal", f"the store failed: {error!r}")))

    def publish(self, now: float) -> None:
        """Tell subscribers, if anything has changed since the last time, and those who wait for a commit."""
        changes = self._coordinator.changes + self._lines.changes
        if changes == self._shown:
            return
        if self._tell_by is None:
            self._tell_by = now + UNTOLD_S
        if now < self._tell_by and not (self._coordinator.idle and self._lines.idle):
            return
        self._shown, self._tell_by = changes, None
        self._answer_commits()
        if self._subscribers:
            status = self.status("")
            self._subscribers = [peer for peer in self._subscribers if self._send(peer, status)]

    def next_deadline(self) -> float | None:
        """When `publish` has something to say."""
        return self._tell_by

    def status(self, call: str) -> Status:
        """Everything there is to say about weights."""
        coordinator, now = self._coordinator, time.monotonic()
        history = coordinator.history
        return Status(
            call,
            history.live,
            history.previous,
            coordinator.session.described(now) if coordinator.session is not None else None,
            self._replicas.status(now),
            coordinator.last_error,
            coordinator.last_push,
            history.tail(HISTORY_SHOWN),
            self._counters.values(),
            self._relay(now),
            self._lines.status(now),
            coordinator.following.described(now) if coordinator.awaits_arena and coordinator.following else None,
            history.saved.lost,
        )

    def _load(self, peer: bytes, request: LoadDisk) -> None:
        self._coordinator.check_root()
        directory = below_roots(request.path, (*self._config.disk_roots, self._config.model))
        live = self._coordinator.history.live
        run_id, version = named(request.run_id, request.version, live)
        intent = Intent(run_id, version, "disk", str(directory), request.in_flight, "disk", request.force)
        deadline_s = self._config.patience(request.deadline_s)
        load = DiskLoad(self._coordinator, self._files, self._done(peer, request), deadline_s)
        reader = functools.partial(read_checkpoint, directory, self._coordinator.layout)
        load.start(intent, reader, time.monotonic())

    def _done(self, peer: bytes, request: FromApi) -> Callable[[Outcome | None], None]:
        """What answers a call once it is known how it went."""

        def done(outcome: Outcome | None) -> None:
            self._send(peer, answer(request.call, outcome))

        return done

    def _rollback(self, peer: bytes, request: RollbackWeights) -> None:
        self._coordinator.check_root()
        patience = self._config.patience(request.deadline_s)
        owner = RollbackToPrevious(self._coordinator, self._done(peer, request), patience)
        owner.start(request.in_flight, time.monotonic())

    def _inspect(self, peer: bytes, call: str, read: Callable[..., dict[str, Any]]) -> None:
        coordinator = self._coordinator
        live, arena = coordinator.history.live, coordinator.slots.arena
        if live is None:
            raise PushRefused("not_ready", "nothing is live yet")
        if coordinator.awaits_arena:
            message = f"version {live.version} is not in the arena yet, which is read here; ask again"
            raise PushRefused("busy", message, retryable=True)

        def failed(error: BaseException) -> None:
            refusal = error if isinstance(error, PushRefused) else PushRefused("internal", f"reading failed: {error!r}")
            self._send(peer, answer(call, refusal))

        def done(data: dict[str, Any]) -> None:
            self._send(peer, Result(call, ok=True, data=data))

        self._files.submit(lambda: read(coordinator.layout, arena, live), done, failed)

    def _tensors(self, peer: bytes, request: SessionTensors) -> None:
        session = self._open_session()
        arrived: dict[str, bool] = {}
        for target in session.staging.targets:
            arrived[target.name] = arrived.get(target.name, True) and target.digest is not None
        missing = [name for name in request.names if not arrived.get(name, False)]
        self._send(peer, Result(request.call, ok=True, data={"session": session.id, "missing": missing}))

    def _commit(self, peer: bytes, request: CommitSession) -> None:
        self._coordinator.check_root()
        session = self._open_session()
        cell = session.life.cell(Event.OPERATOR_COMMITS)
        if isinstance(cell, Refused):
            raise PushRefused("refused", f"{session.intent} {cell.why}")
        self._commits.append((peer, request.call, session))
        deadline_s = self._config.patience(request.deadline_s)
        self._coordinator.commit(session, deadline_s, time.monotonic(), Event.OPERATOR_COMMITS)

    def _answer_commits(self) -> None:
        waiting, self._commits = self._commits, []
        for peer, call, session in waiting:
            if session is self._coordinator.session:
                self._commits.append((peer, call, session))
            elif session.life.ended_by is None:
                data = {"version": session.intent.version, "seconds": session.seconds}
                self._send(peer, Result(call, ok=True, data=data))
            else:
                error = self._coordinator.last_error or {}
                message = error.get("message", f"{session.intent} did not go live")
                self._send(peer, Result(call, ok=False, code=error.get("code", "internal"), message=message))

    def _open_session(self) -> PushSession:
        if self._coordinator.session is None:
            raise PushRefused("unknown_session", "no push is running")
        return self._coordinator.session

    def _abort(self, peer: bytes, request: AbortSession) -> None:
        coordinator = self._lines.pushed(request.adapter) if request.adapter else self._coordinator
        session = coordinator.session
        if session is None:
            whose = f" of adapter {request.adapter}" if request.adapter else ""
            raise PushRefused("unknown_session", f"no push{whose} is running")
        refusal = PushRefused("aborted", request.reason)
        coordinator.abort(session, refusal, time.monotonic(), Event.OPERATOR_ABORTS)
        self._send(peer, Result(request.call, ok=True, data=session.extra()))


def answer(call: str, outcome: Outcome | None) -> Result:
    """What a call is told that was done (None), has made a version live, or could not be honoured."""
    if isinstance(outcome, PushRefused):
        return Result(call, ok=False, code=outcome.code, message=outcome.message, tensors=outcome.tensors)
    return Result(call, ok=True, data=msgspec.to_builtins(outcome) if outcome is not None else {})

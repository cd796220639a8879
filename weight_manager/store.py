"""The weight store: one thread, one poll, everything that happens to the weights of a service.

A turn: receive (trainers, replicas and the API, finished work, ended processes) -> expire (leases,
deadlines, silence) -> publish. Idle it sleeps in the poll. Start: lock the run directory -> history ->
layout -> arena (take over the old one, or make one) -> sockets -> first weights in the background.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import zmq

from rollout_client import copying
from rollout_client.curve import TrainerKeys
from rollout_client.prompt_threads import prompt_context
from rollout_client.protocol import MAX_HEADER_BYTES
from weight_manager import messages
from weight_manager.adapters.calls import AdapterCalls
from weight_manager.adapters.lines import Lines
from weight_manager.background import Background, Inbox
from weight_manager.checkpoint import read_config
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.curve import Gate, StoreKeys
from weight_manager.data_plane import DataPlane
from weight_manager.data_port import DataPort
from weight_manager.devices import Devices
from weight_manager.errors import CheckpointError, PushRefused, StartError
from weight_manager.families import manifest_for
from weight_manager.first_weights import FirstWeights, open_arena
from weight_manager.history import History
from weight_manager.huge_pages import HugePages
from weight_manager.layout import Layout, make_layout
from weight_manager.life import Event
from weight_manager.messages import FromApi, FromReplica, Live, Refused, ToApi, ToReplica
from weight_manager.metrics import Counters
from weight_manager.operator import Operator
from weight_manager.relay.lease import Lease
from weight_manager.relay.members import Members
from weight_manager.relay.messages import Holdings, VersionName, decode_from_below, version_of
from weight_manager.relay.upstream import Upstream, connect
from weight_manager.replicas import Replicas
from weight_manager.slots import Slots
from weight_manager.snapshot import SNAPSHOT_FILE, Snapshots
from weight_manager.trainers import Trainers
from weight_manager.watching import Ready, Watching
from weight_manager.whole_file import remove_scratch
from weight_manager.wire import Router, receive_messages, receive_pushes

log = logging.getLogger(__name__)

HISTORY_FILE, ADAPTERS_FOLDER = "weights.json", "adapters"
LINGER_S = 2.0
"""Seconds that a store which is told to stop waits for a version to come into the arena, for its snapshot."""
PUSH_BACKLOG, INTERNAL_BACKLOG = 16, 10_000
HELD_S = 0.5
"""A turn that took so long, as a disk that is slow to sync, or a machine that gives it no time, can hold it."""
LATE_S = 0.05
"""Who wakes so long after it wanted to was given no time: the machine had too much else to do, or was suspended."""
CATCH_UP_S, PAUSE_MS = 0.5, 20
"""After either, what came meanwhile is heard before anybody is found to have been silent, for so long at most: until
nothing has arrived for the pause, as ZMQ's own threads may only now read what lies in the kernel.
"""


class Store:
    """Owns every part. `run` returns when `stop` was called."""

    def __init__(self, config: StoreConfig, made: Callable[[Path], None]) -> None:
        """made: called with the path of each arena, which must not outlive the process.

        Raises StartError saying what to change.
        """
        self._config = config
        self._stopping = self._opened = False
        self._lock = lock_run_dir(config.run_dir)
        config.state.mkdir(parents=True, exist_ok=True)
        for name in (HISTORY_FILE, SNAPSHOT_FILE):
            remove_scratch(config.state, name)
        self.layout = layout_of(config)
        self._counters = Counters()
        self._history = History(config.state / HISTORY_FILE, config.history)
        self._background = Background(config.checking_threads, "verify", reads=True)
        self._files = Background(1, "files")
        self._watching = Watching()
        self._devices = Devices(config.run_dir, self._watching)
        self._arena, self._taken_over = open_arena(config, self.layout, self._history, self._devices, self._counters)
        self._made = made
        self._adapters_at = config.state / ADAPTERS_FOLDER
        made(self._arena.path)
        self._pages = HugePages(self._arena, lambda: self._coordinator.filling)
        self._context = prompt_context()
        self._routers: list[Router] = []
        self._data_ports: list[DataPort] = []
        self._gate: Gate | None = None
        try:
            self._open()
        except BaseException:
            self._close(keep_arena=self._taken_over)
            raise
        self._opened = True

    def _open(self) -> None:
        config, counters = self._config, self._counters
        cap = 2 * max(MAX_HEADER_BYTES, config.max_frame)
        keys = keys_of(config)
        if keys is not None:
            self._gate = Gate(self._context, keys, counters)
            self._watching.add(self._gate.socket)
        push_file, relay_file = config.run_dir / "push_endpoint", config.run_dir / "relay_endpoint"
        self._push = self._bind(config.push_endpoint, cap, PUSH_BACKLOG, keys, push_file)
        self._internal = self._bind(f"ipc://{config.run_dir / 'store.sock'}", MAX_HEADER_BYTES, INTERNAL_BACKLOG)
        slots = Slots(self._arena, self._background, in_use=self._history.kept_slots)
        lease = None if config.upstream is None else Lease(self._arena, config.relay_lease_s)
        self._below = Members(config, self.layout, history=self._history, lease=lease)
        self._coordinator = Coordinator(
            config,
            self.layout,
            slots=slots,
            history=self._history,
            background=self._background,
            counters=counters,
            members=self._below,
            replicas=lambda coordinator: self._make_replicas(coordinator, lease),
            devices=self._devices,
        )
        self._coordinator.note_loss()
        if config.relay_endpoint is not None:
            router = self._bind(config.relay_endpoint, MAX_HEADER_BYTES, INTERNAL_BACKLOG, keys, relay_file)
            self._below.roster.open(router, self._data_port(router, config.relay_data_port), self._watching)
        self._data = self._open_data(slots)
        self._lines = self._replicas.lines = Lines(
            config,
            self.layout,
            self._history,
            self._adapters_at,
            background=self._background,
            files=self._files,
            counters=counters,
            audience=self._replicas,
            members=self._below,
            data=lambda slots: DataPlane(self._port, self._inbox, slots, progress=False),
            made=self._made,
        )
        self._lines.take_over()
        self._below.live = self._holdings
        self._below.lines = lambda: [self._coordinator, *(line.coordinator for line in self._lines.all())]
        self._above: Upstream | None = None
        own = relay_keys_of(config)
        if lease is None:
            self._arena.lease(0)
        else:
            self._above = Upstream(
                *(config, self._coordinator, self._lines, self._below),
                lease=lease,
                data=self._data,
                connect=lambda: connect(self._context, config.upstream or "", own),
                watching=self._watching,
            )
        adapters = AdapterCalls(config, self._coordinator, self._lines, self._files)
        self._trainers = Trainers(config, self._coordinator, self._push, counters, self._data, self._lines, adapters)
        self._operator = Operator(
            config,
            self._coordinator,
            replicas=self._replicas,
            lines=self._lines,
            adapters=adapters,
            files=self._files,
            counters=counters,
            relay=self._relay_status,
            send=lambda peer, message: self._internal.send(peer, messages.encode(message)),
        )
        self._snapshots = Snapshots(
            *(config, self.layout, config.state / SNAPSHOT_FILE),
            saved=self._history.saved,
            slots=slots,
            files=self._files,
            counters=counters,
        )
        self._first = FirstWeights(config, self._coordinator, self._files, self._snapshots)
        for background in (self._background, self._files):
            self._watching.watch(background.fileno(), background.deliver)
        self._stopped = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watching.watch(self._stopped, lambda: os.eventfd_read(self._stopped))

    def _make_replicas(self, coordinator: Coordinator, lease: Lease | None) -> Replicas:
        self._replicas = Replicas(
            self._config, coordinator, send=self.send, lease=lease, watching=self._watching, counters=self._counters
        )
        return self._replicas

    def _bind(
        self, endpoint: str, max_message: int, backlog: int, keys: StoreKeys | None = None, file: Path | None = None
    ) -> Router:
        """file: says what was bound; a free port is the same one again after a restart, if it is still free."""
        before = None if file is None else bound_before(endpoint, file)
        router: Router | None = None
        if before is not None:
            with contextlib.suppress(zmq.ZMQError):
                router = Router(self._context, before, max_message, backlog, keys)
        try:
            router = router or Router(self._context, endpoint, max_message, backlog, keys)
        except zmq.ZMQError as error:
            raise StartError(f"cannot listen on {endpoint}: {error.strerror}") from error
        if file is not None and not _says(file, router.endpoint):  # it may be all that a full disk has left
            file.write_text(router.endpoint + "\n")
        self._routers.append(router)
        self._watching.add(router.socket)
        return router

    def _open_data(self, slots: Slots) -> DataPlane:
        self._inbox = Inbox()
        self._watching.watch(self._inbox.fileno(), self._inbox.deliver)
        self._port = self._data_port(self._push, self._config.data_port)
        return DataPlane(self._port, self._inbox, slots, progress=self._config.relay_endpoint is not None)

    def _data_port(self, beside: Router, number: int | None) -> DataPort | None:
        if number is None or self._gate is not None or not beside.endpoint.startswith("tcp://"):
            return None
        self._data_ports.append(DataPort(beside.endpoint, number, self._watching, self._counters))
        return self._data_ports[-1]

    def run(self) -> None:
        """Serve until `stop`; leaves nothing in shared memory then.

        Raises StartError when there are no weights to begin with, else what the loop failed with: the process must end
        at once then, as if it were killed. What is live stays in the arena, replicas go on serving it, and the next
        store takes it over; nothing more is said to anybody, as nobody knows what is true.
        """
        try:
            self._serve()
        except BaseException:
            if self._history.live is None or self._stopping:
                self._close()
            raise
        self._close()

    def _serve(self) -> None:
        log.info(
            "store is up",
            extra={"push_endpoint": self._push.endpoint, "arena": str(self._arena.path), "pid": os.getpid()},
        )
        copying.prepare()
        if self._config.huge_pages:
            self._pages.start()
        if self._above is None:
            self._lines.bring_back(time.monotonic())  # first: who is served by the model is served by them
        if not self._taken_over and self._above is None:
            self._first.start()
        turn_s = 0.0
        while not self._stopping or self._lingers(time.monotonic()):
            turn_s = self._one_turn(turn_s)

    def _one_turn(self, turn_s: float) -> float:
        """Hear what has arrived and do what is due. turn_s: for so long nobody was heard, in the turn before.

        Returns for how long nobody was heard in this one.
        """
        heard = self._receive(turn_s)
        self._expire(heard)  # not as of now: what has arrived since is heard first
        self._operator.publish(time.monotonic())
        self._snapshots.follow(self._in_arena)
        self._lines.save()
        if self._first.failure is not None:
            raise self._first.failure
        return time.monotonic() - heard

    @property
    def _in_arena(self) -> Live | None:
        """What is live, once the arena has it."""
        return None if self._coordinator.awaits_arena else self._history.live

    def _lingers(self, now: float) -> bool:
        """Told to stop, with a version that its snapshot is to have, and the arena does not yet."""
        return self._config.snapshot and self._coordinator.awaits_arena and now < self._stopped_at + LINGER_S

    def stop(self) -> None:
        """End `run`; from any thread."""
        self._stopped_at, self._stopping = time.monotonic(), True
        os.eventfd_write(self._stopped, 1)

    def send(self, identity: bytes, message: ToReplica | ToApi) -> bool:
        """Send a message to a replica or an API process; False if it is not there."""
        return self._internal.send(identity, messages.encode(message))

    def _receive(self, turn_s: float) -> float:
        """The time as of which all is heard. turn_s: for so long nobody was, in the turn before."""
        began = time.monotonic()
        patience_ms = self._patience(began)
        ready = self._watching.wait(patience_ms)
        woke = time.monotonic()
        self._take(ready)
        late_s = 0.0 if patience_ms is None else woke - began - patience_ms / 1000
        return self._caught_up(woke) if late_s >= LATE_S or turn_s >= HELD_S else woke

    def _caught_up(self, heard: float) -> float:
        """Who is alive has said so meanwhile, and must not be taken to be silent."""
        until = time.monotonic() + CATCH_UP_S
        while time.monotonic() < until:
            ready, heard = self._watching.wait(PAUSE_MS), time.monotonic()
            if not ready:
                break
            self._take(ready)
        return heard

    def _take(self, ready: Ready) -> None:
        if self._gate is not None and self._gate.socket in ready:
            self._gate.answer()
        if self._internal.socket in ready:
            receive_messages(
                self._internal,
                messages.decode_incoming,
                request=self._from_inside,
                malformed=self._malformed,
                broken=self._malformed,
                counters=self._counters,
            )
        if self._push.socket in ready:
            receive_pushes(self._push, self._trainers, self._config.max_frame, self._counters)
        below = self._below
        if below.roster.router is not None and below.roster.router.socket in ready:
            receive_messages(
                below.roster.router,
                decode_from_below,
                request=below.request,
                malformed=below.malformed,
                broken=below.broken,
                counters=self._counters,
            )
        if self._above is not None and self._above.socket in ready:
            self._above.receive()
        self._watching.call(ready)

    def _patience(self, now: float) -> int | None:
        """Milliseconds until something must be done though nothing arrives; None = for ever."""
        silence = self._replicas.next_silence() if self._coordinator.settled else None
        above = self._above.next_deadline() if self._above is not None else None
        relay = (self._below.next_deadline(), above)
        strangers = [port.next_deadline() for port in self._data_ports]
        lines = self._lines.next_deadline()
        told = self._operator.next_deadline()
        ends = self._stopped_at + LINGER_S if self._stopping else None
        times = (
            self._coordinator.next_deadline(),
            lines,
            told,
            ends,
            self._trainers.next_expiry(),
            silence,
            *strangers,
            *relay,
        )
        soonest = min((t for t in times if t is not None), default=None)
        return None if soonest is None else max(0, int((soonest - now) * 1000) + 1)

    def _expire(self, now: float) -> None:
        self._trainers.expire(now)
        self._coordinator.tick(now)
        self._lines.tick(now)
        self._below.tick(now)
        for port in self._data_ports:
            port.tick(now)
        if self._above is not None and self._above.tick(now) and self._coordinator.settled:
            self._replicas.admit_held(now)
        if self._coordinator.settled:
            self._replicas.drop_silent(now)
        self._below.roster.pump()

    def _holdings(self) -> Holdings:
        adapters = {a.name: VersionName(a.live.run_id, a.live.version, a.live.digest) for a in self._lines.live}
        return Holdings(version_of(self._history.live), adapters)

    def _relay_status(self, now: float) -> dict[str, Any] | None:
        if self._above is None and self._below.roster.router is None:
            return None
        above = self._above.status(now) if self._above is not None else None
        return {"above": above, "below": self._below.status(now), "sent_bytes": self._below.roster.sent_bytes}

    def _from_inside(self, peer: bytes, message: FromReplica | FromApi) -> None:
        if isinstance(message, FromApi):
            self._operator.request(peer, message)
        else:
            self._replicas.request(peer, message)

    def _malformed(self, peer: bytes, message: str) -> None:
        log.warning("bad message inside the service: %s", message)
        self.send(peer, Refused(message))

    def _close(self, *, keep_arena: bool = False) -> None:
        if not keep_arena:
            self._arena.unlink()  # first: it must not stay, whatever the rest takes
        if self._opened:
            try:
                self._history.write_arrived()
            except OSError as error:
                log.error("the next store may take what was live to be lost: %s", error)
            session, refusal = self._coordinator.session, PushRefused("aborted", "the store is stopping")
            if session is not None:
                self._coordinator.abort(session, refusal, time.monotonic(), Event.STOPPING)
            if self._coordinator.following is not None:
                self._coordinator.following.close()
            self._replicas.close()
            self._lines.stop()
            self._below.roster.close()
            if self._above is not None:
                self._above.close()
        self._pages.close()
        self._files.close()
        self._background.close()
        if self._opened:
            self._snapshots.finish(self._in_arena)
            self._lines.close()
        for port in self._data_ports:
            port.close()
        for router in self._routers:
            router.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        self._arena.close()
        self._lock.close()
        log.info("store has stopped")


def layout_of(config: StoreConfig) -> Layout:
    """Where everything lies that the model serves."""
    try:
        return make_layout(manifest_for(read_config(config.model), config.dtype), config.tp)
    except (ValueError, CheckpointError) as error:
        raise StartError(f"{config.model} cannot be served with tp {config.tp}: {error}") from error


def keys_of(config: StoreConfig) -> StoreKeys | None:
    """The keys of the store's key file, if it has one."""
    try:
        return None if config.curve_keys is None else StoreKeys.read(config.curve_keys)
    except (OSError, ValueError) as error:
        raise StartError(f"curve_keys: {error}") from error


def relay_keys_of(config: StoreConfig) -> TrainerKeys | None:
    """The store's own keys for the store above, if it has some."""
    try:
        return None if config.relay_keys is None else TrainerKeys.read(config.relay_keys)
    except (OSError, ValueError) as error:
        raise StartError(f"relay_keys: {error}") from error


def bound_before(endpoint: str, file: Path) -> str | None:
    """An endpoint that asks for a free port, with the port that the process before this one was given; None = none."""
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or port not in ("*", "0"):
        return None
    try:
        return f"{host}:{urlsplit(file.read_text().strip()).port or port}"
    except (OSError, ValueError):
        return None


def _says(file: Path, text: str) -> bool:
    try:
        return file.read_text().strip() == text
    except OSError:
        return False


def lock_run_dir(run_dir: Path) -> BinaryIO:
    """Held as long as the file is open: one store to a run directory."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (run_dir / "store.lock").open("wb")
    except OSError as error:
        raise StartError(f"run_dir {run_dir} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise StartError(f"another store runs in {run_dir}; stop it, or choose another name or run_dir") from None
    return lock

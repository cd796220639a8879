"""What a store serves when it starts: the arena it left behind, else its snapshot, else the checkpoint directory."""

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

from rollout_client.errors import ArenaError
from weight_manager.arena import Arena, sweep
from weight_manager.background import Background
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.devices import Devices, Place
from weight_manager.disk import Reader, read_checkpoint
from weight_manager.errors import PushRefused, StartError, TooSlow
from weight_manager.history import History, Intent
from weight_manager.layout import Layout, region_digests, version_digest
from weight_manager.messages import Live
from weight_manager.metrics import Counters
from weight_manager.own_sessions import DiskLoad, Outcome
from weight_manager.snapshot import SNAPSHOT_FILE, Snapshots, read_head, read_snapshot

log = logging.getLogger(__name__)


def open_arena(
    config: StoreConfig, layout: Layout, history: History, devices: Devices, counters: Counters
) -> tuple[Arena, bool]:
    """The arena, and whether it is the old one with its live version intact. Raises StartError.

    A version that was live from device memory is brought into it, as long as a rank is there that has it. If none is,
    it is lost, and the one before is live again (ADR 23).
    """

    def recover(arena: Arena) -> bool:
        if not history.saved.ahead:
            return False
        return rescue(arena, layout, history, devices) or go_back(arena, layout, history, counters)

    arena = take_over(Path(history.saved.arena), layout, history, recover)
    if arena is not None:
        sweep(config.arena_dir, config.name)
        return arena, True
    sweep(config.arena_dir, config.name)
    arena = Arena.create(config.arena_dir, config.name, layout.slot_bytes)
    try:
        history.moved(arena.path, layout.digest)
    except OSError as error:
        arena.close(unlink=True)
        raise StartError(f"{config.state} cannot be written: {error.strerror}") from error
    return arena, False


def take_over(
    path: Path, layout: Layout, history: History, recover: Callable[[Arena], bool] = lambda arena: False
) -> Arena | None:
    """The arena that an earlier life of the store left, if its live version is intact; else None, and it is gone.

    recover: asked where it is not; whether what the history says to be live is there now.
    """
    live = history.live
    if live is None or history.saved.layout != layout.digest or not path.is_file():
        return None
    try:
        arena = Arena.adopt(path)
    except (ArenaError, OSError) as error:
        log.warning("the old arena cannot be taken over: %s", error)
        return None
    intact = holds(arena, layout, live) or recover(arena)
    live = history.live or live
    if not intact:
        log.error("the old arena does not hold version %d any more", live.version, extra={"version": live.version})
        arena.close(unlink=True)
        return None
    if history.saved.ahead:
        history.arrived()
    history.forget_previous()
    log.info("took over version %d where it lay", live.version, extra={"version": live.version, "epoch": live.epoch})
    return arena


def holds(arena: Arena, layout: Layout, version: Live) -> bool:
    """Whether its slot has the bytes that its digest names."""
    try:
        return version_digest(layout, region_digests(layout, arena.slot(version.slot))) == version.digest
    except (ArenaError, ValueError) as error:
        log.warning("the old arena does not fit: %s", error)
        return False


def rescue(arena: Arena, layout: Layout, history: History, devices: Devices) -> bool:
    """Bring the live version into its slot from a rank's memory; whether that was to be had."""
    live = history.live
    assert live is not None
    for held in devices.find((live.slot, live.write_epoch)):
        why = devices.copy_now(held, Place(arena.path, live.slot, live.write_epoch))
        devices.let_go(held)
        if not why and holds(arena, layout, live):
            log.warning("version %d came into the arena from device memory", live.version)
            return True
        log.error("version %d could not be copied from device memory: %s", live.version, why or "its digest differs")
    return False


def go_back(arena: Arena, layout: Layout, history: History, counters: Counters) -> bool:
    """The live version is lost: make the one before live, if the arena still has that; whether it has. Raises
    StartError if that cannot be written down.
    """
    lost, previous = history.live, history.previous
    assert lost is not None
    log.critical(
        "version %d of run %r was live from device memory and is lost: every process that held it ended before the "
        "arena had it. Its number may come again in that run with the same bytes only (digest %s)",
        *(lost.version, lost.run_id, lost.digest),
        extra={"version": lost.version, "run_id": lost.run_id},
    )
    counters.add("versions_lost")
    if previous is None or not holds(arena, layout, previous):
        return False
    try:
        history.lose(time.time())
    except OSError as error:
        raise StartError(f"the loss of version {lost.version} cannot be written down: {error.strerror}") from error
    log.critical("version %d is served instead", previous.version, extra={"version": previous.version})
    return True


class FirstWeights:
    """Loads them in the background, through a session like any other. `failure` is set if there are none."""

    def __init__(
        self,
        config: StoreConfig,
        coordinator: Coordinator,
        files: Background,
        snapshots: Snapshots,
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._files = files
        self._snapshots = snapshots
        self.failure: StartError | None = None

    def start(self) -> None:
        """Load from the snapshot if there is one, else from the checkpoint directory, if weights are to be loaded."""
        path, layout = self._config.state / SNAPSHOT_FILE, self._coordinator.layout
        saved = read_head(path, layout)
        if saved is None:
            self._from_directory()
        else:
            intent = Intent(saved.run_id, saved.version, "snapshot", str(path), transport="disk", force=True)
            self._load(intent, functools.partial(read_snapshot, path, layout), self._snapshot_done)

    def _snapshot_done(self, outcome: Outcome) -> None:
        live = self._coordinator.history.live
        if isinstance(outcome, PushRefused) and outcome.code == "deadline":  # its version is not to be gone back from
            self._failed(outcome)
        elif isinstance(outcome, PushRefused):
            log.error("the snapshot is of no use: %s", outcome.message)
            self._from_directory()
        elif live is not None:
            self._snapshots.adopted(live)

    def _from_directory(self) -> None:
        if self._config.load_weights:
            intent = Intent("", 0, "disk", str(self._config.model), transport="disk", force=True)
            reader = functools.partial(read_checkpoint, self._config.model, self._coordinator.layout)
            self._load(intent, reader, self._directory_done)

    def _directory_done(self, outcome: Outcome) -> None:
        if isinstance(outcome, PushRefused) and outcome.code != "aborted":
            self._failed(outcome)

    def _failed(self, refusal: PushRefused) -> None:
        message = f"the first weights cannot be loaded: {refusal.message}"
        if refusal.code == "deadline":
            limit = self._config.first_load_s
            self.failure = TooSlow(
                f"{message}; store.first_load_s allows {limit:g} s: give it more (--set store.first_load_s=...)"
            )
        else:
            self.failure = StartError(message)

    def _load(self, intent: Intent, reader: Reader, done: Callable[[Outcome], None]) -> None:
        load = DiskLoad(self._coordinator, self._files, done, self._config.first_load_s)
        load.start(intent, reader, time.monotonic())

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
from weight_manager.disk import Reader, read_checkpoint
from weight_manager.errors import PushRefused, StartError
from weight_manager.history import History, Intent
from weight_manager.layout import Layout, region_digests, version_digest
from weight_manager.own_sessions import DiskLoad, Outcome
from weight_manager.snapshot import SNAPSHOT_FILE, Snapshots, read_head, read_snapshot

log = logging.getLogger(__name__)


def open_arena(config: StoreConfig, layout: Layout, history: History) -> tuple[Arena, bool]:
    """The arena, and whether it is the old one with its live version intact. Raises StartError."""
    arena = take_over(Path(history.saved.arena), layout, history)
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


def take_over(path: Path, layout: Layout, history: History) -> Arena | None:
    """The arena that an earlier life of the store left, if its live version is intact; else None, and it is gone."""
    live = history.live
    if live is None or history.saved.layout != layout.digest or not path.is_file():
        return None
    try:
        arena = Arena.adopt(path)
    except (ArenaError, OSError) as error:
        log.warning("the old arena cannot be taken over: %s", error)
        return None
    try:
        intact = version_digest(layout, region_digests(layout, arena.slot(live.slot))) == live.digest
    except (ArenaError, ValueError) as error:
        log.warning("the old arena does not fit: %s", error)
        intact = False
    if not intact:
        log.error("the old arena does not hold version %d any more", live.version, extra={"version": live.version})
        arena.close(unlink=True)
        return None
    history.forget_previous()
    log.info("took over version %d where it lay", live.version, extra={"version": live.version, "epoch": live.epoch})
    return arena


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
        if isinstance(outcome, PushRefused):
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
            self.failure = StartError(f"the first weights cannot be loaded: {outcome.message}")

    def _load(self, intent: Intent, reader: Reader, done: Callable[[Outcome], None]) -> None:
        load = DiskLoad(self._coordinator, self._files, done, self._config.max_deadline_s)
        load.start(intent, reader, time.monotonic())

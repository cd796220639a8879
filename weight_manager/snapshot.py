"""The live version on disk, so that a container that comes back empty still serves what it served last.

One file for the model, and one for each adapter: a page of JSON (which version, which layout, which digest), then the
slot as it is, then the adapter's shape. Written in the background after a commit and renamed into place once synced;
while one is written later versions wait, and then only the newest is. The slot is pinned meanwhile: the store stages
into another one.
"""

import logging
import os
from pathlib import Path
from threading import Event
from time import monotonic

import msgspec

from weight_manager.adapters.plan import AdapterShape
from weight_manager.background import Background
from weight_manager.config import StoreConfig
from weight_manager.disk import Loaded, Loading
from weight_manager.errors import UNREADABLE, CheckpointError
from weight_manager.history import Saved
from weight_manager.layout import PAGE, Layout, region_digests, version_digest
from weight_manager.messages import Live
from weight_manager.metrics import Counters
from weight_manager.slots import Slots
from weight_manager.whole_file import scratch_of

log = logging.getLogger(__name__)

SNAPSHOT_FILE = "snapshot.weights"
_BLOCK = 64 << 20
RETRY_S = 60.0
"""Seconds until a version that could not be written is tried again."""


class Head(msgspec.Struct, frozen=True):
    """First page of the file, padded with spaces."""

    layout: str
    live: Live
    adapter: str = ""  # whose version it is; "": the model's
    shape: int = 0  # bytes of the adapter's shape, at the end of the file


class Snapshots:
    """Follows what is live, one file at a time. Off unless configured."""

    def __init__(
        self,
        config: StoreConfig,
        layout: Layout,
        path: Path,
        *,
        saved: Saved,
        slots: Slots,
        files: Background,
        counters: Counters,
    ) -> None:
        """saved: says whose versions these are."""
        self._path = path
        self._enabled = config.snapshot
        self._adapter = saved.adapter
        self._shape = b"" if saved.shape is None else msgspec.json.encode(saved.shape)
        self._layout = layout
        self._slots = slots
        self._files = files
        self._counters = counters
        self._running = False
        self._written = 0  # epoch of the last one
        self._failed, self._again = 0, 0.0  # epoch of the last one that could not be written, and its next try
        self._removed = Event()

    def follow(self, live: Live | None) -> None:
        """Start writing what is live, unless it is written or another is still being written."""
        if not self._enabled or self._running or live is None or live.epoch == self._written:
            return
        if live.epoch == self._failed and monotonic() < self._again:
            return
        self._running = True
        slot = self._slots.arena.slot(live.slot)
        self._slots.enter(live.slot)

        def done(_: None) -> None:
            self._running, self._written = False, live.epoch
            self._slots.leave(live.slot)
            self._counters.add("snapshots")
            log.info("version %d is on disk", live.version, extra={"version": live.version, "epoch": live.epoch})

        def failed(error: BaseException) -> None:
            self._running = False
            self._failed, self._again = live.epoch, monotonic() + RETRY_S
            self._slots.leave(live.slot)
            self._counters.add("snapshots_failed")
            log.error("version %d could not be saved: %s", live.version, error, extra={"version": live.version})

        self._files.submit(lambda: self._write(live, slot), done, failed)

    def finish(self, live: Live | None) -> None:
        """The store stops and its threads have ended: write what is live now, unless the file holds it."""
        if not self._enabled or live is None or read_head(self._path, self._layout) == live:
            return
        try:
            self._write(live, self._slots.arena.slot(live.slot))
        except OSError as error:
            log.error("version %d could not be saved: %s", live.version, error, extra={"version": live.version})

    def adopted(self, live: Live) -> None:
        """This version came from the snapshot; it need not be written again."""
        self._written = live.epoch

    def remove(self) -> None:
        """Nothing is live any more: the next life of the store finds nothing, and were this one to end now. A thread
        that is writing the file sees to it after that.
        """
        if self._enabled:
            self._removed.set()
            self._unlink()

    def _unlink(self) -> None:
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s could not be removed: %s", self._path, error)

    def _write(self, live: Live, slot: memoryview) -> None:
        head = Head(self._layout.digest, live, self._adapter, len(self._shape))
        write_snapshot(self._path, head, slot, self._shape)
        if self._removed.is_set():
            self._unlink()


def write_snapshot(path: Path, head: Head, slot: memoryview, shape: bytes = b"") -> None:
    """Replace the snapshot as a whole. Raises OSError, then the old one is still there."""
    scratch = scratch_of(path)
    try:
        with scratch.open("wb", buffering=0) as file:
            _write(file.fileno(), msgspec.json.encode(head).ljust(PAGE), 0)
            for start in range(0, len(slot), _BLOCK):
                _write(file.fileno(), slot[start : start + _BLOCK], PAGE + start)
            _write(file.fileno(), shape, PAGE + len(slot))
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def read_head(path: Path, layout: Layout) -> Live | None:
    """What the snapshot holds, if there is one for this layout."""
    try:
        with path.open("rb") as file:
            head = msgspec.json.decode(file.read(PAGE), type=Head)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        log.error("%s cannot be read: %s", path, error)
        return None
    if head.layout != layout.digest:
        log.warning("%s holds another layout (model config, dtype or tp have changed); it is not used", path)
        return None
    return head.live


def read_adapter_head(path: Path) -> tuple[str, AdapterShape, Live] | None:
    """Whose version an adapter's snapshot holds, and of which shape."""
    try:
        with path.open("rb") as file:
            head = msgspec.json.decode(file.read(PAGE), type=Head)
            file.seek(-head.shape, os.SEEK_END)
            return head.adapter, msgspec.json.decode(file.read(), type=AdapterShape), head.live
    except (OSError, *UNREADABLE) as error:
        log.error("%s cannot be read: %s", path, error)
        return None


def read_snapshot(path: Path, layout: Layout, slot: memoryview, loading: Loading) -> Loaded:
    """Fill a slot from a snapshot (a `disk.Reader`). Raises CheckpointError if it is not what it says it is."""
    try:
        with path.open("rb", buffering=0) as file:
            head = msgspec.json.decode(file.read(PAGE), type=Head)
            for start in range(0, len(slot), _BLOCK):
                block = slot[start : start + _BLOCK]
                if file.readinto(block) != len(block):
                    raise CheckpointError(f"{path} is too short")
                loading.goes_on(len(block))
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if version_digest(layout, region_digests(layout, slot)) != head.live.digest:
        raise CheckpointError(f"{path}: its bytes do not match their digest", code="checksum_mismatch")
    return Loaded([], [], [])


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count

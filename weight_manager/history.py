"""What was made live, in order, kept on disk: the commit point of every push, what a restart goes on from, and which
versions may come next (`Intent`).

One small JSON file, replaced atomically and synced. It also says where the arena is, so that a restarted store can take
it over, and reserves epochs ahead, so that an epoch shown to a replica in a commit that failed is not used again by the
next life of the store.

Syncing takes milliseconds, in which everybody would wait for a commit. So its record is written and synced beside the
file while replicas prepare (`draft`), and takes the file's name once all have flipped (`commit`). That name is on the
disk a moment later (`sync_name`): a machine that loses its power in this moment, and the arena with it, comes back with
the record before, whole.
"""

import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from rollout_client.protocol import AdapterInFlight
from weight_manager.adapters.plan import AdapterShape
from weight_manager.errors import UNREADABLE, PushRefused, StartError
from weight_manager.messages import Live
from weight_manager.whole_file import put_in_place, sync_directory, write_atomically, write_beside

log = logging.getLogger(__name__)

FORMAT = 1
RESERVE = 64
"""Epochs reserved ahead with each write."""

Source = Literal["push", "disk", "snapshot", "relay", "rollback", "merge", "lost"]
"""lost: live again, as the version after it was lost."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One commit, as the history file and the status show it."""

    run_id: str
    version: int
    epoch: int
    digest: str
    time: float  # seconds since 1970
    source: Source
    client: str = ""
    bytes: int = 0
    replicas: int = 0
    seconds: dict[str, float] = {}  # stage, seal, prepare, commit
    stall_ms: dict[str, float] = {}  # replica -> ms, as far as reported
    merged: bool = False  # an adapter was merged into it, by the store above


class Saved(msgspec.Struct, frozen=True):
    """Contents of the history file, weights.json."""

    layout: str = ""  # digest of the layout the arena's slots follow
    arena: str = ""  # path
    live: Live | None = None
    previous: Live | None = None
    reserved: int = 1  # the next life of the store starts its epochs here
    records: list[Record] = []  # oldest first
    format: int = FORMAT
    id: str = ""  # of this store, for the one above
    members: list[str] = []  # stores below that may hold a lease
    adapter: str = ""  # whose versions these are; "": the model's
    shape: AdapterShape | None = None  # of the adapter
    unmerged: Live | None = None  # while an adapter is merged into what is live: the weights without it
    doubt: Live | None = None  # flipped at the word of the store above, which has not said yet whether it counts
    ahead: bool = False  # what is live is in device memory, and not known to be in the arena
    lost: Live | None = None  # was live so, and is gone: only the same bytes may have its number in that run


class _Draft(NamedTuple):
    """What lies beside the file, and what the file said when it was written."""

    before: Saved
    saved: Saved


def _alike(draft: Saved, committed: Saved) -> bool:
    """Whether they say the same, but for when and how long."""
    *_, drafted = draft.records
    *before, record = committed.records
    record = msgspec.structs.replace(record, time=drafted.time, seconds=drafted.seconds)
    return draft == msgspec.structs.replace(committed, records=[*before, record], reserved=draft.reserved)


@dataclass(frozen=True)
class Intent:
    """What a push wants to become. run_id "" = the service's own loads."""

    run_id: str
    version: int
    source: Source
    client: str = ""
    in_flight: AdapterInFlight = "keep"
    transport: str = ""
    force: bool = False
    adapter: str = ""  # whose version it is; "": the model's
    merged: bool = False  # of the store above, which says that an adapter is merged into it

    def __str__(self) -> str:
        by = f" by {self.client}" if self.client else ""
        run = f" of run {self.run_id!r}" if self.run_id else ""
        whose = f" of adapter {self.adapter}" if self.adapter else ""
        return f"version {self.version}{whose}{run} ({self.source}{by})"

    def check_order(self, history: "History", *, again: bool = False) -> None:
        """Versions rise within a run, unless force says otherwise; the run's last may come again while another run's
        is live, or where its bytes are wanted once more (again). Raises PushRefused stale_version.
        """
        last, live = history.last(self.run_id), history.live
        if self.force or last is None:
            return
        is_live = live is not None and live.run_id == self.run_id
        if self.version < last.version or (is_live and not again and self.version == last.version):
            advice = "push a higher version, or under another run_id, or force it"
            message = f"{self} is not above {last.version}, the last of that run: {advice}"
            raise PushRefused("stale_version", message)

    def check_same(self, history: "History", digest: str) -> None:
        """A version that went live before has the same bytes now. Raises PushRefused stale_version."""
        last, lost = history.last(self.run_id), history.saved.lost
        if lost is not None and (lost.run_id, lost.version) == (self.run_id, self.version):
            last = Record(*(lost.run_id, lost.version, lost.epoch, lost.digest), time=0.0, source="push")
        if last is not None and last.version == self.version and last.digest != digest and not self.force:
            advice = "push it as another version, or force it"
            message = f"{self} went live before as {last.digest} and is {digest} now: {advice}"
            raise PushRefused("stale_version", message)


class History:
    """The log and what is live. Every change is in the file before the method returns; OSError changes nothing."""

    synced = True
    """Whether a change is on the disk when a method returns, and not only where every process reads it."""

    def __init__(self, path: Path, keep: int) -> None:
        """Reads `path` if it exists. Raises StartError when it is there and cannot be understood."""
        self._path = path
        self._keep = keep
        saved = self._read()
        self.saved = saved if saved.id else msgspec.structs.replace(saved, id=secrets.token_hex(8))
        self._next = self.saved.reserved
        self._arrived = False  # and the file does not say so
        self._draft: _Draft | None = None
        self.name_unsynced = False
        """The file has been replaced, and its directory is not on the disk: `sync_name` is due."""

    @property
    def live(self) -> Live | None:
        """The version being served."""
        return self.saved.live

    @property
    def previous(self) -> Live | None:
        """What was live before, while its slot still holds it."""
        return self.saved.previous

    def last(self, run_id: str) -> Record | None:
        """The latest commit of a run, live or not."""
        return next((r for r in reversed(self.saved.records) if r.run_id == run_id), None)

    def next_epoch(self) -> int:
        """Take an epoch that no replica has seen. It is used up even if the commit then fails."""
        if self._next >= self.saved.reserved:
            self._write(self.saved)
        self._next += 1
        return self._next - 1

    def pass_over(self, epoch: int) -> None:
        """This epoch is taken, and so are those before it, whatever our file says: it may have been moved away."""
        self._next = max(self._next, epoch + 1)

    def moved(self, arena: Path, layout: str) -> None:
        """Note a new arena: whatever the old one held is gone, nothing is live."""
        empty = msgspec.structs.replace(self.saved, live=None, previous=None, unmerged=None, doubt=None, ahead=False)
        if self.saved.ahead:
            empty = msgspec.structs.replace(empty, lost=self.saved.live)
        self._write(msgspec.structs.replace(empty, arena=str(arena), layout=layout))

    def draft(self, live: Live, record: Record, *, ahead: bool = False) -> None:
        """Write what `commit` is going to say beside the file, while others decide on it. Arguments as there; when and
        how long may be others by then, and are right in the file with its next write. Of a disk that takes nothing
        `commit` tells.
        """
        self._draft = None
        saved = msgspec.structs.replace(self._committed(live, record, ahead), reserved=self._next + RESERVE)
        try:
            write_beside(self._path, msgspec.json.encode(saved), synced=self.synced)
        except OSError as error:
            log.warning("the commit could not be written ahead: %s", error)
        else:
            self._draft = _Draft(self.saved, saved)

    def commit(self, live: Live, record: Record, *, ahead: bool = False) -> None:
        """Make `live` what is served: the commit point. ahead: from device memory, the arena has yet to get it."""
        committed, draft = self._committed(live, record, ahead), self._draft
        if draft is None or draft.before is not self.saved or not _alike(draft.saved, committed):
            self._write(committed)
            return
        self._draft = None
        put_in_place(self._path, synced=self.synced)
        self.saved, self._arrived = msgspec.structs.replace(committed, reserved=draft.saved.reserved), False
        self.name_unsynced = self.synced

    def sync_name(self) -> None:
        """See to it that the last commit outlives the machine's power. May be called in any thread; one that fails is
        logged.
        """
        self.name_unsynced = False
        sync_directory(self._path)

    def _committed(self, live: Live, record: Record, ahead: bool) -> Saved:
        saved, lost = self.saved, self.saved.lost
        if lost is not None and lost.run_id == live.run_id and lost.version <= live.version:
            lost = None
        records = [*saved.records, record][-self._keep :]
        previous = None if saved.ahead else saved.live  # a slot that is not whole is nothing to go back to
        changed = msgspec.structs.replace(saved, live=live, previous=previous, records=records, doubt=None, lost=lost)
        return msgspec.structs.replace(changed, unmerged=self._left_unmerged(live, record), ahead=ahead)

    def arrived(self) -> None:
        """The arena has what is live; reaches the disk with the next write. A restart before that looks at the slot."""
        self.saved, self._arrived = msgspec.structs.replace(self.saved, ahead=False), True

    def write_arrived(self) -> None:
        """Have the file say that: there will be no slot to be looked at. Raises OSError."""
        if self._arrived:
            self._write(self.saved)

    def lose(self, time: float) -> None:
        """What is live was in device memory alone and is gone: the version before is live again, where its slot still
        holds it as the caller has made sure.
        """
        saved, back = self.saved, self.saved.previous
        assert back is not None
        live = msgspec.structs.replace(back, epoch=self.next_epoch())
        record = Record(live.run_id, live.version, live.epoch, live.digest, time=time, source="lost")
        records = [*saved.records, record][-self._keep :]
        changed = msgspec.structs.replace(saved, live=live, previous=None, unmerged=None, records=records)
        self._write(msgspec.structs.replace(changed, ahead=False, lost=saved.live))

    @property
    def without_adapters(self) -> Live | None:
        """The live version, or what it was before an adapter was merged into it; None when that is not kept."""
        live = self.saved.live
        return self.saved.unmerged if live is not None and self.is_merged(live.digest) else live

    def kept_slots(self) -> tuple[int, ...]:
        """Slots that are kept beside that of the live version: the next merge starts from what lies there; and while
        what is live is not in the arena, what a service without it would go back to.
        """
        kept = (self.saved.unmerged, self.saved.previous if self.saved.ahead else None)
        return tuple(version.slot for version in kept if version is not None)

    def is_merged(self, digest: str) -> bool:
        """Whether these weights have an adapter merged into them."""
        return any((r.source == "merge" or r.merged) and r.digest == digest for r in self.saved.records)

    def _left_unmerged(self, live: Live, record: Record) -> Live | None:
        if record.source == "merge":
            return self.without_adapters
        return self.saved.unmerged if record.source == "rollback" and self.is_merged(live.digest) else None

    def may_go_live(self, live: Live) -> None:
        """Note that every rank here has flipped to `live` and the store above decides: a restart must find its
        bytes.
        """
        self._write(msgspec.structs.replace(self.saved, doubt=live))

    def remember(self, members: list[str]) -> None:
        """Note which stores below may serve for a lease after a crash of this one."""
        names = sorted(set(members))
        if names != self.saved.members:
            self._write(msgspec.structs.replace(self.saved, members=names))

    def forget_slot(self, slot: int) -> None:
        """Forget what a slot holds, as it is being given away: after a crash from here on nobody may trust what is
        noted of it.
        """
        previous, doubt = (v if v and v.slot != slot else None for v in (self.saved.previous, self.saved.doubt))
        self.saved = msgspec.structs.replace(self.saved, previous=previous, doubt=doubt)

    def forget_previous(self) -> None:
        """Forget the previous version: nobody vouches for its slot any more."""
        if self.saved.previous is not None or self.saved.unmerged is not None:
            self.saved = msgspec.structs.replace(self.saved, previous=None, unmerged=None)

    def amend(self, epoch: int, stall_ms: dict[str, float]) -> None:
        """Add what replicas reported after the commit; reaches the disk with the next write."""
        records = [msgspec.structs.replace(r, stall_ms=stall_ms) if r.epoch == epoch else r for r in self.saved.records]
        self.saved = msgspec.structs.replace(self.saved, records=records)

    def tail(self, count: int) -> list[dict[str, Any]]:
        """The newest `count` records as plain data, newest last."""
        return [msgspec.to_builtins(r) for r in self.saved.records[-count:]]

    def _read(self) -> Saved:
        try:
            saved = msgspec.json.decode(self._path.read_bytes(), type=Saved)
        except FileNotFoundError:
            return Saved()
        except (OSError, *UNREADABLE) as error:
            raise StartError(f"{self._path} cannot be read ({error}); move it away to start without history") from error
        if saved.format != FORMAT:
            raise StartError(f"{self._path} has format {saved.format}, this version reads {FORMAT}; move it away")
        return saved

    def _write(self, saved: Saved) -> None:
        self._draft = None  # what it wrote is gone
        saved = msgspec.structs.replace(saved, reserved=self._next + RESERVE)
        write_atomically(self._path, msgspec.json.encode(saved), synced=self.synced)
        self.saved, self._arrived = saved, False

"""One adapter's line of versions at the store: a small weight plane of its own, beside the model's.

Arena, layout, history, sessions and votes are the model's in small (coordinator.py drives both). What differs is here:
whom it asks, which slots are still read, and where epochs come from.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rollout_client.protocol import Begin, Committed, Copy, Part, Placement
from weight_manager.adapters.plan import AdapterPlanner, AdapterShape, adapter_layout, in_trainers_terms
from weight_manager.arena import Arena, in_memory
from weight_manager.background import Background
from weight_manager.config import StoreConfig
from weight_manager.coordinator import Coordinator
from weight_manager.data_plane import DataPlane
from weight_manager.history import History, Record
from weight_manager.huge_pages import HugePages
from weight_manager.layout import Layout
from weight_manager.messages import Finalize, InPlace, Live, LiveAdapter, Prepare, ToReplica
from weight_manager.metrics import Counters
from weight_manager.push_session import PushSession
from weight_manager.relay.members import Members
from weight_manager.replicas import Replicas
from weight_manager.slots import Reserved, Slots
from weight_manager.snapshot import Snapshots
from weight_manager.trainer_group import Answer, TrainerGroup
from weight_manager.whole_file import scratch_of

log = logging.getLogger(__name__)

KEPT = 3
"""Slots that keep their memory: of the live version, the previous one, and the one that is pushed."""
SNAPSHOT_SUFFIX = ".weights"
UNKNOWN_S = 3.0
"""After a restart of the store no slot is given away so long: replicas register at once, and say what they read."""


class LineHistory(History):
    """The versions of one adapter. Epochs are the model's: each names one version for ever, over unloads and loads.

    A record says where in the arena a version lies. Where the arena is gone with the machine, so is all that it says,
    and no push waits for it to reach the disk: any process that dies finds it without.
    """

    def __init__(self, path: Path, keep: int, epochs: History) -> None:
        """Reads `path` if it exists. Raises StartError when it cannot be understood."""
        super().__init__(path, keep)
        self._path_of = path
        self._epochs = epochs
        if self.saved.arena:
            self._lies_in(Path(self.saved.arena))

    def next_epoch(self) -> int:
        """The next epoch, from the one row of numbers that the model and all adapters share; see
        `History.next_epoch`.
        """
        return self._epochs.next_epoch()

    def begin(self, name: str, shape: AdapterShape, arena: Path, layout: str, records: list[Record]) -> None:
        """A new line, with an arena in which nothing is live. records: of the line that it takes the place of."""
        described = msgspec.structs.replace(self.saved, adapter=name, shape=shape, records=records)
        self.saved = described
        self._lies_in(arena)
        self.moved(arena, layout)

    @property
    def folder(self) -> Path:
        """The folder of the line's history."""
        return self._path_of.parent

    def remove(self) -> None:
        """Remove the line's files: it is over, and a restart must not find it."""
        self._path_of.unlink(missing_ok=True)
        scratch_of(self._path_of).unlink(missing_ok=True)

    def _lies_in(self, arena: Path) -> None:
        self.synced = not in_memory(arena.parent)


class Line:
    """A line: the versions of one adapter that have one shape, in an arena of their own. `coordinator` drives their
    pushes.
    """

    def __init__(
        self,
        config: StoreConfig,
        base: Layout,
        history: LineHistory,
        arena: Arena,
        *,
        background: Background,
        files: Background,
        counters: Counters,
        audience: Replicas,
        members: Members,
        data: Callable[[Slots], DataPlane],
        went_live: Callable[["Line", set[int]], None],
        taken_over: bool = False,
    ) -> None:
        """history: begun, or what an earlier life of the store left. data: how bytes come beside the push socket."""
        saved = history.saved
        assert saved.shape is not None
        self.name, self.shape = saved.adapter, saved.shape
        self.layout = adapter_layout(self.shape, base)
        self.history, self.arena = history, arena
        self._audience = audience
        self._reserved: Reserved | None = None
        self._unknown_until = time.monotonic() + UNKNOWN_S if taken_over else 0.0
        slots = Slots(arena, background, kept=KEPT, in_use=self._read, spared=self._previous)
        self.data = data(slots)
        path = history.folder / f"{self.name}{SNAPSHOT_SUFFIX}"
        self.snapshots = Snapshots(
            *(config, self.layout, path), saved=saved, slots=slots, files=files, counters=counters
        )
        self.coordinator = Coordinator(
            config,
            self.layout,
            slots=slots,
            history=history,
            background=background,
            counters=counters,
            members=members,
            replicas=lambda _: LineReplicas(self, audience, went_live),
            holds=False,
        )
        for slot in range(KEPT):
            slots.back(slot)
        self._pages = HugePages(arena, lambda: self.coordinator.session is not None, KEPT)
        if config.huge_pages:
            self._pages.start()

    @property
    def live(self) -> LiveAdapter | None:
        """The version that its name stands for; None = nothing is live yet."""
        live = self.history.live
        return None if live is None else self.described(live)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of shared memory that all slots with memory of their own take."""
        backed = sum(self.arena.backed(slot) for slot in range(self.arena.slots))
        return max(backed, KEPT) * int(self.arena.slot_bytes)

    @property
    def idle(self) -> bool:
        """Nothing is pushed, and no commit is under way."""
        return self.coordinator.idle

    @property
    def is_used(self) -> bool:
        """Whether some replica still holds a version of it, or a thread works on its memory: closed under that, its
        descriptor might be another file's by the time it is used.
        """
        return bool(self._read()) or not self.coordinator.slots.quiet

    def reserve(self) -> Reserved | None:
        """A slot for the push after the one that has just gone live; None = its trainer has to ask."""
        live, slots = self.history.live, self.coordinator.slots
        self._reserved = slots.reserve(live.slot if live else None, self.history.forget_slot)
        return self._reserved

    def claim(self, session: str) -> Reserved | None:
        """The slot that was reserved for this session, if it still is. Any push that begins ends a reservation."""
        reserved, self._reserved, live = self._reserved, None, self.history.live
        if reserved is None or reserved.session != session:
            return None
        holds = self.coordinator.slots.holds(reserved, live.slot if live else None)
        return reserved if holds else None

    def described(self, live: Live) -> LiveAdapter:
        """A version of it, as replicas are told of it."""
        return LiveAdapter(self.name, live, str(self.arena.path), self.shape)

    def status(self, now: float) -> dict[str, Any]:
        """What the API shows of it."""
        live, previous, coordinator = self.history.live, self.history.previous, self.coordinator
        record = self.history.tail(1)
        return {
            "name": self.name,
            "run_id": live.run_id if live else None,
            "version": live.version if live else None,
            "epoch": live.epoch if live else None,
            "digest": live.digest if live else None,
            "rank": self.shape.rank,
            "modules": len(self.shape.modules),
            "dtype": self.shape.dtype,
            "bytes": self.layout.slot_bytes,
            "shared_memory_bytes": self.reserved_bytes,
            "previous": {"run_id": previous.run_id, "version": previous.version} if previous else None,
            "session": coordinator.session.described(now) if coordinator.session else None,
            "last_error": coordinator.last_error,
            "last_push": record[0] if record else None,
        }

    def close(self) -> None:
        """End the line: nothing of it stays on disk or in shared memory."""
        self.history.remove()
        self.release()

    def release(self) -> None:
        """Give the line's shared memory back."""
        self._pages.close()
        self.arena.close(unlink=True)

    def _read(self) -> set[int]:
        if time.monotonic() < self._unknown_until:
            return set(range(self.arena.slots))  # replicas that finish on older versions have not registered yet
        path = str(self.arena.path)
        return {held.slot for held in self._audience.held() if held.arena_path == path}

    def _previous(self) -> int | None:
        previous = self.history.previous
        return previous.slot if previous is not None else None


class LineReplicas:
    """Voters on a line's versions: the model's replicas, told whose version it is."""

    def __init__(self, line: Line, audience: Replicas, went_live: Callable[[Line, set[int]], None]) -> None:
        self._line = line
        self._audience = audience
        self._went_live = went_live

    def voters(self) -> set[int]:
        """Every replica votes: an adapter's first version is served by them from its commit on."""
        return self._audience.numbers()

    def send(self, number: int, message: ToReplica) -> None:
        """Send a message to a replica by number, with whose version it speaks of."""
        ballot = self._line.coordinator.ballot
        if ballot is not None and isinstance(message, Prepare):
            message = msgspec.structs.replace(message, adapter=self._line.described(message.live))
        elif ballot is not None and isinstance(message, Finalize):
            message = msgspec.structs.replace(message, adapter=self._line.name, epoch=ballot.live.epoch)
        self._audience.send(number, message)

    def in_place(self, slot: int, write_epoch: int, spans: list[tuple[int, int]]) -> None:
        """Those that compute with copies of adapters may begin with these bytes."""
        path = str(self._line.arena.path)
        self._audience.adapter_in_place(InPlace(slot, write_epoch, spans, self._line.name, path))

    def drop(self, number: int, why: str) -> None:
        """A replica did not answer."""
        self._audience.drop(number, why)

    def went_live(self, live: Live, *, voted: bool) -> None:
        """A version was recorded. Who has registered since the vote is told what is live, and waited for as the others
        are: the trainer's answer means that every replica serves it.
        """
        ballot = self._line.coordinator.ballot
        late = self._audience.numbers() - (ballot.voters if ballot is not None else set())
        self._went_live(self._line, late)
        if ballot is not None:
            ballot.voters |= late

    def admit_held(self, now: float) -> None:
        """Nobody waits for an adapter's commit to register."""


class AdapterGroup(TrainerGroup):
    """The trainer ranks of one push of an adapter: what they send goes by the names that are served."""

    def __init__(
        self, config: StoreConfig, line: Line, planner: AdapterPlanner, answer: Answer, counters: Counters
    ) -> None:
        super().__init__(config, line.coordinator, answer, counters, line.data)
        self.line = line
        self._planner = planner

    def _make_plan(self, ranks: list[list[Part]], world: int, partial: bool) -> tuple[list[Copy], tuple[str, ...]]:
        pieces = [self._planner.pieces(parts) for parts in ranks]
        copies, kept = super()._make_plan([[piece.part for piece in mine] for mine in pieces], world, partial)
        return in_trainers_terms(copies, pieces[-1]), kept

    def committed(self, session: PushSession, report: Committed) -> None:
        """See `TrainerGroup`. The answer says where the next push goes."""
        super().committed(session, msgspec.structs.replace(report, ahead=self._ahead()))

    def _reserved(self, begin: Begin) -> Reserved | None:
        return self.line.claim(begin.session)

    def _enrol(self, peer: bytes, begin: Begin, copies: list[Copy], now: float) -> Placement:
        placement = super()._enrol(peer, begin, copies, now)
        arena = self.line.arena
        return msgspec.structs.replace(placement, arena_path=str(arena.path), arena_nonce=arena.nonce)

    def _ahead(self) -> Placement | None:
        """Of a trainer that writes whole versions on this host by itself, and knows where the parts of one go."""
        begin = next(iter(self.ranks.values())).begin
        if begin.transport != "shm" or begin.world > 1 or begin.base_version is not None or not self.plan:
            return None
        reserved, arena = self.line.reserve(), self.line.arena
        if reserved is None:
            return None
        return Placement(
            *(reserved.session, self._config.lease_s, arena.slot_offset(reserved.slot), arena.slot_bytes, []),
            write_epoch=reserved.write_epoch,
            arena_path=str(arena.path),
            arena_nonce=arena.nonce,
            plan=self.plan,
        )

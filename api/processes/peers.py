"""One API process among several: what it tells the others of its requests, and what the lead has told it."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from api.intents import Intents, PauseIntent
from api.processes.board import Board
from api.processes.claims import Claims
from api.processes.counts import Counts
from worker.messages import PauseMode, Tag

if TYPE_CHECKING:
    from api.replicas import Replica

LEAD = 0
LOADS_EVERY_S = 0.002
"""How old what the others know of our loads may be."""


class SaidPause(msgspec.Struct, frozen=True):
    """A pause in force. lease_until, began: system's monotonic clock, None = without end; since: seconds since 1970."""

    mode: PauseMode
    clear_cache: bool
    lease_until: float | None
    since: float
    began: float


class Said(msgspec.Struct, frozen=True):
    """What the lead tells the others, on the board. paused_before: seconds of the pauses that are over."""

    paused: SaidPause | None = None
    cleared: tuple[Tag, ...] = ()
    paused_before: float = 0.0


class Peers:
    """One process's side of what several share. Used from the event loop only."""

    def __init__(self, run_dir: Path, index: int, count: int) -> None:
        directory = run_dir / "api"
        self.index = index
        self.count = count
        self.board = Board(directory, index, count)
        self.counts = Counts(directory, index)
        self.claims = Claims(directory, index)
        self.directory = directory
        self._run_dir = run_dir
        self._seen = -1
        self.on_news: Callable[[], None] = lambda: None
        self._publishing: asyncio.TimerHandle | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the process that decides."""
        return self.index == LEAD

    def socket(self, index: int) -> Path:
        """Where a process takes requests of the others."""
        return self._run_dir / f"api-{index}.sock"

    def say(self, paused: PauseIntent | None, cleared: Iterable[Tag], paused_before: float) -> None:
        """[LEAD] This is asked of the fleet from now on; everybody who looks after this call sees it. paused_before: as
        `Said` has it.
        """
        pause = None
        if paused is not None:
            until = None if paused.lease_until == float("inf") else paused.lease_until
            pause = SaidPause(paused.mode, paused.clear_cache, until, paused.since, paused.began)
        self.board.tell(msgspec.json.encode(Said(pause, tuple(sorted(cleared)), paused_before)))

    def look(self, intents: Intents) -> bool:
        """Take over what the lead has said since the last look. Returns whether there was anything; it costs nothing
        when there was not."""
        if self.board.news == self._seen:
            return False
        self._seen, saying = self.board.said()
        said = msgspec.json.decode(saying, type=Said) if saying else Said()
        pause = said.paused
        intent = None
        if pause is not None:
            until = float("inf") if pause.lease_until is None else pause.lease_until
            intent = PauseIntent(pause.mode, pause.clear_cache, until, pause.since, pause.began)
        intents.heed(intent, set(said.cleared), said.paused_before)
        self.on_news()
        return True

    def publish_loads(self, replicas: list["Replica"]) -> None:
        """Soon: many requests come and go in the meantime, and each would write all of them."""
        if self._publishing is None:
            self._publishing = asyncio.get_running_loop().call_later(LOADS_EVERY_S, self._publish, replicas)

    def _publish(self, replicas: list["Replica"]) -> None:
        self._publishing = None
        self.board.count_loads((r.index, r.load) for r in replicas)

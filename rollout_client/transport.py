"""How the bytes of a push get into the staged slot: one base, two ways.

Both are driven by the publisher, after `Placement` and before `Seal`:

 1. [TRAINER] `stage` gets the placement and the sources it was made for. Copies of one part are done
    together, so a part's bytes are fetched from the trainer (from its GPU, out of a transposed view) once.
 2. [TRAINER] each copy is cast if the served dtype differs, hashed from the trainer's memory and moved to
    its place in the slot. Where the place is, only the transport knows.
 3. [TRAINER] finished copies are reported in batches (`Reporter.written`), so that the store checks them
    while the rest is still moving.
 4. [TRAINER] between copies `Reporter.turn` keeps the lease, reads what the store has to say, and raises
    when the session is over or time is up.
 5. [TRAINER] when `stage` returns or raises, nothing of this process writes into the slot any more.
"""

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import ClassVar, Literal

from rollout_client.channel import Channel
from rollout_client.errors import DeadlineExceeded, StoreUnavailable, from_wire
from rollout_client.protocol import (
    Ahead,
    Committed,
    Copy,
    Error,
    IsLive,
    NotAhead,
    Placement,
    Renew,
    Written,
)
from rollout_client.tensors import Source

log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
"""Finished copies are reported once they amount to this."""
MAX_THREADS = 4
Progress = Callable[[int], None]


class Reporter:
    """Tells the store what is done and hears what it has to say. Owned by the thread that owns the channel."""

    def __init__(self, channel: Channel, placement: Placement, deadline: float) -> None:
        """deadline: monotonic seconds.

        progress: called with the bytes that were moved. placed: the answer to the push's `Begin`, if it was not waited
        for and has come. taken: all ranks of the placement copy from this process's memory.
        """
        self._channel = channel
        self._placement = placement
        self._deadline = deadline
        self.progress: Progress = lambda nbytes: None
        self.placed: Placement | Committed | None = None
        self.taken = False
        self._digests: list[tuple[int, int]] = []
        self._sums: list[tuple[int, int]] = []
        self._arrived: list[tuple[int, int, int]] = []
        self._bytes = 0
        self._spoke = time.monotonic()
        self._losses = channel.losses
        self._unanswered: float | None = None  # since when the store owes a word, or room in the socket
        self._ahead_asked = self._ahead_owed = False
        self.live_at: float | None = None
        """When the store said that the version is live from device memory; monotonic seconds."""

    @property
    def session(self) -> str:
        """The session's id."""
        return self._placement.session

    @property
    def left_s(self) -> float:
        """Seconds until the push has to be done."""
        return max(self._deadline - time.monotonic(), 0.0)

    @property
    def patience_s(self) -> float:
        """How long the owner may do something else between two turns."""
        return min(self._placement.lease_s / 4, 1.0)

    def moved(self, nbytes: int) -> None:
        """Bytes that have reached the slot or the socket."""
        self.progress(nbytes)
        self._unanswered = None

    def written(self, copy: int, digest: int, nbytes: int, *, sums: bool = False) -> None:
        """This copy is complete. sums: the digest is of its page sums, not of its bytes."""
        (self._sums if sums else self._digests).append((copy, digest))
        self._bytes += nbytes
        if self._bytes >= BATCH_BYTES:
            self.flush()

    def arrived(self, copy: int, offset: int, nbytes: int) -> None:
        """These bytes of a copy, which is not complete yet, are in their place."""
        self._arrived.append((copy, offset, nbytes))

    def all_written(self, digests: Iterable[tuple[int, int]], nbytes: int, *, sums: bool = False) -> None:
        """These copies (number, digest) are complete, so many bytes in all. The store hears of it at once, in one
        message. sums: as in `written`.
        """
        (self._sums if sums else self._digests).extend(digests)
        self.moved(nbytes)
        self.flush()

    def go_ahead(self, digests: list[tuple[int, int]]) -> None:
        """All ranks of the placement have the version, of which these are (copy, digest): it may go live from there."""
        self._channel.send(Ahead(self.session, digests, self.left_s), timeout_s=self.left_s)
        self._ahead_asked = self._ahead_owed = True
        self._spoke = time.monotonic()

    def pause_for_live(self, seconds: float) -> None:
        """Wait so long at most for the answer to that. Raises as `turn`."""
        end = time.monotonic() + seconds
        while self._ahead_owed and (left := end - time.monotonic()) > 0:
            self._listen(min(left, self.patience_s))

    def await_live(self) -> None:
        """Wait for the answer to that, if it was asked for and is not here yet. Raises as `turn`."""
        while self._ahead_owed:
            self.turn()
            if self._ahead_owed:
                self._listen(min(self.patience_s, self.left_s))
        if self._placement.ahead and not self._ahead_asked:
            log.warning("this version goes live by the arena: not all ranks could be filled from here")

    def flush(self) -> None:
        """Report what has been held back."""
        if self._digests or self._sums or self._arrived:
            said = Written(self.session, self._digests, self._sums, self._arrived, self.taken)
            self._channel.send(said, timeout_s=self.left_s, computing=True)
            self._digests, self._sums, self._arrived = [], [], []
            self._bytes, self._spoke = 0, time.monotonic()

    def turn(self) -> None:
        """Keep the lease and listen.

        Raises PushError when the session is over, DeadlineExceeded when time is up, StoreUnavailable when the
        store has been silent for as long as the lease.
        """
        if self.left_s <= 0:
            raise DeadlineExceeded("deadline", "the weights were not staged in time")
        if time.monotonic() - self._spoke > self._placement.lease_s / 4:
            self._renew()
        self._listen()

    def ask_why(self) -> None:
        """The session seems to be over: hear the reason. Raises as `turn`, or returns after a quarter of the lease."""
        self._renew()
        end = time.monotonic() + min(self._placement.lease_s / 4, self.left_s)
        while time.monotonic() < end:
            self._listen(0.05)

    def _renew(self) -> None:
        now = time.monotonic()
        if self._channel.ready(0):
            self._channel.send(Renew(self.session), timeout_s=self.left_s)
            self._spoke = now
        self._unanswered = self._unanswered or now

    def _listen(self, patience_s: float = 0.0) -> None:
        now = time.monotonic()
        while (reply := self._channel.receive(patience_s)) is not None:
            self._unanswered = None
            match reply:
                case Error(session=session) if session in ("", self.session):
                    raise from_wire(reply)
                case IsLive(session=self.session):
                    self._ahead_owed, self.live_at = False, time.monotonic()
                case NotAhead(session=self.session, why=why):
                    self._ahead_owed = False
                    log.warning("this version goes live by the arena: %s", why)
                case Placement() | Committed():
                    self.placed = reply
            if patience_s:
                return
        if self._channel.losses > self._losses and self._channel.ready(0):
            raise StoreUnavailable("the connection to the store was lost, and with it the session")
        if self._unanswered is not None and now - self._unanswered > self._placement.lease_s:
            raise StoreUnavailable(f"the store has been silent for the {self._placement.lease_s:g} s of the lease")


class Transport(ABC):
    """One way of moving bytes. See the module's steps."""

    name: ClassVar[Literal["shm", "zmq"]]

    @abstractmethod
    def stage(self, placement: Placement, sources: Sequence[Source], reporter: Reporter) -> None:
        """Move everything and report it. Raises PushError, StoreUnavailable, ValueError for impossible copies."""

    def close(self) -> None:
        """Let resources go. Idempotent."""
        return


def moving_threads() -> int:
    """How many threads compare or move tensors: one for each core this process may use, at most four."""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def by_part(copies: Sequence[Copy]) -> Iterator[tuple[int, list[tuple[int, Copy]]]]:
    """(part, its numbered copies)."""
    ordered = sorted(enumerate(copies), key=lambda item: item[1].part)
    for part, group in groupby(ordered, key=lambda item: item[1].part):
        yield part, list(group)

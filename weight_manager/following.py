"""A version that goes live from device memory, until the arena has it as well (ADR 23).

    TRAINER    its trainer copies it into the arena's slot and says so, as in any push
    DEVICE     the trainer is gone or brought other bytes: a process copies it from the memory that the store holds
    STRANDED   that failed for all memory that is held: it is tried again, and a next version may replace this one
    SAFE       the slot has been found to hold the version: from here on all is as after any other push

Nothing here is part of the commit: it begins before the first vote, since the arena fills meanwhile, and what it does
matters from the record on. Until it is SAFE the store holds a descriptor of the memory of every replica that has proved
the version, nothing else is pushed, and nobody who begins is told to map the slot.
"""

import logging
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from weight_manager.background import Background
from weight_manager.devices import COPY_S, Devices, Held, Place
from weight_manager.layout import region_digests, version_digest
from weight_manager.slots import Slots

if TYPE_CHECKING:
    from weight_manager.push_session import PushSession

log = logging.getLogger(__name__)

LOOK_S = 0.05
"""The trainer's lock on the slot is looked at this often."""
GRACE_S = 0.25
"""From the trainer's lock to its word that all is there, or it is gone."""
PROOF_S = 1.0
"""A rank that is asked for its memory waits so long for the proof that is under way; later, it is asked again."""
AGAIN_S = 5.0
"""Until a copy that failed is tried again."""


class Way(Enum):
    """How the version gets into the arena. The value is what status and logs say."""

    TRAINER = "from its trainer"
    DEVICE = "from device memory"
    STRANDED = "stranded in device memory"
    SAFE = "safe"


class Step(Enum):
    """What may happen to it. The value completes "when ..."."""

    WHOLE = "the slot holds the version"
    DIFFERS = "what its trainer brought differs"
    GONE = "its trainer is gone, silent or gives it up"
    FAILED = "no memory that is held could be copied"
    AGAIN = "some seconds have passed"


MOVES: Mapping[tuple[Way, Step], Way] = {
    **{(way, Step.WHOLE): Way.SAFE for way in Way},
    (Way.TRAINER, Step.DIFFERS): Way.DEVICE,
    (Way.TRAINER, Step.GONE): Way.DEVICE,
    (Way.DEVICE, Step.DIFFERS): Way.DEVICE,
    (Way.DEVICE, Step.GONE): Way.DEVICE,
    (Way.DEVICE, Step.FAILED): Way.STRANDED,
    (Way.STRANDED, Step.DIFFERS): Way.STRANDED,
    (Way.STRANDED, Step.GONE): Way.STRANDED,
    (Way.STRANDED, Step.AGAIN): Way.DEVICE,
    **{(Way.SAFE, step): Way.SAFE for step in Step},
}
"""Every other pair cannot be."""


class Following:
    """Of one session. Used by the store's loop alone."""

    def __init__(
        self,
        session: "PushSession",
        *,
        devices: Devices,
        slots: Slots,
        background: Background,
        lease_s: float,
        safe: Callable[["Following"], None],
    ) -> None:
        """safe: called once, when the arena has a version that is live."""
        self.session = session
        self.way = Way.TRAINER
        self.live = False  # it is recorded
        self.sent = False  # the trainer has said that all is there
        self.from_device = False  # a process has copied it
        self._devices = devices
        self._slots = slots
        self._background = background
        self._lease_s = lease_s
        self._safe = safe
        self._held: dict[int, Held] = {}
        self._waiting: dict[int, Callable[[str], None]] = {}  # votes that wait for memory to be held
        self._asked: list[Callable[[], None]] = []  # ends of what ranks were asked
        self._left: list[Held] = []  # not tried yet
        self._cancel: Callable[[], None] | None = None  # of the copy that runs
        self._mistrusted = False  # its trainer brought other bytes, and may go on to
        self._heard = 0.0
        self._free_since: float | None = None
        self._due: float | None = None
        self._began = self._patience = 0.0
        self._closed = False

    @property
    def key(self) -> tuple[int, int]:
        """The slot of the arena and its write epoch."""
        return self.session.slot, self.session.write_epoch

    @property
    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        return self._due

    def hold_once_proved(self, replica: int) -> None:
        """A replica proves the version now: its memory comes as soon as it has, and need not be asked for then."""
        self._ask(replica, PROOF_S)

    def hold(self, replica: int, done: Callable[[str], None]) -> None:
        """A replica has proved the version: hold its memory. done: "", or why that cannot be."""
        if replica in self._held:
            done("")
        else:
            self._waiting[replica] = done
            self._ask(replica, 0.0)

    def _ask(self, replica: int, patience_s: float) -> None:
        def answered(held: Held | str) -> None:
            if isinstance(held, str):
                if not patience_s:  # else it is asked again when it has voted
                    self._answer(replica, held)
            elif self._closed or replica in self._held:
                self._devices.let_go(held)
            else:
                self._held[replica] = held
                self._answer(replica, "")

        self._asked.append(self._devices.hold(replica, self.key, answered, patience_s))

    def _answer(self, replica: int, why: str) -> None:
        done = self._waiting.pop(replica, None)
        if done is not None:
            done(why)

    def recorded(self, now: float) -> None:
        """The version is live: from here on it must get into the arena."""
        self.live, self._began, self._heard = True, now, now
        if self.way is Way.SAFE:
            self._end()
        elif self.way is Way.DEVICE:
            self._copy_anew()
        else:
            self._due = now

    def heard(self, now: float) -> None:
        """The trainer is still at it."""
        self._heard = now

    def whole(self, digest: str) -> None:
        """Everything that the trainer has sent is in the slot, and has this digest."""
        if digest != self.session.digest:
            self.step(Step.DIFFERS, f"its digest is {digest}")
        else:
            self.step(Step.WHOLE)

    def step(self, what: Step, why: str = "") -> None:
        """Move, and do what is to be done then. Before the version is recorded nothing is copied."""
        self._mistrusted |= what is Step.DIFFERS
        before, self.way = self.way, MOVES[self.way, what]
        if self.way is before:
            return
        said = f"{self.session.intent}: the arena is filled {self.way.value}; {what.value}{': ' + why if why else ''}"
        if self.way is not Way.SAFE:
            log.log(logging.ERROR if self.way is Way.STRANDED else logging.WARNING, said, extra=self.session.extra())
        if not self.live:
            return
        match self.way:
            case Way.DEVICE:
                self._copy_anew()
            case Way.SAFE:
                self._end()
            case _:
                pass

    def tick(self, now: float) -> None:
        """Passed deadlines, and whether the trainer is still there."""
        if self._due is None or now < self._due:
            return
        match self.way:
            case Way.TRAINER if self.sent:  # the checks are ours
                self._due = None
            case Way.TRAINER:
                self._due = now + LOOK_S
                self._look(now)
            case Way.DEVICE if self._cancel is not None:
                self._cancel()
                self._copied(f"it did not end within {COPY_S:g} s")
            case Way.DEVICE:
                self._copy_once_alone(now)
            case Way.STRANDED:
                self.step(Step.AGAIN)
            case Way.SAFE:
                self._due = None

    def described(self, now: float) -> dict[str, Any]:
        """What the status shows of it."""
        way = {"way": self.way.value, "held": sorted(self._held), "since_s": round(now - self._began, 3)}
        return self.session.extra() | {"slot": self.session.slot} | way

    def close(self) -> None:
        """Let everything go. Idempotent."""
        self._closed, self._due = True, None
        if self._cancel is not None:
            self._cancel()
        for forget in self._asked:
            forget()
        self._asked.clear()
        for held in self._held.values():
            self._devices.let_go(held)
        self._held.clear()

    def _end(self) -> None:
        self.close()
        self._safe(self)

    def _look(self, now: float) -> None:
        """Whoever writes into the slot holds its lock. One that is stopped holds it too: then silence tells."""
        if not self._slots.arena.writers_gone(self.session.slot):
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        if self._free_since is not None and now - max(self._free_since, self._heard) >= GRACE_S:
            self.step(Step.GONE, "nobody writes into the slot any more")
        elif now - self._heard >= self._lease_s:
            self.step(Step.GONE, f"it was not heard of for {self._lease_s:g} s")

    @property
    def _disturbed(self) -> bool:
        return self._mistrusted and not self._slots.arena.writers_gone(self.session.slot)

    def _copy_anew(self) -> None:
        now = time.monotonic()
        self._patience = now + self._lease_s
        self._copy_once_alone(now)

    def _copy_once_alone(self, now: float) -> None:
        """A trainer that is stopped may go on beside it: what it writes is the version. One that was found to write
        something else has to be gone first.
        """
        self._cancel = None
        if self._disturbed:
            self._due = now + LOOK_S
            if now >= self._patience:
                self._due = now + AGAIN_S
                self.step(Step.FAILED, "its trainer, which brought other bytes, still holds the slot")
            return
        self.from_device = True
        self._left = [held for _, held in sorted(self._held.items())]
        self._copy_next("none is held")

    def _copy_next(self, why: str) -> None:
        place = Place(self._slots.arena.path, *self.key)
        while self._left:
            try:
                self._cancel = self._devices.copy(self._left.pop(0), place, self._copied)
            except OSError as error:
                why = f"no process can be started: {error}"
                log.error("%s could not be copied into the arena: %s", self.session.intent, why)
                continue
            self._due = time.monotonic() + COPY_S
            return
        self._due = time.monotonic() + AGAIN_S
        self.step(Step.FAILED, why)

    def _copied(self, why: str) -> None:
        """A process has ended. Its last word is the digest of the slot."""
        self._cancel = None
        if self._closed:
            return
        if why:
            log.error("%s could not be copied into the arena: %s", self.session.intent, why)
            self._copy_next(why)
            return
        layout, slot = self.session.staging.layout, self._slots.arena.slot(self.session.slot)
        self._due = None

        def found(digest: str) -> None:
            if self._closed:
                return
            if self._disturbed:
                self._copy_anew()
            elif digest == self.session.digest:
                self.step(Step.WHOLE)
            else:
                self._copy_next(f"the slot then has the digest {digest}")

        def failed(error: BaseException) -> None:
            if not self._closed:
                self._copy_next(repr(error))

        self._background.submit(lambda: version_digest(layout, region_digests(layout, slot)), found, failed)

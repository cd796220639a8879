"""Work on a session's bytes that would hold the loop: digests, scatter, tensors carried over from the live slot.

Threads do the work; results are handled in the loop. A result that comes back after its session has ended
only lets the slot go.
"""

import logging
from collections.abc import Callable, Sequence

from rollout_client.digest import joined
from weight_manager.background import Background
from weight_manager.errors import PushRefused
from weight_manager.finite import all_ends_finite, all_finite
from weight_manager.layout import region_views, slot_array
from weight_manager.metrics import Counters
from weight_manager.push_session import PushSession
from weight_manager.slots import Slots
from weight_manager.staging import Check, run_check

log = logging.getLogger(__name__)

LITTLE_BYTES = 16 << 20
"""Versions of so few, as most adapters are, are looked through whole for what is no number: in a millisecond or two."""


class Checker:
    """Runs checks. Who is called hears of every session, ended or not."""

    def __init__(
        self,
        background: Background,
        slots: Slots,
        counters: Counters,
        *,
        on_refused: Callable[[PushSession, PushRefused], None],
        on_checked: Callable[[PushSession], None],
        on_verified: Callable[[PushSession, Check], None],
        on_digest: Callable[[PushSession, list[int]], None],
        refuse_non_finite: bool = False,
    ) -> None:
        """on_refused: bytes or numbers are wrong. on_verified, on_checked: a check has gone well. on_digest: of every
        region, once `digest` was asked for. refuse_non_finite: versions with weights that are no finite numbers.
        """
        self._every = refuse_non_finite
        self._background = background
        self._slots = slots
        self._counters = counters
        self._on_refused, self._on_checked = on_refused, on_checked
        self._on_verified, self._on_digest = on_verified, on_digest

    def check(self, session: PushSession, checks: Sequence[Check]) -> None:
        """Compare digests while the rest still arrives."""
        runs: list[tuple[Check, list[list[memoryview]]]] = []
        for check in checks:
            parts = [target.parts() for target, _ in check]
            if all(parts):
                runs.append((check, parts))
            else:
                writes = any(target.scattered for target, _ in check)
                self._run(session, lambda check=check: run_check(check), check, writes=writes)  # type: ignore[misc]
        if runs:
            self._read(session, runs)

    def carry(self, session: PushSession, names: Sequence[str], live_slot: int) -> None:
        """Take these tensors (canonical names) from the live version. It stays live while a session runs."""
        layout, arena = session.staging.layout, self._slots.arena
        views = zip(
            layout.regions, *(region_views(layout, arena.slot(s)) for s in (live_slot, session.slot)), strict=True
        )
        wanted = frozenset(names)
        pairs = [(source, target) for region, source, target in views if region.name in wanted]

        def copy() -> list[str]:
            for source, target in pairs:
                target[...] = source
            return []

        session.staging.checking += 1
        self._run(session, copy, [], writes=True)

    def digest(self, session: PushSession) -> None:
        """Name the whole version, reading what no single check has covered; and see whether it holds numbers."""
        staging, layout = session.staging, session.staging.layout
        every = self._every or layout.slot_bytes <= LITTLE_BYTES
        every = every and session.intent.transport != "relay"  # the store above has seen to it

        def work() -> tuple[list[int], list[str]]:
            digests, slot = staging.region_digests(), staging.slot
            sound = all_finite(slot_array(layout, slot)) if every else all_ends_finite(region_views(layout, slot))
            return digests, [] if sound else staging.non_finite(every=every)

        def done(found: tuple[list[int], list[str]]) -> None:
            digests, names = found
            if names and session.intent.transport != "relay":
                self._counters.add("non_finite")
                message = f"weights that are NaN or infinite: {', '.join(names[:20])}"
                if self._every:
                    self._on_refused(session, PushRefused("non_finite", message, names))
                    return
                log.warning("%s has %s", session.intent, message, extra=session.extra() | {"tensors": names[:100]})
            self._on_digest(session, digests)

        self._background.submit(work, done, lambda error: self._broken(session, error))

    def _read(self, session: PushSession, runs: Sequence[tuple[Check, list[list[memoryview]]]]) -> None:
        """What only has to be hashed: all threads share it, and the loop hears of it once."""

        def done(digests: list[int]) -> None:
            start = 0
            for check, parts in runs:
                wrong = []
                for (target, claimed), pieces in zip(check, parts, strict=True):
                    target.digest = joined(digests[start : start + len(pieces)])
                    start += len(pieces)
                    if target.digest != claimed:
                        wrong.append(target.name)
                self._checked(session, check, wrong)

        flat = [piece for _, parts in runs for pieces in parts for piece in pieces]
        self._background.digests(flat, done, lambda error: self._broken(session, error))

    def _run(self, session: PushSession, work: Callable[[], list[str]], check: Check, *, writes: bool) -> None:
        """writes: the slot may not be given away before this has stopped, whatever becomes of the session."""

        def done(wrong: list[str]) -> None:
            if writes:
                self._slots.leave(session.slot)
            self._checked(session, check, wrong)

        def failed(error: BaseException) -> None:
            if writes:
                self._slots.leave(session.slot)
            self._broken(session, error)

        if writes:
            self._slots.enter(session.slot)
        self._background.submit(work, done, failed)

    def _checked(self, session: PushSession, check: Check, wrong: list[str]) -> None:
        before = session.staging.verified_bytes
        try:
            session.staging.checked(check, wrong)
        except PushRefused as refusal:
            self._counters.add("checksum_mismatches")
            self._on_refused(session, refusal)
            return
        self._counters.add("bytes_verified", session.staging.verified_bytes - before)
        self._on_verified(session, check)
        self._on_checked(session)

    def _broken(self, session: PushSession, error: BaseException) -> None:
        log.error("work on session %s failed", session.id, exc_info=error, extra=session.extra())
        self._on_refused(session, PushRefused("internal", f"checking the weights failed: {error!r}"))

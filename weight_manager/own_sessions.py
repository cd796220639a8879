"""Sessions that the store begins by itself: weights from this host's files, and the previous version once more."""

import logging
import time
from collections.abc import Callable

from rollout_client.protocol import AdapterInFlight, Committed
from rollout_client.versions import MAX_VERSION
from weight_manager.background import Background
from weight_manager.coordinator import Coordinator
from weight_manager.disk import Loaded, Loading, Reader
from weight_manager.errors import PushRefused
from weight_manager.history import Intent
from weight_manager.messages import Live
from weight_manager.push_session import PushSession

log = logging.getLogger(__name__)

Outcome = Committed | PushRefused


def named(run_id: str | None, version: int | None, live: Live | None) -> tuple[str, int]:
    """What a version is called that the store makes itself: as asked for, else the next one of the run that is live.

    Raises PushRefused if there is no such version.
    """
    run_id = (live.run_id if live else "") if run_id is None else run_id
    version = (live.version + 1 if live else 0) if version is None else version
    if not 0 <= version <= MAX_VERSION:
        raise PushRefused("bad_message", f"version {version} is out of range")
    return run_id, version


class OwnSession:
    """Owner of a session that seals and commits without a trainer. `done` is called once, when it is live or gone."""

    def __init__(self, coordinator: Coordinator, done: Callable[[Outcome], None], deadline_s: float) -> None:
        """deadline_s: from `start` to the beginning of the commit, and at most for that."""
        self._coordinator = coordinator
        self._done = done
        self._deadline_s = deadline_s
        self._deadline = 0.0

    def sealed(self, session: PushSession) -> None:
        """`Owner.sealed`: every byte is there and matches; go on to the commit."""
        now = time.monotonic()
        self._coordinator.commit(session, max(self._deadline - now, 0.1), now)

    def committed(self, session: PushSession, report: Committed) -> None:
        """`Owner.committed`: the version is live; say so to `done`."""
        self._done(report)

    def ended(self, session: PushSession, refusal: PushRefused) -> None:
        """`Owner.ended`: the session has come to nothing; say why to `done`."""
        self._done(refusal)


class DiskLoad(OwnSession):
    """A session that a `Reader` fills in a thread, from this host's files."""

    def __init__(
        self, coordinator: Coordinator, files: Background, done: Callable[[Outcome], None], deadline_s: float
    ) -> None:
        super().__init__(coordinator, done, deadline_s)
        self._files = files
        self._loading: Loading | None = None

    def start(self, intent: Intent, reader: Reader, now: float) -> None:
        """Raises PushRefused busy or stale_version; `done` is then never called."""
        session = self._coordinator.begin(intent, self, now)
        self._deadline = session.deadline = now + self._deadline_s
        slots = self._coordinator.slots
        slot = slots.arena.slot(session.slot)
        loading = self._loading = Loading(str(intent), len(slot))
        slots.enter(session.slot)  # held until the thread has stopped, even if the session ends before

        def read(loaded: Loaded) -> None:
            slots.leave(session.slot)
            if session is self._coordinator.session:
                self._loaded(session, loaded)

        def failed(error: BaseException) -> None:
            slots.leave(session.slot)
            if session is not self._coordinator.session:
                return
            if not isinstance(error, PushRefused):
                log.error("a load failed", exc_info=error, extra=session.extra())
                error = PushRefused("io", f"reading failed: {error!r}")
            self._coordinator.abort(session, error, time.monotonic())

        self._files.submit(lambda: reader(slot, loading), read, failed)

    def _loaded(self, session: PushSession, loaded: Loaded) -> None:
        session.staging.add(loaded.copies, loaded.names)
        session.checker.written(enumerate(loaded.digests))
        self._coordinator.seal(session, self._deadline, time.monotonic())

    def ended(self, session: PushSession, refusal: PushRefused) -> None:
        """`Owner.ended`: as for any session of ours; the thread stops after the piece that it reads."""
        if self._loading is not None:
            self._loading.stop()
            if refusal.code == "deadline":
                refusal = PushRefused("deadline", f"{refusal.message}: {self._loading}", retryable=refusal.retryable)
        super().ended(session, refusal)


class RollbackToPrevious(OwnSession):
    """The previous version, from the slot that still holds it: no bytes move, nor to stores below that hold them."""

    def start(self, in_flight: AdapterInFlight, now: float) -> None:
        """Raises PushRefused busy, or not_ready when nothing is kept; `done` is then never called."""
        previous = self._coordinator.history.previous
        if previous is None:
            message = "no previous version is kept: none has been live before, or a push has begun to overwrite it"
            raise PushRefused("not_ready", message)
        intent = Intent(
            *(previous.run_id, previous.version, "rollback", "", in_flight, "rollback"),
            force=True,
            adapter=self._coordinator.history.saved.adapter,
        )
        session = self._coordinator.begin(intent, self, now, reuse=previous)
        session.expected = previous.digest
        self._deadline = now + self._deadline_s
        self._coordinator.announce(session, now)
        self._coordinator.seal(session, self._deadline, now)

    def committed(self, session: PushSession, report: Committed) -> None:
        """`Owner.committed`: the version is live; say so to `done`."""
        log.info("back to %s", session.intent, extra=session.extra())
        super().committed(session, report)

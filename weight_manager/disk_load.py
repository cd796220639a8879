"""A push whose bytes come from this host's files: reads in a thread, then seals and commits by itself."""

import logging
import time
from collections.abc import Callable
from threading import Event

from rollout_client.protocol import Committed
from weight_manager.background import Background
from weight_manager.coordinator import Coordinator
from weight_manager.disk import Loaded, Reader
from weight_manager.errors import PushRefused
from weight_manager.push_session import Intent, PushSession

log = logging.getLogger(__name__)

Outcome = Committed | PushRefused


class DiskLoad:
    """Owner of a session that is filled by a `Reader`. `done` is called once, after the version is live or gone."""

    def __init__(
        self, coordinator: Coordinator, files: Background, done: Callable[[Outcome], None], deadline_s: float
    ) -> None:
        self._coordinator = coordinator
        self._files = files
        self._done = done
        self._deadline_s = deadline_s
        self._deadline = 0.0
        self._cancelled = Event()

    def start(self, intent: Intent, reader: Reader, now: float) -> None:
        """Raises PushRefused busy or stale_version; `done` is then never called."""
        session = self._coordinator.begin(intent, self, now)
        self._deadline = session.deadline = now + self._deadline_s
        slots = self._coordinator.slots
        slot = slots.arena.slot(session.slot)
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

        self._files.submit(lambda: reader(slot, self._cancelled), read, failed)

    def _loaded(self, session: PushSession, loaded: Loaded) -> None:
        session.staging.add(loaded.copies, loaded.names)
        self._coordinator.checker.check(session, session.staging.written(enumerate(loaded.digests)))
        self._coordinator.seal(session, self._deadline, time.monotonic())

    def sealed(self, session: PushSession) -> None:
        """Owner: go on to the commit."""
        now = time.monotonic()
        self._coordinator.commit(session, max(self._deadline - now, 0.1), now)

    def committed(self, session: PushSession, report: Committed) -> None:
        """Owner: live."""
        self._done(report)

    def ended(self, session: PushSession, refusal: PushRefused) -> None:
        """Owner: gone; the thread stops at its next copy."""
        self._cancelled.set()
        self._done(refusal)

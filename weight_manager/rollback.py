"""The previous version made live again, from the slot that still holds it: a push that moves no bytes."""

import logging
import time
from collections.abc import Callable

from rollout_client.protocol import Committed, InFlight
from weight_manager.coordinator import Coordinator
from weight_manager.errors import PushRefused
from weight_manager.push_session import Intent, PushSession

log = logging.getLogger(__name__)


class RollbackToPrevious:
    """Owner of the session. `done` is called once. Stores below that hold the bytes need not be sent them either."""

    def __init__(
        self, coordinator: Coordinator, done: Callable[[Committed | PushRefused], None], deadline_s: float
    ) -> None:
        self._coordinator = coordinator
        self._done = done
        self._deadline_s = deadline_s
        self._deadline = 0.0

    def start(self, in_flight: InFlight, now: float) -> None:
        """Raises PushRefused busy, or not_ready when nothing is kept; `done` is then never called."""
        previous = self._coordinator.history.previous
        if previous is None:
            message = "no previous version is kept: none has been live before, or a push has begun to overwrite it"
            raise PushRefused("not_ready", message)
        intent = Intent(previous.run_id, previous.version, "rollback", "", in_flight, "rollback", force=True)
        session = self._coordinator.begin(intent, self, now, reuse=previous)
        session.expected = previous.digest
        self._deadline = now + self._deadline_s
        self._coordinator.announce(session, now)
        self._coordinator.seal(session, self._deadline, now)

    def sealed(self, session: PushSession) -> None:
        """Owner: the slot still holds it."""
        now = time.monotonic()
        self._coordinator.commit(session, max(self._deadline - now, 0.1), now)

    def committed(self, session: PushSession, report: Committed) -> None:
        """Owner: live."""
        log.info("back to %s", session.intent, extra=session.extra())
        self._done(report)

    def ended(self, session: PushSession, refusal: PushRefused) -> None:
        """Owner: gone."""
        self._done(refusal)

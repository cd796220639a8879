"""Data connections of the running session: who may open one, what its thread reports, and its end."""

import secrets
import socket
from collections.abc import Callable

from rollout_client.data_socket import DONE, KEY_BYTES
from weight_manager.data_port import DataPort
from weight_manager.inbox import Inbox
from weight_manager.intake import Ended, Finished, Intake, News
from weight_manager.push_session import PushSession
from weight_manager.slots import Slots

Hear = Callable[[News], None]


class DataPlane:
    """Without a port nobody gets a key, and everything comes as chunks."""

    def __init__(self, port: DataPort | None, inbox: Inbox, slots: Slots, *, progress: bool) -> None:
        """progress: stores below want bytes as they arrive."""
        self._port = port
        self._inbox = inbox
        self._slots = slots
        self._progress = progress
        self._keys: dict[str, list[bytes]] = {}
        self._intakes: dict[str, list[Intake]] = {}

    @property
    def port(self) -> int:
        """For trainers; 0 = none."""
        return self._port.port if self._port is not None else 0

    def expect(self, session: PushSession, copies: tuple[int, int], hear: Hear) -> bytes:
        """A key for a trainer rank. copies: [first, first + count). hear: called in the loop, what the thread says."""
        if self._port is None:
            return b""
        key = secrets.token_bytes(KEY_BYTES)
        self._keys.setdefault(session.id, []).append(key)
        self._port.expect(key, lambda connection: self._take(connection, session, copies, hear))
        return key

    def end(self, session: PushSession) -> None:
        """The session is over: no connection of it may write any more. Its slot stays taken until none can."""
        for key in self._keys.pop(session.id, ()):
            if self._port is not None:
                self._port.forget(key)
        for intake in self._intakes.pop(session.id, ()):
            intake.stop()

    def close(self) -> None:
        """The store stops; sessions have ended."""
        if self._port is not None:
            self._port.close()

    def _take(self, connection: socket.socket, session: PushSession, copies: tuple[int, int], hear: Hear) -> None:
        def tell(news: News) -> None:
            self._inbox.put(lambda: self._news(intake, session, news, hear))

        intake = Intake(connection, session.staging, copies, tell, progress=self._progress)
        self._slots.enter(session.slot)
        self._intakes.setdefault(session.id, []).append(intake)
        intake.start()

    def _news(self, intake: Intake, session: PushSession, news: News, hear: Hear) -> None:
        running = intake in self._intakes.get(session.id, ())
        if isinstance(news, Ended):
            self._slots.leave(session.slot)
            intake.close()
            if running:
                self._intakes[session.id].remove(intake)
        if isinstance(news, Finished):
            if running:
                intake.answer(DONE)
        elif running:
            hear(news)

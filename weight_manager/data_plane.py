"""Data connections of the running session: who may open one, what their threads report, and their end."""

import secrets
import socket
from collections.abc import Callable

from rollout_client.data_socket import KEY_BYTES
from weight_manager.data_port import DataPort
from weight_manager.errors import PushRefused
from weight_manager.inbox import Inbox
from weight_manager.intake import Intake
from weight_manager.push_session import PushSession
from weight_manager.receiver import Ended, Finished, Hear, News, Receiver
from weight_manager.slots import Slots


class DataPlane:
    """Without a port no trainer gets a key, and everything comes as chunks."""

    def __init__(self, port: DataPort | None, inbox: Inbox, slots: Slots, *, progress: bool) -> None:
        """progress: stores below want bytes as they arrive."""
        self._port = port
        self._inbox = inbox
        self._slots = slots
        self._progress = progress
        self._keys: dict[str, list[bytes]] = {}
        self._receivers: dict[str, list[Receiver]] = {}

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

    def start(self, session: PushSession, make: Callable[[Hear], Receiver], hear: Hear) -> None:
        """A thread that fills the session's slot. make: given what the thread calls with its news."""

        def tell(news: News) -> None:
            self._inbox.put(lambda: self._news(receiver, session, news, hear))

        receiver = make(tell)
        self._slots.enter(session.slot)
        self._receivers.setdefault(session.id, []).append(receiver)
        try:
            receiver.start()
        except RuntimeError as error:  # a limit of processes
            self._receivers[session.id].remove(receiver)
            self._slots.leave(session.slot)
            hear(Ended(PushRefused("io", f"no thread for a data connection: {error}", retryable=True)))

    def end(self, session: PushSession) -> None:
        """The session is over: nothing may write for it any more. Its slot stays taken until nothing can."""
        for key in self._keys.pop(session.id, ()):
            if self._port is not None:
                self._port.forget(key)
        for receiver in self._receivers.pop(session.id, ()):
            receiver.stop()

    def _take(self, connection: socket.socket, session: PushSession, copies: tuple[int, int], hear: Hear) -> None:
        def make(tell: Hear) -> Intake:
            return Intake(connection, session.staging, copies, tell, progress=self._progress)

        self.start(session, make, hear)

    def _news(self, receiver: Receiver, session: PushSession, news: News, hear: Hear) -> None:
        running = receiver in self._receivers.get(session.id, ())
        if isinstance(news, Ended):
            self._slots.leave(session.slot)
            receiver.close()
            if running:
                self._receivers[session.id].remove(receiver)
        if running:
            if isinstance(news, Finished):
                receiver.finished()
            hear(news)

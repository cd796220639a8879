"""Data connections of the running session: who may open one, and the threads that receive bytes into its slot.

Such a thread touches its targets and its socket, nothing else; what it has to say comes back to the loop through
`Inbox`. The slot may not be given away while it runs: it counts as a writer from its start until `Ended`. How a
connection is accepted is in data_port.py, the protocol in rollout_client/data_socket.py.
"""

import contextlib
import secrets
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rollout_client.data_socket import DIGEST, DONE, END, KEY_BYTES, RECORD
from rollout_client.digest import Digest
from weight_manager.background import Inbox
from weight_manager.data_port import DataPort
from weight_manager.errors import PushRefused
from weight_manager.slots import Slots
from weight_manager.staging import Staging
from weight_manager.targets import Target

if TYPE_CHECKING:
    from weight_manager.push_session import PushSession  # whose bytes these are

LOW_WATER = 1 << 20
"""Bytes that are waited for: on a link slower than the processor each packet would wake the thread otherwise."""
HEARD_S = 0.25
"""The most that a reader waits for the rest of them; also how often the loop hears that bytes arrive."""
PIECE_BYTES = 256 << 10
"""Received and hashed at a time: small enough to be in the core's cache still."""


class SocketReader:
    """Reads one connection in a thread: it sleeps until much has come, and never for long.

    Raises ConnectionError when the peer has gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._low = 0

    def some(self, place: memoryview, left: int) -> int:
        """Bytes that were put into `place`, at least one. left: that the peer sends in any case, these included."""
        while True:
            try:
                count = self._socket.recv_into(place, len(place), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(min(left, LOW_WATER))
                continue
            if not count:
                raise ConnectionError("the peer is gone")
            return count

    def exactly(self, size: int) -> memoryview:
        """Read exactly `size` bytes."""
        content, done = memoryview(bytearray(size)), 0
        while done < size:
            done += self.some(content[done:], size - done)
        return content

    def _wait(self, size: int) -> None:
        if size != self._low:
            self._low = size
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        self._poll.poll(HEARD_S * 1000)


class Arrived(NamedTuple):
    """Bytes that have come, of one copy; perhaps none that stores below may have."""

    copy: int
    offset: int
    size: int


class Taken(NamedTuple):
    """A copy is complete; the digest that its sender sent. What was received is in `Target.streamed`."""

    copy: int
    digest: int


class Finished(NamedTuple):
    """The peer has sent everything. A trainer waits for an answer."""


class Unconnected(NamedTuple):
    """Nobody answers where the bytes are to be fetched."""


class Ended(NamedTuple):
    """The thread has stopped, for good. refusal: why, if the session must end with it."""

    refusal: PushRefused | None = None


News = Arrived | Taken | Finished | Unconnected | Ended
Hear = Callable[[News], None]


class Receiver(ABC):
    """Runs from `start` until the peer is done or gone, or `stop`. `_receive_all` is what it does."""

    def __init__(self, connection: socket.socket, tell: Hear, name: str) -> None:
        """connection: taken over. tell: called in the thread, which has this name."""
        self._targets: Sequence[Target] = ()
        self._socket = connection
        self._tell = tell
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; to be called once. Raises RuntimeError where there is no thread to be had."""
        self._thread.start()

    def finished(self) -> None:
        """The loop has heard everything that was told before `Finished`."""
        return

    def stop(self) -> None:
        """The session is over; the thread ends soon, and says so."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and let go of the slot, after `Ended`. `tell` knows this object, as this object it: the
        collector of cycles may come late.
        """
        self._thread.join()
        self._socket.close()
        self._targets = ()

    def _run(self) -> None:
        refusal: PushRefused | None = None
        try:
            self._receive_all()
        except PushRefused as error:
            refusal = error
        except OSError:
            pass  # the peer is gone: a trainer's lease, or the store above, says what becomes of the session
        except BaseException as error:
            refusal = PushRefused("internal", f"receiving failed: {error!r}")
        self._tell(Ended(refusal))

    @abstractmethod
    def _receive_all(self) -> None:
        """Raises PushRefused for what ends the session, OSError when the peer is gone."""


class TrainerReceiver(Receiver):
    """Answers the trainer once the loop has heard of everything."""

    def __init__(
        self,
        connection: socket.socket,
        staging: Staging,
        copies: tuple[int, int],
        tell: Hear,
        *,
        progress: bool,
    ) -> None:
        """copies: [first, first + count) are this rank's. tell: called in the thread. progress: report every MiB."""
        super().__init__(connection, tell, "from-trainer")
        self._from = SocketReader(connection)
        self._staging = staging
        self._first, self._count = copies
        self._targets = staging.targets[self._first : self._first + self._count]
        self._step = 1 << 20 if progress else 1 << 62
        self._told = 0.0

    def finished(self) -> None:
        """The loop has taken everything in: answer the trainer. A peer that does not take the answer has gone."""
        with contextlib.suppress(OSError):
            self._socket.send(DONE, socket.MSG_DONTWAIT)

    def _receive_all(self) -> None:
        while self._record():
            pass

    def _record(self) -> bool:
        copy, nbytes = RECORD.unpack(self._from.exactly(RECORD.size))
        if copy == END:
            self._tell(Finished())
            return False
        if not copy < self._count:
            raise PushRefused("bad_message", f"copy {copy} is not among the {self._count} that were placed")
        target = self._targets[copy]
        if nbytes != target.nbytes:
            message = f"{target.name}: {nbytes} bytes were announced of a copy of {target.nbytes}"
            raise PushRefused("bad_message", message, [target.name])
        place = self._staging.expect(self._first + copy, 0, nbytes)
        streamed = self._receive(copy, place)
        self._staging.arrived(self._first + copy, nbytes)
        (digest,) = DIGEST.unpack(self._from.exactly(DIGEST.size))
        target.streamed = streamed
        self._tell(Taken(copy, digest))
        return True

    def _receive(self, copy: int, place: memoryview) -> int:
        """Receive a copy into its place. Returns the digest of what is there then."""
        state, done, told, size = Digest(), 0, 0, len(place)
        while done < size:
            piece = place[done : done + PIECE_BYTES]
            count = self._from.some(piece, size - done)
            state.update(piece[:count])
            done += count
            if done - told >= self._step or time.monotonic() >= self._told + HEARD_S:
                self._arrived(copy, told, done - told)
                told = done
        self._arrived(copy, told, done - told)
        return state.intdigest()

    def _arrived(self, copy: int, offset: int, size: int) -> None:
        self._told = time.monotonic()
        self._tell(Arrived(copy, offset, size))


class DataPlane:
    """The data connections of sessions. Without a port no trainer gets a key, and all bytes come as chunks."""

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
        """The TCP port that trainers are told; 0 = none."""
        return self._port.port if self._port is not None else 0

    def expect(self, session: "PushSession", copies: tuple[int, int], hear: Hear) -> bytes:
        """A key for a trainer rank. copies: [first, first + count). hear: called in the loop, what the thread says."""
        if self._port is None:
            return b""
        key = secrets.token_bytes(KEY_BYTES)
        self._keys.setdefault(session.id, []).append(key)
        self._port.expect(key, lambda connection: self._take(connection, session, copies, hear))
        return key

    def start(self, session: "PushSession", make: Callable[[Hear], Receiver], hear: Hear) -> None:
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

    def end(self, session: "PushSession") -> None:
        """The session is over: nothing may write for it any more. Its slot stays taken until nothing can."""
        for key in self._keys.pop(session.id, ()):
            if self._port is not None:
                self._port.forget(key)
        for receiver in self._receivers.pop(session.id, ()):
            receiver.stop()

    def _take(self, connection: socket.socket, session: "PushSession", copies: tuple[int, int], hear: Hear) -> None:
        def make(tell: Hear) -> TrainerReceiver:
            return TrainerReceiver(connection, session.staging, copies, tell, progress=self._progress)

        self.start(session, make, hear)

    def _news(self, receiver: Receiver, session: "PushSession", news: News, hear: Hear) -> None:
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

"""One data connection: a thread that receives the copies of one trainer rank into the slot, hashing as they come.

The thread touches the targets and the socket, nothing else; what it has to say comes back to the loop through
`Inbox`. The slot may not be given away while it runs: whoever starts it counts it as a writer until `Ended`.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollout_client.data_socket import DIGEST, DONE, END, RECORD
from rollout_client.digest import Digest
from weight_manager.errors import PushRefused
from weight_manager.receiving import HEARD_S, PIECE_BYTES, Receiving
from weight_manager.staging import Staging
from weight_manager.target import Target


class Arrived(NamedTuple):
    """Bytes that have come, of one copy; perhaps none that stores below may have."""

    copy: int
    offset: int
    size: int


class Taken(NamedTuple):
    """A copy is complete; the digest that its trainer sent. What was received is in `Target.streamed`."""

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


class Intake:
    """Runs from `start` until the peer is done or gone, or `stop`."""

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
        self._socket = connection
        self._from = Receiving(connection)
        self._staging = staging
        self._first, self._count = copies
        self._targets: Sequence[Target] = staging.targets[self._first : self._first + self._count]
        self._tell = tell
        self._step = 1 << 20 if progress else 1 << 62
        self._told = 0.0
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def stop(self) -> None:
        """The session is over; the thread ends soon, and says so."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def finished(self) -> None:
        """All that it told has been taken in: answer. A peer that does not take that has gone."""
        with contextlib.suppress(OSError):
            self._socket.send(DONE, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """After `Ended`."""
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        refusal: PushRefused | None = None
        try:
            while self._record():
                pass
        except PushRefused as error:
            refusal = error
        except OSError:
            pass  # the peer is gone: its lease says what becomes of the session
        except BaseException as error:
            refusal = PushRefused("internal", f"receiving failed: {error!r}")
        self._tell(Ended(refusal))

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
        (place,) = self._staging.destinations(self._first + copy, 0, [nbytes])
        streamed = self._receive(copy, place)
        (digest,) = DIGEST.unpack(self._from.exactly(DIGEST.size))
        target.streamed = streamed
        self._tell(Taken(copy, digest))
        return True

    def _receive(self, copy: int, place: memoryview) -> int:
        """Digest of what is in its place then."""
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

"""A thread that receives the bytes of one data connection into a session's slot, and what it says to the loop.

It touches its targets and its socket, nothing else; what it has to say comes back to the loop through `Inbox`. The
slot may not be given away while it runs: whoever starts it counts it as a writer until `Ended`.
"""

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from weight_manager.errors import PushRefused


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
        self._socket = connection
        self._tell = tell
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Once. Raises RuntimeError where there is no thread to be had."""
        self._thread.start()

    def finished(self) -> None:
        """In the loop: all that was told before `Finished` has been heard."""
        return

    def stop(self) -> None:
        """The session is over; the thread ends soon, and says so."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After `Ended`."""
        self._thread.join()
        self._socket.close()

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

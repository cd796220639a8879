"""The data connection to the store above: a thread that fetches the bytes of one session (feed.py)."""

import contextlib
import socket
import threading

from rollout_client.data_socket import CONNECT_S, MAGIC, READY
from rollout_client.digest import Digest
from weight_manager.errors import PushRefused
from weight_manager.intake import Arrived, Ended, Finished, Hear, Taken, Unconnected
from weight_manager.receiving import PIECE_BYTES, Receiving
from weight_manager.relay.feed import CLAIM, END, RECORD
from weight_manager.staging import Staging


class Reception:
    """Runs from `start` until everything has come, the store above closes, or `stop`."""

    def __init__(self, address: tuple[str, int], key: bytes, staging: Staging, tell: Hear) -> None:
        """staging: each target is a region of the layout. tell: called in the thread."""
        self._address = address
        self._key = key
        self._staging = staging
        self._targets = list(staging.targets)
        self._tell = tell
        self._sums: dict[int, tuple[Digest, int]] = {}  # of regions that came in order so far: bytes
        self._socket: socket.socket | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reception", daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def finished(self) -> None:
        """The store above waits for no answer."""

    def stop(self) -> None:
        """The session is over; the thread ends soon, and says so."""
        self._stopped.set()
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After `Ended`."""
        self._thread.join()

    def _run(self) -> None:
        refusal: PushRefused | None = None
        try:
            with self._connect() as connection:
                self._socket = connection
                incoming = Receiving(connection)
                while not self._stopped.is_set() and self._record(incoming):
                    pass
        except PushRefused as error:
            refusal = error
        except OSError:
            if self._socket is None:
                self._tell(Unconnected())
        except BaseException as error:
            refusal = PushRefused("internal", f"receiving failed: {error!r}")
        self._tell(Ended(refusal))

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=CONNECT_S)
        try:
            connection.sendall(MAGIC + self._key)
            if connection.recv(1) != READY:
                raise ConnectionError("it is not the store's")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection

    def _record(self, incoming: Receiving) -> bool:
        region, first, second = RECORD.unpack(incoming.exactly(RECORD.size))
        if region == END:
            self._tell(Finished())
            return False
        if region == CLAIM:
            self._claimed(first, second)
            return True
        (place,) = self._staging.destinations(region, first, [second])
        self._receive(incoming, region, first, place)
        self._tell(Arrived(region, first, second))
        return True

    def _receive(self, incoming: Receiving, region: int, offset: int, place: memoryview) -> None:
        state, known = self._sums.pop(region, (Digest(), 0))
        done = 0
        while done < len(place):
            piece = place[done : done + PIECE_BYTES]
            count = incoming.some(piece, len(place) - done)
            if known == offset + done:
                state.update(piece[:count])
                known += count
            done += count
        self._sums[region] = state, known  # out of order it stays where it was, and the region is read again

    def _claimed(self, region: int, digest: int) -> None:
        if region >= len(self._targets):
            raise PushRefused("bad_message", f"region {region} is not in the layout")
        target = self._targets[region]
        state, known = self._sums.pop(region, (Digest(), 0))
        if known == target.nbytes:
            target.streamed = state.intdigest()
        self._tell(Taken(region, digest))

"""The data connection to the store above: a thread that fetches the bytes of one session (feed.py)."""

import socket
import threading

from rollout_client.data_socket import CONNECT_S, MAGIC, READY
from rollout_client.digest import Digest
from weight_manager.errors import PushRefused
from weight_manager.receiver import Arrived, Finished, Hear, Receiver, Taken, Unconnected
from weight_manager.receiving import PIECE_BYTES, Receiving
from weight_manager.relay.feed import CLAIM, END, RECORD
from weight_manager.staging import Staging

KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""Seconds and a count: a way that is dead while nothing comes is noticed after eleven."""


class Reception(Receiver):
    """Connects first. Each target of the staging is a region of the layout."""

    def __init__(self, address: tuple[str, int], key: bytes, staging: Staging, tell: Hear) -> None:
        """address: host, as ZMQ is given it, and port. tell: called in the thread."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(socket.socket(family), tell, "reception")
        self._address = address
        self._key = key
        self._staging = staging
        self._targets = list(staging.targets)
        self._sums: dict[int, tuple[Digest, int]] = {}  # of regions that came in order so far: bytes
        self._stopped = threading.Event()

    def stop(self) -> None:
        """The session is over; the thread ends soon, and says so."""
        self._stopped.set()
        super().stop()

    def _receive_all(self) -> None:
        if self._connected():
            incoming = Receiving(self._socket)
            while not self._stopped.is_set() and self._record(incoming):
                pass
        elif not self._stopped.is_set():
            self._tell(Unconnected())

    def _connected(self) -> bool:
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.connect(self._address)
            self._socket.sendall(MAGIC + self._key)
            if self._socket.recv(1) != READY:
                return False
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in KEEPALIVE:
                self._socket.setsockopt(socket.IPPROTO_TCP, option, seconds)
        except OSError:
            return False
        return True

    def _record(self, incoming: Receiving) -> bool:
        region, first, second = RECORD.unpack(incoming.exactly(RECORD.size))
        if region == END:
            self._tell(Finished())
            return False
        if region == CLAIM:
            self._claimed(first, second)
            return True
        if not second:
            raise PushRefused("bad_message", f"a record of no bytes, of region {region}")
        place = self._staging.expect(region, first, second)
        self._receive(incoming, region, first, place)
        self._staging.arrived(region, second)
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

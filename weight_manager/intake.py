"""A trainer's data connection: the copies of one trainer rank come into the slot, hashed as they come."""

import contextlib
import socket
import time
from collections.abc import Sequence

from rollout_client.data_socket import DIGEST, DONE, END, RECORD
from rollout_client.digest import Digest
from weight_manager.errors import PushRefused
from weight_manager.receiver import Arrived, Finished, Hear, Receiver, Taken
from weight_manager.receiving import HEARD_S, PIECE_BYTES, Receiving
from weight_manager.staging import Staging
from weight_manager.target import Target


class Intake(Receiver):
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
        super().__init__(connection, tell, "intake")
        self._from = Receiving(connection)
        self._staging = staging
        self._first, self._count = copies
        self._targets: Sequence[Target] = staging.targets[self._first : self._first + self._count]
        self._step = 1 << 20 if progress else 1 << 62
        self._told = 0.0

    def finished(self) -> None:
        """All that it told has been taken in: answer. A peer that does not take that has gone."""
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

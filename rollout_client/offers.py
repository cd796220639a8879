"""The trainer's side of what device_slots.py says: memory of this process, offered to ranks that copy from it.

Connections, what was shown over them, and so the ranks' mappings are kept from push to push: from the second one on a
push is one message to each rank and its answer.
"""

import logging
import os
import select
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from rollout_client.device_memory import CudaCallFailed
from rollout_client.device_slots import (
    LONGEST,
    MOST_ROWS,
    MOST_SEGMENTS,
    ROW,
    Grant,
    Hide,
    No,
    Rows,
    Segment,
    Show,
    Take,
    Taken,
    decode_answer,
    encode,
)
from rollout_client.own_memory import Allocation, OwnMemory, Run

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""Seconds that an answer of a rank is waited for, which may be copying another version. One that takes longer, as it
may to map memory for the first time, is asked again in the push after it has answered.
"""
_ROW_BYTES = 8 * ROW


class NotTaken(RuntimeError):
    """A rank does not copy from here; why."""


class NotYet(NotTaken):
    """Its answer takes too long for this push."""


class Connection:
    """With one rank."""

    def __init__(self, path: str) -> None:
        """Raises NotTaken."""
        self.path = path
        self._shown: set[int] = set()
        self._tables: dict[int, bytes] = {}
        self._owed = 0  # answers that have not come
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_S)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise NotTaken(f"it cannot be reached: {error}") from error

    def ready(self) -> bool:
        """Whether the rank has answered everything; waits for nothing. Raises NotTaken where it has hung up."""
        while self._speaks():
            if not self._owed:
                raise NotTaken("it has hung up")
            self._heard()
        return self._owed == 0

    def show(self, table: int, rows: bytes, named: Sequence[Allocation], memory: OwnMemory) -> None:
        """Tell what of a table the rank does not know yet. Raises NotTaken."""
        fresh = [one for one in named if one.id not in self._shown]
        for first in range(0, len(fresh), MOST_SEGMENTS):
            self._show(fresh[first : first + MOST_SEGMENTS], memory)
        if self._tables.get(table) == rows:
            return
        self._tables.pop(table, None)
        step = _ROW_BYTES * MOST_ROWS
        for at in range(0, max(len(rows), 1), step):
            self._send(encode(Rows(table, rows[at : at + step], more=at + step < len(rows))))
        self._tables[table] = rows

    def take(self, key: tuple[int, int], table: int, *, first: bool, last: bool, through: bool) -> None:
        """Ask the rank to copy; `taken` hears whether it does. Raises NotTaken."""
        self._send(encode(Take(*key, table, first, last, through)))
        self._owed += 1

    def taken(self, *, wait: bool = True) -> bool:
        """Wait for its answers, as many as it owes, or take those that are there; whether it owes none now. Raises
        NotTaken.
        """
        while self._owed and (wait or self._speaks()):
            answer = self._heard()
            if not isinstance(answer, Taken):
                raise NotTaken(answer.why if isinstance(answer, No) else "an answer that was not asked for")
        return not self._owed

    def _speaks(self) -> bool:
        said = select.poll()
        said.register(self._socket, select.POLLIN)
        return bool(said.poll(0))

    def _heard(self) -> Grant | Taken | No:
        try:
            answer: Grant | Taken | No = decode_answer(self._socket.recv(LONGEST))
        except TimeoutError as error:
            raise NotYet(f"no answer within {PATIENCE_S:g} s") from error
        except (OSError, msgspec.DecodeError) as error:
            raise NotTaken(f"no answer: {error}") from error
        self._owed -= 1
        return answer

    def keep_only(self, used: Collection[int]) -> None:
        """Let the rank unmap all other allocations. Raises NotTaken."""
        over = sorted(self._shown.difference(used))
        if over:
            self._shown.difference_update(over)
            self._send(encode(Hide(over)))

    def close(self, *, wait: bool = False) -> None:
        """Hang up: the rank unmaps everything. wait: until it has; one that takes too long is told of. Idempotent."""
        if wait:
            try:
                self._socket.shutdown(socket.SHUT_WR)
                while self._socket.recv(LONGEST):
                    pass  # an answer that a push has not waited for
            except TimeoutError:
                log.warning("%s still has this trainer's memory mapped after %g s", self.path, PATIENCE_S)
            except OSError:
                pass  # it is gone, and so are its mappings
        self._socket.close()

    def _show(self, fresh: Sequence[Allocation], memory: OwnMemory) -> None:
        fds: list[int] = []
        try:
            fds = memory.descriptors(fresh)
            said = encode(Show([Segment(one.id, one.nbytes, one.handle) for one in fresh]))
            socket.send_fds(self._socket, [said], fds)
        except (OSError, CudaCallFailed) as error:
            raise NotTaken(str(error)) from error
        finally:
            for fd in fds:
                os.close(fd)
        self._shown.update(one.id for one in fresh)

    def _send(self, said: bytes) -> None:
        try:
            self._socket.send(said)
        except OSError as error:
            raise NotTaken(f"it does not listen: {error}") from error


class Offers:
    """Of one process and one of its GPUs, to ranks. For one push at a time: `begin`, `take` and `taken` as often as
    needed, `end`. A rank that fails is left out until the next push, and told of, once as long as it fails alike.
    """

    def __init__(self, cuda: Any) -> None:
        """cuda: NVIDIA's driver library. The GPU's context is current whenever this is used."""
        self._memory = OwnMemory(cuda)
        self._connections: dict[str, Connection] = {}
        self._paths: Sequence[str] = ()
        self._good: list[Connection] = []
        self._key = 0, 0
        self._tables = 0
        self._used: set[int] = set()
        self._said: dict[str, str] = {}  # why a rank does not copy, and why none can, "": as it was told of last

    def begin(self, paths: Sequence[str], slot: int, write_epoch: int) -> None:
        """Arguments as `Placement` has them: sockets of ranks, the slot and its write epoch."""
        self._paths, self._key, self._tables, self._good = paths, (slot, write_epoch), 0, []
        self._used.clear()
        for path in set(self._connections).difference(paths):
            self._connections.pop(path).close()
        self._memory.look_again()
        for path in paths:
            try:
                if self._connect(path).ready():
                    self._good.append(self._connections[path])
                else:
                    self._without(path, "it has not answered the push before yet")
            except NotTaken as error:
                self._without(path, error)

    def _connect(self, path: str) -> Connection:
        """The connection of before, unless the rank has hung up."""
        known = self._connections.get(path)
        if known is not None:
            try:
                known.ready()
            except NotTaken:
                self._connections.pop(path).close()
                known = None
        if known is None:
            known = self._connections[path] = Connection(path)
        return known

    def take(self, runs: Sequence[Run], *, last: bool, through: bool = True) -> None:
        """Ask all ranks to copy these. through: they stay as they are until `taken` only, else for as long as the push.
        What makes them is done.
        """
        first, table, self._tables = self._tables == 0, self._tables, self._tables + 1
        try:
            rows, named = self._memory.rows(runs)
        except CudaCallFailed as error:
            if self._says("", error):
                log.warning("no copies from GPU to GPU: no other process can map this trainer's memory: %s", error)
            self._paths, self._good = (), []
            return
        self._said.pop("", None)
        self._used.update(one.id for one in named)

        def ask(rank: Connection) -> None:
            rank.show(table, rows, named, self._memory)
            rank.take(self._key, table, first=first, last=last, through=through)

        self._each(ask)

    def taken(self) -> int:
        """Wait until all have, if they have not by now. Returns how many ranks have got everything so far."""
        self._each(lambda rank: rank.taken())
        for rank in self._good:
            self._said.pop(rank.path, None)
        return len(self._good)

    def copied_from(self) -> bool:
        """Whether all have said by now that they copy; waits for nobody."""
        owing: list[str] = []

        def look(rank: Connection) -> None:
            if not rank.taken(wait=False):
                owing.append(rank.path)

        self._each(look)
        return self.whole and not owing

    @property
    def whole(self) -> bool:
        """No rank was left out."""
        return len(self._good) == len(self._paths) > 0

    def end(self) -> None:
        """The push is over, or another way is taken; ranks keep what it has named mapped, and nothing else."""
        self._each(lambda rank: rank.keep_only(self._used))

    def close(self, *, wait: bool = False) -> None:
        """Hang up: ranks unmap everything. wait: until they have. Idempotent."""
        for connection in self._connections.values():
            connection.close(wait=wait)
        self._connections.clear()
        self._good = []

    def _each(self, act: Callable[[Connection], object]) -> None:
        for rank in list(self._good):
            try:
                act(rank)
            except NotTaken as error:
                self._good.remove(rank)
                if not isinstance(error, NotYet):
                    self._connections.pop(rank.path).close()
                self._without(rank.path, error)

    def _without(self, path: str, why: object) -> None:
        if self._says(path, why):
            log.warning("%s does not copy from here, but the arena's slot: %s", path, why)

    def _says(self, what: str, why: object) -> bool:
        """Whether this is not what was said of it last: it may be the same at every push."""
        before, self._said[what] = self._said.get(what), str(why)
        return before != str(why)

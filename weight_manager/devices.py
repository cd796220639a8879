"""What the store has to do with device memory, without CUDA: it holds descriptors, and starts who copies from them.

A descriptor keeps the memory of a rank's slot allocated, whoever dies (rollout_client/device_memory.py). Ranks give it
to the store when they have proved a version there (rollout_client/device_slots.py, `Keep`).
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollout_client.device_slots import LONGEST, Grant, Keep, No, decode_answer, encode, socket_of
from weight_manager.from_device import Task
from weight_manager.watching import Watching

log = logging.getLogger(__name__)

COPY_S = 30.0
"""Seconds that a copy into the arena may take: starting CUDA is one or two of them."""
ANSWER_S = 2.0
"""Seconds that a rank has for its answer while the store starts."""


class Held(NamedTuple):
    """A version in a rank's memory, which is there for as long as the descriptor is open. runs: as `Grant` has them."""

    fd: int
    nbytes: int
    runs: list[tuple[int, int, int]]


class Place(NamedTuple):
    """A slot of an arena that is to be filled, as long as it has this write epoch."""

    arena: Path
    slot: int
    write_epoch: int


class Devices:
    """The ranks' memory as far as this store holds it. Everything but `find` and `copy_now` returns at once."""

    def __init__(self, run_dir: Path, watching: Watching) -> None:
        self._run_dir, self._watching = run_dir, watching
        self._called: dict[int, socket.socket] = {}  # connections over which nothing has been asked

    def call(self, replica: int) -> None:
        """Connect with a rank that `hold` is going to ask: it begins a thread for that, and that takes a millisecond of
        a commit. Who cannot be reached is found out then.
        """
        if replica not in self._called:
            with contextlib.suppress(OSError):
                self._called[replica] = self._connected(replica)

    def hold(
        self, replica: int, key: tuple[int, int], done: Callable[[Held | str], None], patience_s: float = 0.0
    ) -> Callable[[], None]:
        """Have a rank's memory held that it has proved to be this version. key: slot of the arena and write epoch.
        patience_s: so long it may wait for the proof.

        done: called in the loop, with why not in words. Returns what ends the question: whoever takes it and never
        answers is left to the commit's deadline, and nothing of it is to stay here; `done` is not called then.
        """

        def answered() -> None:
            self._watching.unwatch(connection.fileno())
            done(_heard(connection))

        def cancel() -> None:
            if connection.fileno() >= 0:
                self._watching.unwatch(connection.fileno())
                connection.close()

        try:
            connection = self._asked(replica, encode(Keep(*key, patience_s)))
        except OSError as error:
            done(f"replica {replica} cannot be asked for its device memory: {error.strerror}")
            return lambda: None
        self._watching.watch(connection.fileno(), answered)
        return cancel

    def copy(self, held: Held, place: Place, done: Callable[[str], None]) -> Callable[[], None]:
        """Have a process copy the version into the arena. done: called in the loop once it has ended, with what went
        wrong. Returns what ends it before; `done` is not called then. Raises OSError where no process can be started.
        """
        process = _start(held, place)
        try:
            pidfd, cancelled = os.pidfd_open(process.pid), False
        except OSError:
            process.kill()
            _outcome(process)
            raise

        def ended() -> None:
            self._watching.unwatch(pidfd)
            os.close(pidfd)
            why = _outcome(process)
            if not cancelled:
                done(why)

        def cancel() -> None:  # its end is not waited for, which the driver may take long for
            nonlocal cancelled
            cancelled = True
            process.kill()

        self._watching.watch(pidfd, ended)
        return cancel

    def find(self, key: tuple[int, int]) -> Iterator[Held]:
        """This version in the memory of any rank of the service that is there: for a store that has just begun."""
        for path in sorted(self._run_dir.glob("device-*.sock")):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(ANSWER_S)
                connection.connect(str(path))
                connection.send(encode(Keep(*key)))
                held = _heard(connection)
                if isinstance(held, Held):
                    yield held
                else:
                    log.warning("%s: %s", path, held)

    def copy_now(self, held: Held, place: Place) -> str:
        """As `copy`, and waited for. "" = every byte is there."""
        try:
            process = _start(held, place)
        except OSError as error:
            return f"no process can be started: {error}"
        try:
            process.wait(COPY_S)
        except subprocess.TimeoutExpired:
            process.kill()
        return _outcome(process)

    def _asked(self, replica: int, question: bytes) -> socket.socket:
        """A connection over which this was asked. Raises OSError."""
        called = self._called.pop(replica, None)
        if called is not None:
            try:
                called.send(question)
                return called
            except OSError:  # it was with a process that has ended, or that has hung up
                called.close()
        connection = self._connected(replica)
        try:
            connection.send(question)
        except OSError:
            connection.close()
            raise
        return connection

    def _connected(self, replica: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            connection.connect(str(socket_of(self._run_dir, replica)))
        except OSError:
            connection.close()
            raise
        return connection

    def let_go(self, held: Held) -> None:
        """The memory is the rank's alone again."""
        os.close(held.fd)


def _heard(connection: socket.socket) -> Held | str:
    """A rank's answer; closes the connection."""
    fds: list[int] = []
    with connection:
        try:
            raw, fds, _, _ = socket.recv_fds(connection, LONGEST, 1)
            answer = decode_answer(raw)
            if isinstance(answer, Grant) and fds:
                return Held(fds.pop(), answer.nbytes, answer.runs)
        except (OSError, msgspec.DecodeError) as error:
            return f"no answer of a rank: {error}"
        finally:
            for fd in fds:
                os.close(fd)
        return answer.why if isinstance(answer, No) else "a rank's answer has no memory"


def _start(held: Held, place: Place) -> "subprocess.Popen[bytes]":
    task = Task(str(place.arena), place.slot, place.write_epoch, held.fd, held.nbytes, held.runs)
    command = [sys.executable, "-m", "weight_manager.from_device"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[held.fd])
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(task))
        process.stdin.close()
    return process


def _outcome(process: "subprocess.Popen[bytes]") -> str:
    """What went wrong in a process that has ended, or was killed."""
    assert process.stderr is not None
    with process.stderr as errors:
        process.wait()
        said = errors.read().decode(errors="replace").strip()
    return "" if process.returncode == 0 else said.rpartition("\n")[2] or f"it ended with {process.returncode}"

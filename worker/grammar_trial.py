"""Grammars are compiled in a process first, which is killed when that takes too long: a thread cannot be stopped.

What the process has come to its end with takes as long here, and no longer. What is too long is a matter of the
processor's time: on a machine that others use, too, a grammar may wait long and be none the worse for it.
"""

import contextlib
import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import msgspec

from worker.grammar_child import READY, Names

START_S = 20.0
_LOOK_S = 0.1
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Trial:
    """One such process, started when it is needed and there is none: one that has had nothing to do for a while ends.
    One thread at a time.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._turn = threading.Lock()

    def ends(self, grammar: str, processor_s: float, within_s: float) -> bool:
        """Whether compiling it comes to an end in so many seconds of processor time.

        Raises OSError where it did not get as many within_s; without a process to try it in; and where that ended by
        itself: the grammar may need more memory or stack than there is, or others took the memory. Then, as after a no,
        the next one finds another process.
        """
        with self._turn:
            if (waiting := self._process) is not None:
                try:
                    return self._ends(waiting, grammar, processor_s, within_s)
                except BrokenPipeError:  # it may have ended of having had nothing to do, or been killed meanwhile
                    self._end()
            try:
                return self._ends(self._start(), grammar, processor_s, within_s)
            except BrokenPipeError:
                self._end()
                raise OSError("the process that it was tried in ended: memory or stack may be short") from None

    def _ends(self, process: subprocess.Popen[bytes], grammar: str, processor_s: float, within_s: float) -> bool:
        """Raises BrokenPipeError where the process ended by itself."""
        began, until = _processor_s(process), time.monotonic() + within_s
        _send(process, grammar.encode())
        while not _answers(process, _LOOK_S):
            used = _processor_s(process) - began
            if used >= processor_s:
                self._end()
                return False
            if time.monotonic() >= until:
                self._end()
                raise OSError(f"compiling it got {used:.1f} s of the processor in {within_s:g} s: the machine is busy")
        return _receive(process, 4, START_S) == bytes(4)

    def close(self) -> None:
        """End the process for good, if there is one. From any thread: whoever waits for its answer has it then."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._turn:
            self._end()

    def __del__(self) -> None:
        self._end()  # of one that was made while the others were closed

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for end in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    _pipe(end).close()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise OSError("no grammar is tried any more")
        argv = (sys.executable, "-m", "worker.grammar_child")
        pipe = subprocess.PIPE
        process = self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        try:  # one that ends of having had nothing to do would stay in the table of processes until the next is needed
            threading.Thread(target=process.wait, name="grammars", daemon=True).start()
        except RuntimeError as error:
            self._end()
            raise OSError(f"no thread is left to wait for the process that grammars are tried in: {error}") from error
        if self._closed:  # meanwhile: `close` may have found none to kill, and waits
            process.kill()
        try:
            _send(process, msgspec.msgpack.encode(self._names))
            if _receive(process, len(READY), START_S) == READY:
                return process
        except BrokenPipeError:
            pass
        self._end()
        raise OSError("the process to try grammars in did not start")


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end


def _send(process: subprocess.Popen[bytes], frame: bytes) -> None:
    into = _pipe(process.stdin)
    into.write(len(frame).to_bytes(4, "little") + frame)
    into.flush()


def _processor_s(process: subprocess.Popen[bytes]) -> float:
    """Processor time that it has had, of all its threads. Raises BrokenPipeError when it is gone."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        raise BrokenPipeError from None
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _answers(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Whether there is something to be read, or its end."""
    with selectors.DefaultSelector() as selector:
        selector.register(_pipe(process.stdout), selectors.EVENT_READ)
        return bool(selector.select(within_s))


def _receive(process: subprocess.Popen[bytes], size: int, within_s: float) -> bytes:
    """So many bytes, or fewer: what came in time. Raises BrokenPipeError at the process's end."""
    out, until, found = _pipe(process.stdout), time.monotonic() + within_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(out, selectors.EVENT_READ)
        while len(found) < size and selector.select(max(0.0, until - time.monotonic())):
            piece = out.read1(size - len(found))  # type: ignore[attr-defined]
            if not piece:
                raise BrokenPipeError
            found += piece
    return found

"""One child process: started so that it cannot outlive us, its output kept, its end noticed at once."""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_PIPE_BYTES = 1 << 20
"""A stopped supervisor must not stop its children: they can log this much before a write blocks."""
_KEPT_LINES = 60
_LINE_BYTES = 1 << 16
_LAST_READS = 2 * _PIPE_BYTES // _LINE_BYTES
"""Reads of what an ended process has left: more than a pipe holds, and not without end, as others may still write."""

_libc = ctypes.CDLL(None, use_errno=True)
Output = Callable[[str, str], None]
"""Called with the process's name and each line it wrote."""


class Child:
    """Runs from the moment it is made. Needs a running asyncio loop, in the main thread.

    told: it waits for `become`, a line on its stdin; otherwise it has none. Neither it nor what it starts imports from
    the directory that the service was started in, where a user's project may have a worker.py or an api of its own.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        death_signal: signal.Signals,
        output: Output,
        *,
        told: bool = False,
    ) -> None:
        self.name = name
        self.started = time.monotonic()
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._output = output
        self._partial = b""
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a limit for unprivileged users; the default size will do
            fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(read_end, False)
        # Known before it is made: whatever interrupts its making, what was forked has to be ended by somebody.
        self._process: subprocess.Popen[bytes] = subprocess.Popen.__new__(subprocess.Popen)
        try:
            self._process.__init__(  # type: ignore[misc]
                argv,
                env={**env, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.PIPE if told else subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,  # a Ctrl-C is for the supervisor alone
                preexec_fn=_dies_with(os.getpid(), death_signal),  # one prctl: no lock of another thread
            )
        except BaseException:
            os.close(read_end)
            if getattr(self._process, "pid", None) is not None and self._process.returncode is None:
                self._process.kill()
                self._process.wait()
            raise
        finally:
            os.close(write_end)
        self.pid = self._process.pid
        self._read_end = read_end
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # nobody would notice its end
            self._process.kill()
            self._process.wait()
            os.close(read_end)
            raise
        self._loop.add_reader(self._read_end, self._read)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def status(self) -> int | None:
        """None while it runs, then its exit status, or minus the signal that ended it."""
        return self._process.returncode

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it still runs."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def become(self, name: str, word: str) -> bool:
        """Tell it what it is from now on; False if it has ended. Once, of one that is `told`."""
        pipe = self._process.stdin
        assert pipe is not None
        self.name, self.started = name, time.monotonic()
        try:
            with pipe:
                pipe.write(word.encode() + b"\n")
        except BrokenPipeError:
            return False
        return True

    async def wait(self) -> int:
        """Wait until it has ended."""
        await self._ended.wait()
        assert self.status is not None
        return self.status

    def _reap(self) -> None:
        # While it is a zombie its process group is surely its own: end what it may have left behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._read(_LAST_READS)
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        if self._partial:
            self._line(self._partial)
        self._ended.set()

    def _read(self, times: int = 1) -> None:
        """Once a turn of the loop: a process that writes as fast as we read must not have us for itself."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(times):
                data = os.read(self._read_end, _LINE_BYTES)
                if not data:
                    self._loop.remove_reader(self._read_end)  # end of file: closed, but the process may go on
                    return
                *lines, self._partial = (self._partial + data).split(b"\n")
                for line in lines:
                    self._line(line)
                if len(self._partial) > _LINE_BYTES:
                    self._line(self._partial)
                    self._partial = b""

    def _line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        if text:
            self.lines.append(text)
            self._output(self.name, text)


def describe(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _dies_with(parent: int, death_signal: signal.Signals) -> Callable[[], None]:
    number = int(death_signal)

    def set_death_signal() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it died between the fork and the line above
            os._exit(0)

    return set_death_signal

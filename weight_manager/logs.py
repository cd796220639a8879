"""Structured logs of every process of the service: one JSON object per line on stderr.

Fields: ts (UTC), level, process, logger, message, and whatever the call passed as ``extra`` (version,
session, replica, rank ...). Import `setup` at a process's entry, then use the standard library's loggers.
"""

import atexit
import json
import logging
import os
import select
import sys
import threading
import time
from datetime import UTC, datetime

_URGENT_S, _UNREAD_S = 0.05, 0.2
"""Whoever says an error waits so long for it to be written: it may be the last word before an end that asks nobody. Not
where what is being written has been for as long as the second, as nobody reads: errors seldom come alone.
"""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One record as one JSON line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Everything passed as ``extra`` stands beside the message; values JSON does not know become text.

        Not what a library keeps on every record for itself, as Ray's `_ray_timestamp_ns`.
        """
        line = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD and not key.startswith("_")}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class Lines:
    """Writes lines to a descriptor on a thread of its own: nobody who says one waits for whoever reads there, which may
    be nobody. So many bytes wait; what comes then is dropped, and how many lines were is said between those before and
    after, as it is of lines that could not be written.

    process: as in `JsonFormatter`, of what is said so.
    """

    def __init__(self, descriptor: int, most: int = 16 << 20) -> None:
        self.process = ""
        self._descriptor = descriptor
        self._most = most
        self._waiting = bytearray()
        self._writing = 0  # bytes that were taken and are not written yet
        self._taken_at = float("inf")  # when they were
        self._dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def say(self, line: str) -> None:
        """Have a line written; returns at once."""
        data = f"{line}\n".encode(errors="replace")
        with self._changed:
            if self._dropped or len(self._waiting) + self._writing + len(data) > self._most:
                self._dropped += 1
            else:
                self._waiting += data
            if self._thread is None:
                self._begin()
            self._changed.notify_all()

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until all is written, or for so long."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while (self._waiting or self._writing or self._dropped) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def hurry(self) -> None:
        """Wait a moment until all is written, if somebody reads."""
        if time.monotonic() - self._taken_at < _UNREAD_S:
            self.flush(_URGENT_S)

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._write, name="lines", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there is no room for one; with the next line, perhaps
            self._thread = None
        else:
            atexit.register(self.flush)

    def _write(self) -> None:
        lost, torn = 0, False  # lines that could not be written; the last of those before is half there
        while True:
            with self._changed:
                self._writing, self._taken_at = 0, float("inf")
                self._changed.notify_all()
                while not self._waiting and not self._dropped:
                    self._changed.wait()
                data, self._waiting = self._waiting, bytearray()
                dropped, self._dropped = self._dropped, 0
                self._writing, self._taken_at = max(1, len(data)), time.monotonic()
            head = b"\n" if torn else b""
            if lost:
                head += self._told(f"{lost} lines were lost, as they could not be written")
            data[:0] = head
            end = len(data)
            if dropped:
                data += self._told(f"{dropped} lines were dropped, as nobody read those before them")
            done = self._write_all(data)
            if done < len(data):  # whoever read has gone, or a disk is full; another time there may be room
                unsaid = lost if done < len(head) else 0
                lost = unsaid + data.count(b"\n", max(done, len(head)), end) + dropped
                torn = data[done - 1 : done] != b"\n" if done else torn
            else:
                lost, torn = 0, False

    def _write_all(self, data: bytearray) -> int:
        """How many bytes of it could be written."""
        done = 0
        with memoryview(data) as whole:
            while done < len(whole):
                try:
                    done += os.write(self._descriptor, whole[done:])
                except BlockingIOError:  # one of those who share it has made it so
                    ready = select.poll()
                    ready.register(self._descriptor, select.POLLOUT)
                    ready.poll()
                except OSError:
                    break
        return done

    def _told(self, what: str) -> bytes:
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, what, (), None)
        return f"{JsonFormatter(self.process).format(record)}\n".encode()


class LinesHandler(logging.Handler):
    """Says records as lines."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """logging.Handler."""
        try:
            self._lines.say(self.format(record))
            if record.levelno >= logging.ERROR:
                self._lines.hurry()
        except Exception:
            self.handleError(record)


def setup(process: str, level: str = "info", lines: Lines | None = None) -> None:
    """Send all logs of this process ("store", "api", "replica 0 rank 1") to stderr as JSON lines.

    lines: in place of stderr, for a process that must not wait for whoever reads it. What runs below a supervisor need
    not mind: that one reads it.
    """
    output: logging.Handler = logging.StreamHandler(sys.stderr)
    if lines is not None:
        lines.process, output = process, LinesHandler(lines)
    output.setFormatter(JsonFormatter(process))
    _hold_standard_descriptors()
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(level.upper())


def _hold_standard_descriptors() -> None:
    """Of a process that was started without one of them, as by `2>&-`, the next file that it opens would have that
    number, and lines would be written into it: a lock, a socket, an arena.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(nothing, True)

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

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One record as one JSON line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Everything passed as ``extra`` stands beside the message; values JSON does not know become text."""
        line = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class Lines:
    """Writes lines to a descriptor on a thread of its own: nobody who says one waits for whoever reads there, which may
    be nobody. So many wait; what comes then is dropped, and how many were is said between those before and after.
    """

    def __init__(self, descriptor: int, most: int = 10_000) -> None:
        self._descriptor = descriptor
        self._most = most
        self._lines: list[str] = []
        self._dropped = 0
        self._writes = False  # lines that were taken are not written yet
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def say(self, line: str) -> None:
        """Have a line written; returns at once."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._write, name="lines", daemon=True)
                thread.start()
                self._thread = thread
                atexit.register(self.flush)
            if len(self._lines) >= self._most:
                self._dropped += 1
                return
            self._lines.append(line)
            self._changed.notify_all()

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until all is written, or for so long."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while (self._lines or self._writes) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._writes = False
                self._changed.notify_all()
                while not self._lines:
                    self._changed.wait()
                lines, self._lines, self._writes = self._lines, [], True
                dropped, self._dropped = self._dropped, 0
            if dropped:
                lost = f"{dropped} lines were dropped, as nobody read those before them"
                lines.append(json.dumps({"level": "warning", "message": lost}))
            left = memoryview("".join(f"{line}\n" for line in lines).encode(errors="replace"))
            try:
                while left:
                    try:
                        left = left[os.write(self._descriptor, left) :]
                    except BlockingIOError:  # whoever has it, too, has made it so that nobody waits there
                        select.select([], [self._descriptor], [])
            except OSError:  # whoever read has gone; somebody may yet come
                continue


class LinesHandler(logging.Handler):
    """Says records as lines."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """logging.Handler."""
        try:
            self._lines.say(self.format(record))
        except Exception:
            self.handleError(record)


def setup(process: str, level: str = "info", lines: Lines | None = None) -> None:
    """Send all logs of this process ("store", "api", "replica 0 rank 1") to stderr as JSON lines.

    lines: in place of stderr, for a process that must not wait for whoever reads it. What runs below a supervisor need
    not mind: that one reads it.
    """
    output: logging.Handler = logging.StreamHandler(sys.stderr) if lines is None else LinesHandler(lines)
    output.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(level.upper())

"""Structured logs of every process of the service: one JSON object per line on stderr.

Fields: ts (UTC), level, process, logger, message, and whatever the call passed as ``extra`` (version,
session, replica, rank ...). Import `setup` at a process's entry, then use the standard library's loggers.
"""

import json
import logging
import sys
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


def setup(process: str, level: str = "info") -> None:
    """Send all logs of this process ("store", "api", "replica 0 rank 1") to stderr as JSON lines."""
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(level.upper())

"""A file of a run directory that says what is true now, on a disk that may be full for a while."""

import asyncio
import logging
from pathlib import Path

from weight_manager.whole_file import replace_file

log = logging.getLogger(__name__)

AGAIN_S = 1.0


class KeptFile:
    """Used from an event loop only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = b""
        self._again: asyncio.TimerHandle | None = None  # while it could not be written

    def say(self, content: bytes) -> None:
        """Have the file hold this: now, or as soon as it can be written. Raises nothing; what is said last counts."""
        self._content = content
        if self._again is None:
            self._write()

    def _write(self) -> None:
        failed_before, self._again = self._again is not None, None
        try:
            replace_file(self._path, self._content)
        except OSError as error:
            if not failed_before:
                log.error("%s cannot be written, it is tried again: %s", self._path, error)
            self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._write)
        else:
            if failed_before:
                log.info("%s is written", self._path)

"""The way that bytes take from the store above: data connections, unless they failed a short while ago."""

import logging
import time
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

AGAIN_S = 60.0
"""After a data connection that failed."""


class Way:
    """Kept over sessions, and over new connections to the store above."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: of its ZMQ socket, tcp://host:port."""
        self._host = urlsplit(endpoint).hostname or ""
        self._closed_until = 0.0

    def host(self) -> str:
        """Where data connections go; "" = chunks are wanted."""
        return "" if time.monotonic() < self._closed_until else self._host

    def failed(self, why: str) -> None:
        """Chunks are wanted for a while."""
        self._closed_until = time.monotonic() + AGAIN_S
        log.warning("the data port of the store above %s: ZMQ frames for the next %g s", why, AGAIN_S)

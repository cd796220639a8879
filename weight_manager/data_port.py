"""Where data connections arrive, and how each finds its session. Protocol: rollout_client/data_socket.py.

Until its key is known a connection is a nobody: a few bytes, a few seconds, and a few of them at a time.
"""

import contextlib
import errno
import hmac
import logging
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from rollout_client.data_socket import KEY_BYTES, MAGIC, READY, enlarge
from weight_manager.errors import StartError
from weight_manager.metrics import Counters
from weight_manager.watching import Watching

log = logging.getLogger(__name__)

GREETING_BYTES = len(MAGIC) + KEY_BYTES
GREETING_S = 5.0
STRANGERS = 64
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
DEAF_S = 1.0
"""Nothing is accepted for so long once the process, or the system, has no room for a connection."""
BACKLOG = 64


class Stranger:
    """A connection that has not said its key yet."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self.connection = connection
        self.until = until
        self.said = b""


class DataPort:
    """Accepts, and hands connections over. `admit` takes a key and returns who takes the connection, or None."""

    def __init__(self, endpoint: str, port: int, watching: Watching, counters: Counters) -> None:
        """endpoint: tcp://host:port of the ZMQ socket beside it; this listens on the same host. Raises StartError."""
        host = urlsplit(endpoint).hostname or ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._watching = watching
        self._counters = counters
        self._strangers: dict[int, Stranger] = {}
        self._keys: dict[bytes, Callable[[socket.socket], None]] = {}
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            enlarge(self._socket, socket.SO_RCVBUF)  # taken on by what is accepted
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            raise StartError(f"cannot listen on data_port {port} of {host}: {error.strerror}") from error
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._deaf_until: float | None = None  # no descriptor is left for a connection
        watching.watch(self._socket.fileno(), self._accept)

    def expect(self, key: bytes, take: Callable[[socket.socket], None]) -> None:
        """One connection may come with this key; `take` owns it then."""
        self._keys[key] = take

    def forget(self, key: bytes) -> None:
        """Nobody may come with it any more."""
        self._keys.pop(key, None)

    def tick(self, now: float) -> None:
        """Send away who does not say a key, and accept again."""
        if self._deaf_until is not None and now >= self._deaf_until:
            self._deaf_until = None
            self._watching.watch(self._socket.fileno(), self._accept)
        for stranger in [s for s in self._strangers.values() if now >= s.until]:
            self._part(stranger).close()

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        times = [s.until for s in self._strangers.values()]
        if self._deaf_until is not None:
            times.append(self._deaf_until)
        return min(times, default=None)

    def close(self) -> None:
        """Stop listening, and close connections that nobody has been given. Those that were handed over are
        left alone.
        """
        self._watching.unwatch(self._socket.fileno())
        self._socket.close()
        for stranger in list(self._strangers.values()):
            self._part(stranger).close()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:  # it goes on waiting, and the loop would wake up for it at once, and again
                log.error("no data connection can be accepted: %s", error.strerror)
                self._deaf_until = time.monotonic() + DEAF_S
                self._watching.unwatch(self._socket.fileno())
            return  # else it is gone again
        if len(self._strangers) >= STRANGERS:
            self._part(min(self._strangers.values(), key=lambda s: s.until)).close()
        connection.setblocking(False)
        stranger = Stranger(connection, time.monotonic() + GREETING_S)
        self._strangers[connection.fileno()] = stranger
        self._watching.watch(connection.fileno(), lambda: self._hear(stranger))

    def _hear(self, stranger: Stranger) -> None:
        try:
            content = stranger.connection.recv(GREETING_BYTES - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            content = b""
        stranger.said += content
        if content and len(stranger.said) < GREETING_BYTES:
            return
        connection = self._part(stranger)
        magic, key = stranger.said[: len(MAGIC)], stranger.said[len(MAGIC) :]
        known = next((k for k in self._keys if hmac.compare_digest(k, key)), None)
        if magic != MAGIC or known is None:
            if stranger.said:
                self._counters.add("bad_messages")
                log.warning("a data connection without a session's key")
            connection.close()
            return
        self._counters.add("data_connections")
        with contextlib.suppress(OSError):
            connection.send(READY)
        connection.setblocking(True)
        self._keys.pop(known)(connection)

    def _part(self, stranger: Stranger) -> socket.socket:
        fd = stranger.connection.fileno()
        self._watching.unwatch(fd)
        self._strangers.pop(fd, None)
        return stranger.connection

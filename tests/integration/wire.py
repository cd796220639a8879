"""A TCP proxy that damages one byte of what a trainer sends, as a bad network card would."""

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class FlippingProxy:
    """Stands between a publisher and a store; the first time it sees `pattern`, one byte of it changes."""

    def __init__(self, target: str, pattern: bytes):
        self.flipped = False
        self._pattern = pattern
        self._damaged = bytes([pattern[0] ^ 0x10]) + pattern[1:]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.reach(target)
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def reach(self, target: str) -> str:
        """Stand before another port from now on; the endpoint to connect to."""
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        return self.endpoint

    def __enter__(self) -> "FlippingProxy":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close(self._listener)
        self._threads[0].join(5)  # after it no connection is added
        for one in self._sockets:
            self._close(one)
        for thread in self._threads[1:]:
            thread.join(5)

    @staticmethod
    def _close(one: socket.socket) -> None:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                self._sockets.append(near)
                far = socket.create_connection(self._target)
                self._sockets.append(far)
                for source, sink, damage in ((near, far, True), (far, near, False)):
                    self._threads.append(threading.Thread(target=self._pump, args=(source, sink, damage)))
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket, damage: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if damage and not self.flipped and self._pattern in data:
                    data = data.replace(self._pattern, self._damaged, 1)
                    self.flipped = True
                sink.sendall(data)

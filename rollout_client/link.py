"""What ZMQ says of a socket's connection. It makes a lost one anew by itself, but answers to what was sent over the old
one never come."""

from typing import Any

import zmq
import zmq.utils.monitor

_FAILED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_WATCHED = _FAILED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class Link:
    """Of a socket with one endpoint. Only the socket's thread touches it."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        """To be called before the socket connects."""
        self._socket = socket
        self.monitor: Any = socket.get_monitor_socket(int(_WATCHED))
        self.up = False
        self.losses = 0  # connections that were there and are gone
        self.refused = False  # by name: the store knows the key and does not want it
        self.failed = False  # the other side broke off: another store's key, or no keys there at all

    def hear(self) -> None:
        """Take in what has happened."""
        while self.monitor.poll(0):
            event = zmq.utils.monitor.parse_monitor_message(self.monitor.recv_multipart(zmq.DONTWAIT))["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.up = True
            elif event == zmq.Event.DISCONNECTED:
                self.losses += self.up
                self.up = False
            else:
                self.failed = True
                self.refused = self.refused or event == zmq.Event.HANDSHAKE_FAILED_AUTH

    def close(self) -> None:
        """Before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(0)

"""Keys that encrypt a push and say who may: CURVE, as ZMQ has it. `paddle-rollout keys` makes the files.

A trainer's file holds its own pair and the store's public key, so each knows the other before a byte of a message is
sent. Keys are Z85 text, 40 characters.
"""

from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.utils.monitor

Z85 = 40
_WATCHED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL


class TrainerKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer needs. store: the store's public key."""

    public: str
    secret: str
    store: str

    def __repr__(self) -> str:
        """Without the secret: reprs end up in logs."""
        return f"TrainerKeys(public={self.public!r}, store={self.store!r})"

    @classmethod
    def read(cls, path: str | Path) -> "TrainerKeys":
        """Raises OSError, or ValueError for what is no file of these keys."""
        try:
            keys = msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} is no trainer's key file (`paddle-rollout keys` makes them): {error}") from None
        if {len(keys.public), len(keys.secret), len(keys.store)} != {Z85}:
            raise ValueError(f"{path}: a key has {Z85} characters")
        return keys

    def lock(self, socket: "zmq.Socket[bytes]") -> "Handshakes":
        """To be called before the socket connects."""
        self.hold(socket)
        return Handshakes(socket)

    def hold(self, socket: "zmq.Socket[Any]") -> None:
        """Without hearing why a connection does not come about."""
        socket.set(zmq.CURVE_SERVERKEY, self.store.encode())
        socket.set(zmq.CURVE_PUBLICKEY, self.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, self.secret.encode())


class Handshakes:
    """Hears why a connection does not come about: ZMQ itself tries again and says nothing."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self.monitor: Any = socket.get_monitor_socket(int(_WATCHED))
        self.refused = False  # by name: the store knows the key and does not want it
        self.failed = False  # the other side broke off: another store's key, or no keys there at all

    def hear(self) -> None:
        """Take in what has happened."""
        while self.monitor.poll(0):
            event = zmq.utils.monitor.parse_monitor_message(self.monitor.recv_multipart(zmq.DONTWAIT))
            if event["event"] == zmq.Event.HANDSHAKE_FAILED_AUTH:
                self.refused = True
            self.failed = True

    def close(self) -> None:
        """Before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(0)

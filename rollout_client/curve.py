"""Keys that encrypt a push and say who may: CURVE, as ZMQ has it. `paddle-rollout keys` makes the files.

A trainer's file holds its own pair and the store's public key, so each knows the other before a byte of a message is
sent. Keys are Z85 text, 40 characters.
"""

from pathlib import Path
from typing import Any

import msgspec
import zmq

Z85 = 40


class TrainerKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer needs. store: the store's public key."""

    public: str
    secret: str
    store: str

    def __repr__(self) -> str:
        """The keys without the secret, as reprs end up in logs."""
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

    def hold(self, socket: "zmq.Socket[Any]") -> None:
        """Encrypt what goes through a socket. Call it before the socket connects."""
        socket.set(zmq.CURVE_SERVERKEY, self.store.encode())
        socket.set(zmq.CURVE_PUBLICKEY, self.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, self.secret.encode())

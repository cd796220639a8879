"""The store's side of CURVE: its pair, the trainers whose keys it knows, and the gate that ZMQ asks (ZAP, RFC 27)."""

import logging
import os
import re
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from rollout_client.curve import Z85, TrainerKeys
from weight_manager.errors import UNREADABLE
from weight_manager.metrics import Counters

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"trainers"
STORE_FILE = "store.key"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class StoreKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the store needs. trainers: public keys, by a name for logs."""

    public: str
    secret: str
    trainers: dict[str, str]

    def __repr__(self) -> str:
        """The keys without the secret, as reprs end up in logs."""
        return f"StoreKeys(public={self.public!r}, trainers={self.trainers!r})"

    @classmethod
    def read(cls, path: Path) -> "StoreKeys":
        """Raises OSError, or ValueError for what is no file of these keys."""
        try:
            keys = msgspec.json.decode(path.read_bytes(), type=cls)
        except UNREADABLE as error:
            raise ValueError(f"{path} is no store's key file (`paddle-rollout keys` makes them): {error}") from None
        if {len(key) for key in (keys.public, keys.secret, *keys.trainers.values())} != {Z85}:
            raise ValueError(f"{path}: a key has {Z85} characters")
        return keys

    def lock(self, socket: "zmq.Socket[bytes]") -> None:
        """To be called before the socket is bound, with a `Gate` in its context."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.secret.encode())
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


class Gate:
    """Answers ZMQ's question for each connection. Only the loop's thread touches it."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: StoreKeys, counters: Counters) -> None:
        self._known = {key: name for name, key in keys.trainers.items()}
        self._counters = counters
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def answer(self) -> None:
        """Everything that was asked."""
        while self.socket.poll(0):
            version, request, domain, address, _, mechanism, *credentials = self.socket.recv_multipart()
            key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and len(credentials) == 1 else ""
            name = self._known.get(key) if domain == ZAP_DOMAIN else None
            if name is None:
                self._counters.add("unauthorized")
                log.warning("a connection from %s has a key that is not known here", address.decode(errors="replace"))
            status, text = (b"400", b"unknown key") if name is None else (b"200", b"OK")
            self.socket.send_multipart([version, request, status, text, (name or "").encode(), b""])

    def close(self) -> None:
        """Close the gate's socket, after the sockets that it answers for."""
        self.socket.close()


def make_keys(directory: Path, trainer: str = "trainer") -> tuple[Path, Path]:
    """Write store.key, and a trainer's file beside it, readable by this user only.

    A store.key that is there already is kept and learns of the new trainer. trainer: its name, and its file's.
    Returns both paths. Raises FileExistsError if the store knows a trainer of this name, OSError, ValueError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    store_path, trainer_path = directory / STORE_FILE, directory / f"{trainer}.key"
    if store_path == trainer_path or not _NAME.fullmatch(trainer):
        raise ValueError(f"a trainer cannot be called {trainer!r}: letters, digits, - and _, and not 'store'")
    if store_path.exists():
        store = StoreKeys.read(store_path)
    else:
        public, secret = _pair()
        store = StoreKeys(public, secret, {})
    if trainer in store.trainers or trainer_path.exists():
        raise FileExistsError(f"{directory} has keys of a trainer {trainer!r} already: choose another name")
    public, secret = _pair()
    _write(trainer_path, msgspec.json.encode(TrainerKeys(public, secret, store.public)))
    known = store.trainers | {trainer: public}
    _write(store_path, msgspec.json.encode(msgspec.structs.replace(store, trainers=known)))
    return store_path, trainer_path


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: a store that starts meanwhile reads the old file or the new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content + b"\n")
    scratch.replace(path)

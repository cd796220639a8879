"""The bytes of a push over a TCP socket of their own, beside the ZMQ channel that carries everything else.

ZMQ hands large messages from thread to thread on both sides; a socket hands them to the kernel. Each block is hashed
just before it is sent, and by the store just after it was received, while it is in the core's cache. Steps:

 1. [STORE] `Welcome.data_port`, and in each chunked `Placement` a `data_key` for the session and trainer rank.
 2. [TRAINER] connects to the host it reaches the store at. Sends `MAGIC` and the key. [STORE] answers `READY`; who
    does not is somebody else's port behind a translated address, and chunks are sent.
 3. [TRAINER] for each copy, in any order: `RECORD` (copy, bytes), the bytes in C order and in dst_dtype, `DIGEST`
    (digest.py). That replaces the `Chunk`s and the `Written` of the copy. Copies may also go as chunks instead.
 4. [TRAINER] `RECORD` (END, 0). [STORE] answers `DONE` once all before it has been taken in; then `Seal` may come.
 5. [STORE] closes the connection when the session is over, or of a record that does not fit: the reason is the answer
    to the next `Renew`, `Seal` or `Commit`.

Little-endian. Not encrypted: a store with CURVE keys offers no port, and a trainer that cannot connect sends chunks.
"""

import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rollout_client.copying import WIRE_DTYPE, blocks, source_view
from rollout_client.digest import Digest
from rollout_client.errors import StoreUnavailable
from rollout_client.protocol import Copy, Placement
from rollout_client.tensors import Array, Source
from rollout_client.transport import Reporter, by_part

MAGIC = b"PDLDATA1"
KEY_BYTES = 16
RECORD = struct.Struct("<IQ")
DIGEST = struct.Struct("<Q")
END = 0xFFFFFFFF
DONE = b"\1"
READY = b"\2"
BUFFER = 4 << 20
BLOCK_BYTES = 1 << 20
"""Bytes that are hashed and handed to the kernel at a time: system calls and Python cost little, and they are still in
the cache.
"""
CONNECT_S = 2.0
TURN_S = 0.05


def enlarge(sock: socket.socket, option: int) -> None:
    """A buffer of BUFFER bytes; where the system does not give so much, what its own tuning comes to: it gives more."""
    most = Path("/proc/sys/net/core/rmem_max" if option == socket.SO_RCVBUF else "/proc/sys/net/core/wmem_max")
    try:
        allowed = int(most.read_text())
    except (OSError, ValueError):
        return
    if allowed >= BUFFER:
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)


class DataSocket:
    """One connection, for one session."""

    def __init__(self, endpoint: str, port: int, key: bytes) -> None:
        """endpoint: of the store's ZMQ socket, tcp://host:port. Raises OSError if nobody answers there."""
        host = urlsplit(endpoint).hostname or ""
        self._socket = socket.create_connection((host, port), timeout=CONNECT_S)
        enlarge(self._socket, socket.SO_SNDBUF)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._turned = 0.0
        try:
            self._socket.sendall(MAGIC + key)
            if self._socket.recv(1) != READY:
                raise ConnectionError("it is not the store's")
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(None)

    def stage(self, placement: Placement, sources: Sequence[Source], reporter: Reporter) -> int:
        """Send everything; bytes that were sent. Raises what `Reporter.turn` raises, and StoreUnavailable."""
        wait = struct.pack("@ll", *divmod(int(reporter.patience_s * 1e6), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        sent = 0
        for part, copies in by_part(placement.copies):
            flat = sources[part].load()
            for number, copy in copies:
                sent += self._copy(number, copy, flat, sources[part].part.dtype, reporter)
        self._send(memoryview(RECORD.pack(END, 0)), reporter)
        self._socket.settimeout(reporter.patience_s)
        while True:
            try:
                answer = self._socket.recv(1)
            except TimeoutError:
                reporter.turn()
                continue
            except OSError:
                answer = b""
            if answer != DONE:
                self._lost(reporter)
            return sent

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _copy(self, number: int, copy: Copy, flat: Array, src_dtype: str, reporter: Reporter) -> int:
        source = source_view(flat, copy)
        itemsize = WIRE_DTYPE[copy.dst_dtype].itemsize
        nbytes = source.size * itemsize
        state = Digest()
        self._send(memoryview(RECORD.pack(number, nbytes)), reporter)
        for _, block in blocks(source, src_dtype, copy.dst_dtype, BLOCK_BYTES // itemsize):
            raw = block.reshape(-1).data.cast("B")
            state.update(raw)
            self._send(raw, reporter)
            reporter.moved(len(raw))
        self._send(memoryview(DIGEST.pack(state.intdigest())), reporter)
        return nbytes

    def _send(self, raw: memoryview, reporter: Reporter) -> None:
        while raw:
            try:
                raw = raw[self._socket.send(raw) :]
            except BlockingIOError:
                reporter.turn()
            except OSError:
                self._lost(reporter)
        now = time.monotonic()
        if now >= self._turned + TURN_S:
            self._turned = now
            reporter.turn()

    def _lost(self, reporter: Reporter) -> None:
        """The store has closed the connection: it says why on the channel, if it can."""
        reporter.ask_why()
        raise StoreUnavailable("the store closed the data connection")

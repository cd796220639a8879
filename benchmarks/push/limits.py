"""What no push can beat. A: the bytes copied once within memory. T: the bytes sent once through a TCP socket.

A is one thread's memmove of the whole source, a single call, into a file in /dev/shm that is mapped, backed and has
been copied into before. `by_tensor` is the same with one call per tensor. T is `socket.recv_into` the destination
from another process over loopback, with 4 MiB socket buffers.
"""

import ctypes
import mmap
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.push import source

BUFFER = 4 << 20


def copy_seconds(path: Path) -> dict[str, float]:
    """Limit A both ways, seconds."""
    flat, tensors = source.read(path)
    target_path = path.with_name("limit.bin")
    descriptor = os.open(target_path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(descriptor, 0, flat.nbytes)
        mapping = mmap.mmap(descriptor, flat.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
        target_path.unlink()
    target = np.frombuffer(mapping, np.uint8)
    places = source.split(target, path)
    ctypes.memmove(target.ctypes.data, flat.ctypes.data, flat.nbytes)
    started = time.perf_counter()
    ctypes.memmove(target.ctypes.data, flat.ctypes.data, flat.nbytes)
    whole = time.perf_counter() - started
    started = time.perf_counter()
    for name, tensor in tensors.items():
        ctypes.memmove(places[name].ctypes.data, tensor.ctypes.data, tensor.nbytes)
    return {"flat": whole, "by_tensor": time.perf_counter() - started}


def tcp_seconds(path: Path) -> float:
    """Limit T, seconds, of the second of two passes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        port = server.getsockname()[1]
        with subprocess.Popen([sys.executable, "-m", "benchmarks.push.limits", str(path), str(port)]) as sender:
            try:
                connection, _ = server.accept()
                with connection:
                    return _receive(connection, path.stat().st_size)
            finally:
                sender.terminate()


def _receive(connection: socket.socket, nbytes: int) -> float:
    connection.settimeout(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    target = memoryview(bytearray(nbytes))
    took = 0.0
    for _ in range(2):
        started = time.perf_counter()
        connection.sendall(b"g")
        done = 0
        while done < nbytes:
            count = connection.recv_into(target[done:])
            if not count:
                raise ConnectionError("the sender of limit T is gone")
            done += count
        took = time.perf_counter() - started
    return took


def send(path: Path, port: int) -> None:
    flat, _ = source.read(path)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        while connection.recv(1):
            connection.sendall(flat.data)


if __name__ == "__main__":
    send(Path(sys.argv[1]), int(sys.argv[2]))

"""The socket to the store above."""

from collections.abc import Sequence

import zmq

from rollout_client.curve import TrainerKeys
from rollout_client.protocol import MAX_HEADER_BYTES


def connect(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: TrainerKeys | None) -> "zmq.Socket[bytes]":
    """Bounded by the credit that is given, not by a queue of messages. keys: for a store above that wants some."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.IPV6, 1 if "[" in endpoint else 0)
    if keys is not None:
        keys.hold(socket)
    socket.connect(endpoint)
    return socket


def drain(socket: "zmq.Socket[bytes]") -> None:
    """Throw the rest of a message away."""
    while socket.get(zmq.RCVMORE):
        socket.recv(copy=False)


def receive_payload(socket: "zmq.Socket[bytes]", buffers: Sequence[memoryview] | None) -> bool:
    """The payload frames of a message into these buffers; False if they do not fit, or None: thrown away."""
    fits = buffers is not None
    for buffer in buffers or ():
        if not socket.get(zmq.RCVMORE) or socket.recv_into(buffer) != len(buffer):
            fits = False
            break
    if socket.get(zmq.RCVMORE):
        drain(socket)
        fits = False
    return fits

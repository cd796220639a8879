"""PUSH to PULL over TCP loopback: 256 KiB frames, received straight into their place."""

import numpy as np
import zmq

from benchmarks.push import source
from benchmarks.push.peers.pair import Meeting, main

FRAME = 256 << 10


class Pusher:
    def __init__(self, meeting: Meeting) -> None:
        self._flat = source.read(meeting.path)[0]
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 64)
        self._socket.bind(f"tcp://127.0.0.1:{meeting.ports[0]}")

    def send(self) -> None:
        for start in range(0, self._flat.size, FRAME):
            self._socket.send(self._flat[start : start + FRAME], copy=False)


class Puller:
    def __init__(self, meeting: Meeting) -> None:
        self._path = meeting.path
        self._flat = np.zeros(meeting.path.stat().st_size, np.uint8)
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 64)
        self._socket.connect(f"tcp://127.0.0.1:{meeting.ports[0]}")

    def receive(self) -> source.Tensors:
        done = 0
        while done < self._flat.size:
            done += self._socket.recv_into(self._flat[done : done + FRAME])
        return source.split(self._flat, self._path)


if __name__ == "__main__":
    main(Pusher, Puller)

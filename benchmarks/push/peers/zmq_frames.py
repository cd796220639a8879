"""PUSH to PULL over ipc: multipart messages of 64 MB frames that the sender does not copy."""

import numpy as np
import zmq

from benchmarks.push import source
from benchmarks.push.peers.pair import Meeting, main

FRAME, FRAMES = 64 << 20, 4


class Pusher:
    def __init__(self, meeting: Meeting) -> None:
        self._flat = source.read(meeting.path)[0]
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, FRAMES)
        self._socket.bind(f"ipc://{meeting.scratch}/frames")

    def send(self) -> None:
        pieces = [self._flat[i : i + FRAME] for i in range(0, self._flat.size, FRAME)]
        for first in range(0, len(pieces), FRAMES):
            self._socket.send_multipart(pieces[first : first + FRAMES], copy=False)


class Puller:
    def __init__(self, meeting: Meeting) -> None:
        self._path = meeting.path
        self._flat = np.zeros(meeting.path.stat().st_size, np.uint8)
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, FRAMES)
        self._socket.connect(f"ipc://{meeting.scratch}/frames")

    def receive(self) -> source.Tensors:
        done = 0
        while done < self._flat.size:
            for frame in self._socket.recv_multipart(copy=False):
                self._flat[done : done + len(frame)] = np.frombuffer(frame.buffer, np.uint8)
                done += len(frame)
        return source.split(self._flat, self._path)


if __name__ == "__main__":
    main(Pusher, Puller)

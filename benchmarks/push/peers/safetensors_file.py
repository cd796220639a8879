"""`save_file` into shared memory, `load_file` in the other process."""

from safetensors.numpy import load_file, save_file

from benchmarks.push import source
from benchmarks.push.peers.pair import Meeting, main

FILE = "weights.safetensors"


class Saver:
    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._tensors = source.read(meeting.path)[1]

    def send(self) -> None:
        save_file(self._tensors, self._meeting.scratch / FILE)
        self._meeting.say()


class Loader:
    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def receive(self) -> source.Tensors:
        self._meeting.said()
        return dict(load_file(self._meeting.scratch / FILE))


if __name__ == "__main__":
    main(Saver, Loader)

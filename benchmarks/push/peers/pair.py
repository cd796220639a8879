"""Two processes that move the source by one peer's means: the sender times passes, the receiver says when it has all.

``python -m benchmarks.push.peers.NAME SOURCE PASSES`` prints {"seconds": [...]}; it fails if other bytes arrived.
A pass ends when the receiver holds every tensor in its own memory and has said so.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.push import source


class Sender(Protocol):
    def send(self) -> None: ...


class Receiver(Protocol):
    def receive(self) -> source.Tensors: ...


class Meeting:
    """What both sides know: the source, a scratch directory in shared memory, two free ports."""

    def __init__(self, path: Path, scratch: Path, ports: list[int], said: Callable[[], Any], say: Callable[[], Any]):
        self.path, self.scratch, self.ports = path, scratch, ports
        self.said, self.say = said, say  # a word from sender to receiver, for means that have none


def main(sender: Callable[[Meeting], Sender], receiver: Callable[[Meeting], Receiver]) -> None:
    module = sys.modules["__main__"].__spec__
    assert module is not None
    path, passes = Path(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) > 3:
        _receive(receiver(Meeting(path, Path(sys.argv[3]), json.loads(sys.argv[4]), sys.stdin.readline, int)), passes)
        return
    with tempfile.TemporaryDirectory(prefix="peer-", dir=path.parent) as scratch:
        ports = _free_ports()
        command = [sys.executable, "-m", module.name, str(path), str(passes), scratch, json.dumps(ports)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            try:

                def say() -> None:
                    assert child.stdin is not None
                    child.stdin.write("go\n")
                    child.stdin.flush()

                _send(sender(Meeting(path, Path(scratch), ports, str, say)), child, path, passes)
            finally:
                child.terminate()


def _send(side: Sender, child: "subprocess.Popen[str]", path: Path, passes: int) -> None:
    assert child.stdout is not None
    seconds = []
    for _ in range(passes):
        _expect(child, "ready")
        started = time.perf_counter()
        side.send()
        _expect(child, "done")
        seconds.append(time.perf_counter() - started)
    if int(child.stdout.readline()) != source.checksum(source.read(path)[1]):
        raise SystemExit("the receiver holds other bytes than were sent")
    print(json.dumps({"seconds": seconds}))


def _receive(side: Receiver, passes: int) -> None:
    held: source.Tensors = {}
    for _ in range(passes):
        held.clear()
        print("ready", flush=True)
        held = side.receive()
        print("done", flush=True)
    print(source.checksum(held), flush=True)


def _expect(child: "subprocess.Popen[str]", word: str) -> None:
    assert child.stdout is not None
    while (line := child.stdout.readline()).strip() != word:  # libraries talk on stdout, too
        if not line:
            raise SystemExit(f"the receiver ended before it was {word}")


def _free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for each in (one, two, three):
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in (one, two, three)]

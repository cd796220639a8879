"""A real store process, and what the API would ask it."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.faults.small_model import LAYOUT
from tests.faults.waiting import until
from weight_manager import messages
from weight_manager.arena import ArenaReader
from weight_manager.layout import region_digests, version_digest

STARTS_S = 45.0
"""A process answers only once it has loaded its modules: a second alone, and many beside whatever else runs."""


class Store:
    """`python -m weight_manager` and what the API would ask it."""

    def __init__(self, run_dir: Path, model: Path, arena_dir: Path, **config: Any) -> None:
        self.run_dir, self.arena_dir = run_dir, arena_dir
        run_dir.mkdir(exist_ok=True)
        arena_dir.mkdir(exist_ok=True)
        part = {"name": "t", "run_dir": str(run_dir), "model": str(model), "arena_dir": str(arena_dir)}
        part |= {"push_endpoint": f"ipc://{run_dir}/push.sock", "lease_s": 1.0, "flip_s": 1.0, "rollback_s": 0.5}
        self.config_file = run_dir / "config.json"
        self.config_file.write_text(json.dumps({"store": part | config}))
        self.context = zmq.Context()
        self.api = self.context.socket(zmq.DEALER)
        self.api.set(zmq.LINGER, 0)
        self.start()

    def start(self) -> None:
        self.log = (self.run_dir / "log").open("ab")
        command = [sys.executable, "-m", "weight_manager", "--config", str(self.config_file)]
        self.process, self.begun = subprocess.Popen(command, stderr=self.log), time.monotonic()
        self.api.connect(f"ipc://{self.run_dir}/store.sock")

    @property
    def endpoint(self) -> str:
        return (self.run_dir / "push_endpoint").read_text().strip()

    def ask(self, message: Any, seconds: float = 10.0) -> Any:
        self.api.send(messages.encode(message))
        end = max(time.monotonic() + seconds, self.begun + STARTS_S)
        while self.api.poll(max(0, int((end - time.monotonic()) * 1000))):
            reply = messages.decode_for_api(self.api.recv())
            if getattr(reply, "call", None) == message.call:
                return reply
        raise AssertionError(f"no answer from the store:\n{(self.run_dir / 'log').read_text()[-3000:]}")

    def status(self) -> messages.Status:
        return self.ask(messages.GetStatus(os.urandom(4).hex()))

    def serving(self) -> tuple[int | None, str]:
        """(live version, digest of the bytes in its slot, read here and now)."""
        live = self.status().live
        if live is None:
            return None, ""
        (path,) = (path for path in self.arena_dir.glob("*.arena") if "-adapters-" not in path.name)
        with ArenaReader(path) as reader:
            return live.version, version_digest(LAYOUT, region_digests(LAYOUT, reader.slot(live.slot)))

    def wait_live(self) -> "Store":
        until(lambda: self.status().live)
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(10)
        self.log.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.end()
        self.log.close()
        self.api.close()
        self.context.term()


@contextmanager
def started_as(program: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stores that are started meanwhile are this program, which changes something of it and runs its `main`."""
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        assert command[1:3] == ["-m", "weight_manager"]
        return popen([sys.executable, "-c", textwrap.dedent(program), *command[3:]], **options)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", start)
        yield


def restart_as(store: Store, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the store and start it again as this program."""
    store.end(signal.SIGKILL)
    with started_as(program, monkeypatch):
        store.start()
        store.wait_live()

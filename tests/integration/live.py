"""A real service as a child process: `paddle-rollout serve` on free ports, and the proof that it left nothing."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from rollout_client.http import RolloutClient
from rollout_client.publisher import WeightPublisher

READY_S = 40.0
STOP_S = 25.0
GONE_S = 5.0
SHM = Path("/dev/shm")


class LiveService:
    """`start`, use `url` and `push_endpoint`, then `stop` and `assert_nothing_left`."""

    ready_within_s = READY_S

    def __init__(self, model: Path, *args: str, env: dict[str, str] | None = None):
        """args: of `serve`. env: its environment, ours if there is none."""
        self.name = f"test-{uuid.uuid4().hex[:10]}"
        self.scratch = Path(tempfile.mkdtemp(prefix="pr-"))  # short: socket paths end at 107 bytes
        self.run_dir = self.scratch / "run"
        self.log = self.scratch / "log"
        self.url = self.push_endpoint = ""
        self.ready_s = self.ready_wait_s = 0.0
        self._seen: set[int] = set()
        self._env = env
        self._command = [
            *(str(Path(sys.executable).with_name("paddle-rollout")), "serve", str(model)),
            *("--name", self.name, "--run-dir", str(self.run_dir)),
            *("--port", "0", "--push-endpoint", "tcp://127.0.0.1:*", *args),
        ]

    def start(self) -> "LiveService":
        """Returns once /ready says so."""
        started = time.monotonic()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._env,
                preexec_fn=_ends_with_the_tests,  # noqa: PLW1509  one prctl, nothing that could deadlock
            )
        while time.monotonic() < started + self.ready_within_s:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.tail()}"
            with contextlib.suppress(OSError, httpx.TransportError):
                self.url = (self.run_dir / "http_url").read_text().strip()
                self.push_endpoint = (self.run_dir / "push_endpoint").read_text().strip()
                if httpx.get(f"{self.url}/ready", timeout=30.0).is_success:
                    self.ready_s = time.monotonic() - started
                    self.ready_wait_s = max(map(waited_s, self.processes()))
                    return self
            time.sleep(0.02)
        raise AssertionError(f"not ready after {self.ready_within_s} s:\n{self.tail()}")

    def wait_for_all(self) -> None:
        """Until every replica serves; `start` returns with the first that does, as /ready does."""
        until = time.monotonic() + self.ready_within_s
        while not all(replica["ready"] for replica in httpx.get(f"{self.url}/ready", timeout=30.0).json()["replicas"]):
            assert time.monotonic() < until, f"not all ready after {self.ready_within_s} s:\n{self.tail()}"
            time.sleep(0.02)

    def client(self) -> RolloutClient:
        """A blocking HTTP client."""
        return RolloutClient(self.url)

    def publisher(self, run_id: str, endpoint: str = "", transport: str = "auto") -> WeightPublisher:
        """A trainer's side."""
        return WeightPublisher(endpoint or self.push_endpoint, run_id=run_id, transport=transport, progress=False)

    def processes(self) -> list[int]:
        """The supervisor and everything below it, now."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            todo.extend(children.get(pid, []))
        self._seen.update(found)
        return found

    def rank_zeros(self) -> list[int]:
        """The process that decides for each replica."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in self.processes()}
        return [pid for pid, words in commands.items() if b"worker" in words and words[-3:-1] == [b"--rank", b"0"]]

    def shared_memory(self) -> list[str]:
        """Its files in /dev/shm."""
        return [path.name for path in SHM.iterdir() if self.name in path.name]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to the supervisor; its exit status."""
        if self.process.poll() is None:
            self.processes()
            self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def assert_nothing_left(self) -> None:
        """No process, no shared memory, no socket file, no port, soon after the supervisor ended."""
        deadline = time.monotonic() + GONE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left behind: {left}\n{self.tail()}"

    def close(self) -> None:
        """End whatever still runs, whatever a test did to it, and remove what it would have removed."""
        if self.process.poll() is None:
            self.processes()
            self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + GONE_S
        while any(map(self._is_ours, self._seen)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in filter(self._is_ours, self._seen):
            os.kill(pid, signal.SIGKILL)
        for name in self.shared_memory():
            (SHM / name).unlink()
        shutil.rmtree(self.scratch)

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _left(self) -> list[str]:
        left = [f"process {pid}" for pid in self._seen if self._is_ours(pid)]
        left += [f"/dev/shm/{name}" for name in self.shared_memory()]
        if self.process.returncode != -signal.SIGKILL:  # then the next start removes them
            left += [str(path) for path in self.run_dir.glob("*.sock")]
        for url in (self.url, self.push_endpoint):
            with socket.socket() as probe:
                if url and probe.connect_ex(("127.0.0.1", urlsplit(url).port)) == 0:
                    left.append(f"port of {url}")
        return left

    def _is_ours(self, pid: int) -> bool:
        """It runs, and it is not another process that got the number: ours carry the run directory or the name."""
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            return False
        return str(self.run_dir) in command or self.name in command


def _ends_with_the_tests() -> None:
    """A test run that is killed takes its services along."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def waited_s(pid: int) -> float:
    """How long a process was ready to run while others ran."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9

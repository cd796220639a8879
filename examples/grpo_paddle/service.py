"""Start `paddle-rollout serve` as a child, and stop it whatever happens to the trainer."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx

from examples.grpo_paddle.access import Access

READY_S = 60.0
STOP_S = 20.0
SERVE = "from api.cli import main; main()"
"""What the command `paddle-rollout` runs, also where only the packages are installed and no scripts."""


class Service:
    """A context manager that gives access to the service once it is ready.

    It shares the trainer's terminal and so its Ctrl-C; all it needs besides is to be waited for.
    """

    def __init__(self, model: Path, replicas: int, out: Path, *options: str):
        """model: checkpoint directory. out: where service.log goes. options: more of `paddle-rollout serve`."""
        self._scratch = tempfile.TemporaryDirectory(prefix="grpo-demo-")  # sockets need a short path
        self._run_dir = Path(self._scratch.name) / "run"
        self._log = out / "service.log"
        self._args = [
            *(sys.executable, "-c", SERVE, "serve", str(model), "--replicas", str(replicas)),
            *("--name", f"grpo-demo-{os.getpid()}", "--run-dir", str(self._run_dir)),
            *("--port", "0", "--push-endpoint", "tcp://127.0.0.1:*", *options),
        ]

    def __enter__(self) -> Access:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._args, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            return self._wait_until_ready(time.monotonic() + READY_S)
        except BaseException:
            self._stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_until_ready(self, deadline: float) -> Access:
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the service ended with status {self._process.returncode}; see {self._log}")
            try:
                url = (self._run_dir / "http_url").read_text().strip()
                push_endpoint = (self._run_dir / "push_endpoint").read_text().strip()
                if httpx.get(f"{url}/ready", timeout=2.0, trust_env=False).is_success:  # no proxy reaches this host
                    return Access(url, push_endpoint)
            except (OSError, httpx.TransportError):
                pass
            time.sleep(0.05)
        raise RuntimeError(f"the service was not ready after {READY_S:.0f} s; see {self._log}")

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._scratch.cleanup()

"""A service that starts without weights: the first push is its first version."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from benchmarks.settling import cache_filled

SERVE = "from api.cli import main; main()"
START_S, STOP_S, SETTLE_S = 300.0, 60.0, 2.0
SMALL_KV = ("--set", "worker.max_model_len=512", "--set", "worker.max_batch=2")
"""For pushes beside which next to nothing is generated: room for the weights."""


class EmptyService:
    """A context manager; inside it the store takes pushes. `wait_ready` waits for the replicas."""

    def __init__(self, model: dict[str, Any] | Path, replicas: int, log: Path, *options: str) -> None:
        """model: what its config.json says, or a directory that has one. options: more of `paddle-rollout serve`."""
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-gpu-")
        root = Path(self._scratch.name)
        if isinstance(model, Path):
            directory = model
        else:
            directory = root / "model"
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps(model))
        self.run_dir = root / "run"
        self._log = log
        self._replicas = replicas
        self._args = [
            *(sys.executable, "-c", SERVE, "serve", str(directory), "--replicas", str(replicas)),
            *("--dtype", "bfloat16", "--name", f"bench-gpu-{os.getpid()}", "--run-dir", str(self.run_dir)),
            *("--port", "0", "--push-endpoint", "tcp://127.0.0.1:*", "--set", "store.load_weights=false", *options),
        ]
        self.url = self.push_endpoint = ""

    def __enter__(self) -> "EmptyService":
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._args, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            self._until(self._has_endpoints, "its endpoints")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        """Of the supervisor, the parent of all others."""
        return self._process.pid

    def loop_ms(self) -> float:
        """Milliseconds of processor time that the store's loop has taken so far."""
        thread = f"/proc/{self._store_pid}/task/{self._store_pid}/schedstat"
        return int(Path(thread).read_text().split()[0]) / 1e6

    @cached_property
    def _store_pid(self) -> int:
        config = os.fsencode(self.run_dir / "config.json")
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if {b"weight_manager", config} <= set((process / "cmdline").read_bytes().split(b"\0")):
                    return int(process.name)
        raise RuntimeError(f"no store runs in {self.run_dir}")

    def wait_ready(self) -> None:
        """Until every replica serves, and has nothing left to do for its start. `/ready` is content with one."""
        self._until(lambda: self.metric("rollout_replica_ready") == self._replicas, "ready replicas")
        self._until(lambda: cache_filled(self._log), "filled KV caches")
        time.sleep(SETTLE_S)

    def metric(self, name: str) -> float:
        """Of all replicas together."""
        lines = httpx.get(f"{self.url}/metrics", timeout=5.0).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def wait_settled(self) -> None:
        """Until the store's arena is in huge pages, which takes seconds after a start; at once where there are none."""
        self._until(lambda: "arena in huge pages" in self._log.read_text(), "a settled arena")

    def _has_endpoints(self) -> bool:
        self.url = (self.run_dir / "http_url").read_text().strip()
        self.push_endpoint = (self.run_dir / "push_endpoint").read_text().strip()
        return bool(self.url and self.push_endpoint)

    def _until(self, true: Any, what: str) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the service ended with {self._process.returncode}:\n{self._tail()}")
            try:
                if true():
                    return
            except (OSError, httpx.TransportError):
                pass
            time.sleep(0.1)
        raise RuntimeError(f"the service has not got {what} after {START_S:.0f} s:\n{self._tail()}")

    def _tail(self) -> str:
        return self._log.read_text()[-4000:]

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._scratch.cleanup()

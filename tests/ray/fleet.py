"""A service whose replicas are on a Ray cluster."""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from api.cli.supervisor import ask_fleet
from fleet_ray.messages import FleetState, GetFleet
from rollout_client.publisher import WeightPublisher
from tests.integration.live import LiveService

TOKEN = "a token of the whole fleet"
READY_S, SAID_S = 180.0, 30.0
"""Ray starts a process for each actor, which imports it first: seconds each, of a machine that has time."""


class RayService(LiveService):
    """`serve --ray`; trainers need TOKEN."""

    ready_within_s = READY_S

    def __init__(self, model: Path, address: str, *args: str) -> None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            relay = f"tcp://0.0.0.0:{probe.getsockname()[1]}"
        super().__init__(model, "--ray", "--address", address, "--set", f"store.relay_endpoint={relay}", *args)
        token = self.scratch / "token"
        token.write_text(TOKEN)
        self._command += ["--push-token-file", str(token)]
        self.dead_nodes: list[str] = []

    def publisher(self, run_id: str, endpoint: str = "", transport: str = "auto") -> WeightPublisher:
        return WeightPublisher(
            endpoint or self.push_endpoint, run_id=run_id, token=TOKEN, transport=transport, progress=False
        )

    def fleet(self) -> FleetState:
        return ask_fleet(self.run_dir, GetFleet, timeout_s=30.0)

    def nodes(self) -> dict[int, str]:
        """Replica -> node."""
        return {member.replica: member.node for member in self.fleet().members}

    def ready(self) -> dict[int, int]:
        """Replicas that are ready -> the version they serve."""
        said = httpx.get(f"{self.url}/ready", timeout=30.0).json()["replicas"]
        return {r["replica"]: r["version"] for r in said if r["ready"]}

    def wait_ready(self, *replicas: int, version: int | None = None, seconds: float = READY_S) -> None:
        """These and no others are ready, at this version."""

        def as_wished() -> bool:
            ready = self.ready()
            return sorted(ready) == sorted(replicas) and (version is None or set(ready.values()) == {version})

        until(as_wished, seconds, lambda: f"{self.ready()}, {self.fleet()}\n{self.tail(60)}")

    def shared_memory(self) -> list[str]:
        names = super().shared_memory()
        return [name for name in names if not any(node[:8] in name for node in self.dead_nodes)]

    def close(self) -> None:
        self.dead_nodes.clear()
        super().close()
        for path in Path("/tmp").glob(f"paddle-rollout-ray-{self.name}-*"):
            shutil.rmtree(path)

    def left_on_nodes(self) -> list[str]:
        """Processes, files and shared memory of nodes' stores and replicas; only processes where a node was killed."""
        run_dirs: list[Path] = list(Path("/tmp").glob(f"paddle-rollout-ray-{self.name}-*"))
        run_dirs = [path for path in run_dirs if os.listdir(path) != ["crashes"]]
        left = [str(path) for path in run_dirs if not any(path.name.endswith(node[:8]) for node in self.dead_nodes)]
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if f"paddle-rollout-ray-{self.name}-" in command:
                left.append(command)
        return left


def until(condition: Callable[[], Any], seconds: float, explain: Callable[[], str] = lambda: "") -> None:
    """Return once it holds. Standard error says every half minute that it does not yet, and what `explain` says."""
    began = said = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now < began + seconds, f"not within {seconds} s\n{explain()}"
        if now > said + SAID_S:
            said = now
            print(f"waiting for {now - began:.0f} of {seconds:g} s: {explain()}", file=sys.stderr, flush=True)
        time.sleep(0.05)

"""Docker and compose as the tests use them: commands, and HTTP to what they started."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
FILES = ("-f", "deploy/compose.yaml", "-f", "deploy/compose.demo.yaml")


def run(*command: str, timeout_s: float = 60.0, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
    """Both outputs together in `stdout`, whatever the exit status."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def docker(*args: str, timeout_s: float = 60.0) -> str:
    """Its output; a failure fails the test with it."""
    done = run("docker", *args, timeout_s=timeout_s)
    assert done.returncode == 0, f"docker {' '.join(args)}\n{done.stdout}"
    return done.stdout.strip()


def eventually(check: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true answer; errors of a service that is not there yet count as false."""
    deadline = time.monotonic() + timeout_s
    last: Any = None
    while time.monotonic() < deadline:
        try:
            if last := check():
                return last
        except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
            last = error
        time.sleep(0.3)
    raise AssertionError(f"{what}: not within {timeout_s:.0f} s; last: {last!r}")


class Stack:
    """The compose project of deploy/, with the demo's files over it."""

    def __init__(self, secrets: Path):
        self.env = {
            "COMPOSE_PROJECT_NAME": "demo",
            "SECRETS_DIR": str(secrets),
            "SHM_SIZE": "256m",
            "STEPS": os.environ.get("STEPS", "250"),
        }
        self.token = (secrets / "data_token").read_text()

    def compose(self, *args: str, timeout_s: float = 60.0) -> str:
        """Its output; a failure fails the test with it."""
        done = run(
            "docker-compose",
            *FILES,
            "--profile",
            "cpu",
            "--profile",
            "observability",
            *args,
            timeout_s=timeout_s,
            env=self.env,
        )
        assert done.returncode == 0, f"compose {' '.join(args)}\n{done.stdout[-4000:]}"
        return done.stdout

    def container(self, service: str) -> str:
        """Its name; compose v1 and v2 differ in it."""
        names = docker("ps", "-a", "--filter", f"label=com.docker.compose.service={service}", "--format", "{{.Names}}")
        return names.split()[0]

    def state(self, service: str) -> dict[str, Any]:
        """What docker says of the container: Status, ExitCode, Pid, Health..."""
        return json.loads(docker("inspect", "-f", "{{json .State}}", self.container(service)))

    def weights(self) -> dict[str, Any]:
        """/v1/rollout/weights, with the token."""
        headers = {"Authorization": f"Bearer {self.token}"}
        reply = httpx.get("http://127.0.0.1:8000/v1/rollout/weights", headers=headers, timeout=5.0)
        return reply.raise_for_status().json()

    def ready(self) -> dict[str, Any]:
        """/ready once every replica serves."""
        reply = httpx.get("http://127.0.0.1:8000/ready", timeout=5.0).json()
        assert all(replica["ready"] for replica in reply["replicas"]), reply
        return reply

    def result(self, name: str) -> str:
        """A file that the trainer left."""
        return self._read("results", name)

    def snapshot_version(self) -> int:
        """Of the file that a restarted service goes on from."""
        page = self._read("state", "snapshot.weights", "4096")
        return json.loads(page)["live"]["version"]

    def series(self, query: str) -> list[list[float]]:
        """Every series of a metric, as values in the order of time."""
        now = time.time()
        reply = httpx.get(
            "http://127.0.0.1:9090/api/v1/query_range",
            params={"query": query, "start": now - 1800, "end": now, "step": "5"},
        )
        return [[float(value) for _, value in one["values"]] for one in reply.json()["data"]["result"]]

    def _read(self, volume: str, name: str, count: str = "1000000") -> str:
        where = f"{self.env['COMPOSE_PROJECT_NAME']}_{volume}:/from:ro"
        image = os.environ["TRAINER_IMAGE"]
        mount = ("--network", "none", "-v", where, "--entrypoint", "head", image)
        return docker("run", "--rm", *mount, "-c", count, f"/from/{name}")

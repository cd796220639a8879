"""Who generates: the service over HTTP, and peers that answer JSON lines. Only one runs at a time.

A contender out of turn is stopped (SIGSTOP), so that threads that spin while idle take nothing from the others.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from rollout_client.http import AsyncRolloutClient

START_S, STOP_S = 600.0, 60.0
SERVE = "from api.cli import main; main()"
PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Job:
    """Prompts of token ids (equally long), samples of each, new tokens of every sample."""

    prompts: list[list[int]]
    n: int
    max_tokens: int


class Contender(Protocol):
    """Something that generates."""

    name: str
    ready_s: float

    def run(self, job: Job) -> float:
        """Tokens per second."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class Service:
    """`paddle-rollout serve` with one replica on all cores; every prompt is a request of its own."""

    def __init__(self, name: str, model: Path, dtype: str, log: Path) -> None:
        self.name = name
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-generate-")
        run_dir = Path(self._scratch.name) / "run"
        began = time.perf_counter()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", SERVE, "serve", str(model), "--dtype", dtype, "--port", "0"),
                    *("--push-endpoint", "tcp://127.0.0.1:*", "--name", f"bench-{os.getpid()}-{name}"),
                    *("--run-dir", str(run_dir)),
                ],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )
        self._url = _until_ready(run_dir, self._process)
        self.ready_s = time.perf_counter() - began

    def run(self, job: Job) -> float:
        """Tokens per second, HTTP included."""
        return asyncio.run(self._run(job))

    def close(self) -> None:
        """SIGTERM, as an operator would."""
        self._process.terminate()
        self._process.wait(STOP_S)
        self._scratch.cleanup()

    async def _run(self, job: Job) -> float:
        async with AsyncRolloutClient(self._url) as client:
            began = time.perf_counter()
            results = await asyncio.gather(
                *(
                    client.generate(prompt_ids=ids, n=job.n, max_tokens=job.max_tokens, ignore_eos=True)
                    for ids in job.prompts
                )
            )
            seconds = time.perf_counter() - began
        tokens = sum(len(output.token_ids) for result in results for output in result.outputs)
        expected = len(job.prompts) * job.n * job.max_tokens
        if tokens != expected:
            raise RuntimeError(f"{self.name} made {tokens} tokens of {expected}")
        return tokens / seconds


class Peer:
    """A script of `peers/` in an environment of its own."""

    def __init__(self, name: str, python: Path, script: str, model: Path, dtype: str, log: Path) -> None:
        self.name = name
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(PEERS / script), "--model", str(model), "--dtype", dtype],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.ready_s = self._line()["ready_seconds"]
        self._signal(signal.SIGSTOP)

    def run(self, job: Job) -> float:
        """Tokens per second of one batch call."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        line = {"prompts": job.prompts, "n": job.n, "max_tokens": job.max_tokens}
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        answer = self._line()
        self._signal(signal.SIGSTOP)
        expected = len(job.prompts) * job.n * job.max_tokens
        if answer["tokens"] != expected:
            raise RuntimeError(f"{self.name} made {answer['tokens']} tokens of {expected}")
        return float(answer["tokens"] / answer["seconds"])

    def close(self) -> None:
        """End of input ends it."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(STOP_S)

    def _line(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended; its log says why")
        answer: dict[str, float] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)  # its own session: nobody else is in that group


def _until_ready(run_dir: Path, process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the service left with {process.returncode}; its log says why")
        try:
            url = (run_dir / "http_url").read_text().strip()
            if url and httpx.get(f"{url}/ready", timeout=5.0).is_success:
                return url
        except (OSError, httpx.TransportError):
            pass
        time.sleep(0.05)
    process.kill()
    raise TimeoutError(f"the service was not ready in {START_S:.0f} s")

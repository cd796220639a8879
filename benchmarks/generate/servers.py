"""Servers that generate over HTTP: ours and vLLM's, with the same client, one request a prompt."""

import asyncio
import itertools
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.generate.contenders import PEERS, Job, Stoppable
from benchmarks.settling import wait_until_filled

START_S = 300.0
SERVE = "from api.cli import main; main()"
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


async def answers(url: str, bodies: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """All requests at once: their answers, and the seconds from the first byte sent to the last one back."""
    async with httpx.AsyncClient(limits=LIMITS, timeout=600.0) as client:
        began = time.perf_counter()
        replies = await asyncio.gather(*(client.post(url, json=body) for body in bodies))
        seconds = time.perf_counter() - began
    for reply in replies:
        reply.raise_for_status()
    return [reply.json() for reply in replies], seconds


class Service:
    """`paddle-rollout serve` with one replica on all cores."""

    def __init__(self, name: str, model: Path, dtype: str, log: Path, *words: str) -> None:
        self.name = name
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-generate-")
        run_dir = Path(self._scratch.name) / "run"
        command = [
            *(sys.executable, "-c", SERVE, "serve", str(model), "--dtype", dtype, "--port", "0"),
            *("--push-endpoint", "tcp://127.0.0.1:*", "--name", f"bench-{os.getpid()}-{name}"),
            *("--run-dir", str(run_dir), *words),
        ]
        began = time.perf_counter()
        self._child, self._log = Stoppable(command, log), log
        self.url = self._ready(run_dir)
        self.ready_s = time.perf_counter() - began
        self.push_endpoint = (run_dir / "push_endpoint").read_text().strip()

    def settle(self) -> "Service":
        """Until nothing is left to do of its start."""
        wait_until_filled(self._log)
        return self

    def run(self, job: Job, adapters: Sequence[str] = ()) -> float:
        """Tokens per second, HTTP included, logprobs in every answer. adapters: names for the prompts, in turn."""
        bodies: list[dict[str, Any]] = [
            {"prompt_ids": ids, "n": job.n, "max_tokens": job.max_tokens, "ignore_eos": True} for ids in job.prompts
        ]
        for body, adapter in zip(bodies, itertools.cycle(adapters), strict=False):
            body["adapter"] = adapter
        found, seconds = asyncio.run(answers(f"{self.url}/v1/rollout/generate", bodies))
        outputs = [output for reply in found for output in reply["outputs"]]
        tokens = sum(len(output["token_ids"]) for output in outputs)
        if tokens != job.tokens or tokens != sum(len(output["logprobs"]) for output in outputs):
            raise RuntimeError(f"{self.name} made {tokens} tokens of {job.tokens}")
        return tokens / seconds

    def close(self) -> None:
        """SIGTERM, as an operator would."""
        self._child.process.terminate()
        self._child.process.wait(60)
        self._scratch.cleanup()

    def _ready(self, run_dir: Path) -> str:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._child.process.poll() is not None:
                raise RuntimeError(f"{self.name} left with {self._child.process.returncode}; its log says why")
            try:
                url = (run_dir / "http_url").read_text().strip()
                if url and httpx.get(f"{url}/ready", timeout=5.0).is_success:
                    return url
            except (OSError, httpx.TransportError):
                pass
            time.sleep(0.01)
        self._child.end()
        raise TimeoutError(f"{self.name} was not ready in {START_S:.0f} s")


class VllmServer:
    """`vllm serve` on vLLM's CPU build with its token-in-token-out route, which spares it all text."""

    def __init__(self, python: Path, model: Path, dtype: str, log: Path, max_len: int = 512, *words: str) -> None:
        """max_len: tokens of a prompt and its output. words: further ones of its command line."""
        self.name = "vllm"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = [
            *(str(python), str(PEERS / "vllm_serve.py"), "serve", str(model), "--dtype", dtype, "--tokens-only"),
            *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_len), "--max-num-seqs", "64"),
            *("--enforce-eager", "--skip-tokenizer-init", "--disable-log-stats"),
            *words,
        ]
        cores = sorted(os.sched_getaffinity(0))
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        began = time.perf_counter()
        self._child = Stoppable(command, log, env=environment | dict(os.environ))
        self._wait()
        self.ready_s = time.perf_counter() - began
        self._child.pause()

    def run(self, job: Job, adapters: Sequence[str] = ()) -> float:
        """Tokens per second, HTTP included, logprobs in every answer. adapters: names for the prompts, in turn."""
        sampling = {
            "n": job.n,
            "temperature": 1.0,
            "max_tokens": job.max_tokens,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 0,
        }
        bodies: list[dict[str, Any]] = [{"token_ids": ids, "sampling_params": sampling} for ids in job.prompts]
        for body, adapter in zip(bodies, itertools.cycle(adapters), strict=False):
            body["model"] = adapter
        self._child.go_on()
        found, seconds = asyncio.run(answers(f"{self._url}/inference/v1/generate", bodies))
        self._child.pause()
        choices = [choice for reply in found for choice in reply["choices"]]
        tokens = sum(len(choice["token_ids"]) for choice in choices)
        if tokens != job.tokens or not all(choice["logprobs"] for choice in choices):
            raise RuntimeError(f"{self.name} made {tokens} tokens of {job.tokens}, or no logprobs")
        return tokens / seconds

    def close(self) -> None:
        """End the session."""
        self._child.end()

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._child.process.poll() is not None:
                raise RuntimeError(f"{self.name} left with {self._child.process.returncode}; its log says why")
            try:
                if httpx.get(f"{self._url}/health", timeout=5.0).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        self._child.end()
        raise TimeoutError(f"{self.name} was not ready in {START_S:.0f} s")

"""Streams to many clients beside vLLM's own API server, around engines that answer at once on both sides.

Both sides have both cores: their API process, their engine's process (ours: rank 0; vLLM's: EngineCore, with its own
scheduler) and the same client, on the route that both have, with a logprob and an id for every token. Only one runs at
a time, the other is stopped (SIGSTOP). What is compared is tokens a second, and the CPU time of each API process.
"""

import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.generate.contenders import Stoppable
from benchmarks.host.client import Load, measured, run
from tests.processor import used

START_S = 300.0
STAND_IN = Path(__file__).parent / "peers" / "vllm_stand_in.py"


class Vllm:
    """`vllm serve` with vllm_stand_in.py."""

    def __init__(self, python: Path, model: Path, most: int, step_s: float, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *(str(python), str(STAND_IN), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", str(most), "--enforce-eager"),
            *("--max-num-batched-tokens", "16384", "--disable-log-stats", "--disable-uvicorn-access-log"),
        ]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment["STAND_IN_STEP_S"] = str(step_s)
        self._child = Stoppable(command, log, env=environment | dict(os.environ))
        self._log = log
        until = time.monotonic() + START_S
        while not self._is_up():
            if self._child.process.poll() is not None or time.monotonic() > until:
                self.close()
                raise RuntimeError(f"vLLM did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)

    def go_on(self) -> None:
        """Its turn."""
        self._child.go_on()

    def pause(self) -> None:
        """Take no processor time."""
        self._child.pause()

    def close(self) -> None:
        """End its session."""
        self._child.end()

    def pids(self) -> dict[str, list[int]]:
        """The API server, and the process of the engine."""
        main = self._child.process.pid
        below = [int(pid) for pid in Path(f"/proc/{main}/task/{main}/children").read_text().split()]
        engines = [pid for pid in below if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if not engines:
            raise RuntimeError("vLLM's engine is not where it was: its process has another name")
        return {"api": [main], "engine": engines}

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0).is_success
        except httpx.TransportError:
            return False


def beside_vllm(
    ours: str, pids: dict[str, list[int]], python: Path, model: Path, load: Load, step_s: float, rounds: int
) -> dict[str, dict[str, float]]:
    """Medians over alternated rounds: of each side, and of the ratios within rounds. ours: the service's URL; pids: its
    processes. model: any that vLLM can load.
    """
    seen: dict[str, list[dict[str, float]]] = {"ours": [], "vllm": []}
    with tempfile.TemporaryDirectory() as scratch:
        peer = Vllm(python, model, load.sequences, step_s, Path(scratch) / "vllm.log")
        try:
            sides = {"ours": (ours, pids), "vllm": (peer.url, peer.pids())}
            for url, _ in sides.values():
                run(url, Load(8, 64, streamed=True, openai=True))
            for number in range(rounds):
                for name, (url, processes) in sides.items():
                    peer.pause() if name == "ours" else peer.go_on()
                    seen[name].append(_measured(url, processes, load))
                print(f"round {number + 1} of {rounds}: {[s[-1] for s in seen.values()]}", file=sys.stderr, flush=True)
        finally:
            peer.go_on()
            peer.close()
    medians = {
        name: {what: statistics.median(r[what] for r in some) for what in some[0]} for name, some in seen.items()
    }
    pairs = list(zip(seen["ours"], seen["vllm"], strict=True))
    medians["ratios"] = {
        "tokens_per_s_over_vllm": statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs),
        "vllm_api_us_over_ours": statistics.median(b["api_us"] / a["api_us"] for a, b in pairs),
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
    }
    return {name: {what: round(value, 2) for what, value in some.items()} for name, some in medians.items()}


def _measured(url: str, processes: dict[str, list[int]], load: Load) -> dict[str, float]:
    before = {name: used(pids).seconds for name, pids in processes.items()}
    seconds, pieces = measured(url, load)
    cost = {f"{name}_us": (used(pids).seconds - before[name]) / load.total * 1e6 for name, pids in processes.items()}
    return {"tokens_per_s": load.total / seconds, "tokens_per_event": load.total / pieces} | cost

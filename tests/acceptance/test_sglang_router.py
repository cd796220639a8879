"""sglang-router in front of two services."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.acceptance.tools import client_program, takes_minutes
from tests.integration.conftest import running
from tests.integration.live import LiveService
from worker.service import free_ports

START_S = 30.0
pytestmark = [takes_minutes, pytest.mark.timeout(180)]


@pytest.fixture
def first(qwen2: Path) -> Iterator[LiveService]:
    yield from running(qwen2, "--served-model-name", "tiny")


@pytest.fixture
def second(qwen2: Path) -> Iterator[LiveService]:
    yield from running(qwen2, "--served-model-name", "tiny")


@pytest.fixture
def router(first: LiveService, second: LiveService, tmp_path: Path) -> Iterator[httpx.Client]:
    """The router's client, once it has found both services."""
    python = client_program("sglang-router", "python")
    port, metrics = free_ports(2)
    log = tmp_path / "router.log"
    command = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", first.url, second.url, "--policy", "round_robin"]
    command += ["--prometheus-port", str(metrics), "--worker-startup-check-interval", "1"]
    command += [
        "--health-check-interval-secs",
        "1",
        "--health-failure-threshold",
        "1",
        "--health-success-threshold",
        "1",
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0)
    try:
        deadline = time.monotonic() + START_S
        while _healthy(client) < 2:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield client
    finally:
        client.close()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _healthy(client: httpx.Client) -> int:
    with contextlib.suppress(httpx.TransportError, ValueError, KeyError):
        workers = client.get("/workers").json()["workers"]
        return sum(1 for worker in workers if worker["is_healthy"])
    return 0


def _generated(service: LiveService) -> float:
    lines = httpx.get(f"{service.url}/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("rollout_tokens_total") and "generation" in line
    )


def test_router_finds_both_and_survives_one(router: httpx.Client, first: LiveService, second: LiveService) -> None:
    native = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    openai = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "ignore_eos": True}
    for _ in range(4):
        answer = router.post("/generate", json=native)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["output_ids"]) == 4
        answer = router.post("/v1/completions", json=openai)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
    assert router.get("/get_model_info").json()["is_generation"] is True
    deadline = time.monotonic() + START_S
    while min(used := [_generated(first), _generated(second)]) == 0:  # replicas report every second
        assert time.monotonic() < deadline, used
        time.sleep(0.2)
    assert first.stop() == 0
    deadline = time.monotonic() + START_S
    while _healthy(router) != 1:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for _ in range(6):
        assert router.post("/generate", json=native).status_code == 200
        assert router.post("/v1/completions", json=openai).status_code == 200

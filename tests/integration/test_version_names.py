"""What a trainer calls a version survives the API process, and the service."""

import contextlib
import os
import signal
import time
from pathlib import Path

import httpx

from tests.integration.live import READY_S, LiveService
from tests.reference.checkpoint import Checkpoint


def api_process(live: LiveService) -> int:
    for pid in live.processes():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"api" in words:
            return pid
    raise AssertionError("no API process")


def until_another(live: LiveService, old: int) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(AssertionError, OSError, httpx.TransportError):
            if api_process(live) != old and httpx.get(f"{live.url}/ready", timeout=30.0).is_success:
                return
        time.sleep(0.05)
    raise AssertionError(f"no new API:\n{live.tail()}")


def test_a_name_survives_the_api(service: LiveService, tiny: Checkpoint) -> None:
    with service.publisher("names") as publisher:
        publisher.push(tiny.weights, version=1)
    reply = httpx.post(f"{service.url}/update_weight_version", json={"new_version": "step-1"}, timeout=10)
    assert reply.json()["new_version"] == "step-1"
    old = api_process(service)
    os.kill(old, signal.SIGKILL)
    until_another(service, old)
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    meta = httpx.post(f"{service.url}/generate", json=body, timeout=30).json()["meta_info"]
    assert meta["weight_version"] == "step-1"
    assert [span["version"] for span in meta["weight_versions"]] == ["step-1"]

"""The four-phase update over HTTP, with the shipped publisher pushing before, beside and after it."""

import threading
import time

import httpx
import pytest

from tests.integration.live import LiveService
from tests.reference.checkpoint import Checkpoint, random_weights


@pytest.mark.parametrize("lead_s", [-0.3, -0.05, 0.0, 0.05, 0.3], ids=lambda s: f"push{s:+g}s")
def test_the_update_is_answered_once_the_push_is_live(service: LiveService, tiny: Checkpoint, lead_s: float) -> None:
    """lead_s: how long before the update the push begins."""
    with service.client() as client:
        live = client.weights().live
    assert live is not None
    version = live.version + 1
    weights = random_weights(tiny.config, version)
    body = {"update_info": {"names": list(weights)}}
    pushed: list[object] = []

    def push() -> None:
        time.sleep(max(0.0, -lead_s))
        with service.publisher("http") as publisher:
            pushed.append(publisher.push(weights, version))

    with httpx.Client(base_url=service.url, timeout=30) as http:
        assert http.post("/start_weight_update").status_code == 200
        trainer = threading.Thread(target=push)
        trainer.start()
        time.sleep(max(0.0, lead_s))
        updated = http.post("/update_weights", json=body)
        assert updated.status_code == 200, updated.text
        assert http.get("/weight_info").json() == {"weight_version": str(version)}
        again = http.post("/update_weights", json=body)
        assert again.status_code == 200, "the epoch has moved since the start"
        assert http.post("/finish_weight_update", json={"weight_version": f"step {version}"}).status_code == 200
        trainer.join(30)
        assert pushed
        assert http.get("/weight_info").json() == {"weight_version": f"step {version}"}

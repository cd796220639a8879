"""An API on every node of a Ray cluster: found, asked, paused through, and there again when it died."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from rollout_client.http import RolloutClient
from tests.ray.fleet import until
from tests.reference.checkpoint import random_weights

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
DATA_TOKEN = "a token of the clients"
HEADERS = {"authorization": f"Bearer {DATA_TOKEN}"}


@pytest.fixture
def service(serve, tmp_path, monkeypatch):
    """Two replicas on the head's node, whose API is the head's, and one on each of two others."""
    monkeypatch.setenv("PADDLE_ROLLOUT_ENGINE", "tests.fake_engine:made")
    token = tmp_path / "data-token"
    token.write_text(DATA_TOKEN)
    made = serve("--replicas", "4", "--data-token-file", str(token))
    made.wait_ready(0, 1, 2, 3)
    return made


def apis(service):
    """Place -> URL."""
    reply = httpx.get(f"{service.url}/v1/rollout/apis", headers=HEADERS)
    return {one["place"]: one["url"] for one in reply.json()["apis"]}


def served(url):
    """Data requests that the API of this URL has answered by itself."""
    text = httpx.get(f"{url}/metrics", headers=HEADERS).text
    lines = [line for line in text.splitlines() if "/v1/rollout/generate" in line and "_total" in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_clients_reach_replicas_of_other_nodes_without_the_head(service, tiny):
    until(lambda: len(apis(service)) == 3, 120, service.tail)
    nodes = {place: url for place, url in apis(service).items() if url != service.url}
    before = served(service.url)
    with service.publisher("run-nodes") as publisher:
        publisher.push(random_weights(tiny.config, 201), 1)
    for url in nodes.values():
        with RolloutClient(url, token=DATA_TOKEN) as client:
            for _ in range(4):
                output = client.generate(prompt_ids=[5, 9], max_tokens=8, min_weight_version=1).outputs[0]
                assert [span.version for span in output.spans] == [1]
    assert served(service.url) == before, "tokens passed the head"
    first, second = nodes.values()
    assert httpx.post(f"{first}/v1/rollout/pause", json={"mode": "keep"}, headers=HEADERS).json()["paused"]
    with pytest.raises(httpx.ReadTimeout):  # held, through the other node
        httpx.post(f"{second}/v1/rollout/generate", json={"prompt_ids": [5]}, headers=HEADERS, timeout=1.0)
    assert httpx.get(f"{second}/v1/rollout/pause", headers=HEADERS).json()["paused"]
    assert not httpx.post(f"{second}/v1/rollout/resume", headers=HEADERS).json()["paused"]
    for url in nodes.values():
        reply = httpx.post(
            f"{url}/v1/rollout/generate", json={"prompt_ids": [5], "max_tokens": 2}, headers=HEADERS, timeout=20
        )
        assert reply.status_code == 200


def test_the_api_of_a_node_that_dies_is_there_again_where_it_was(service):
    until(lambda: len(apis(service)) == 3, 120, service.tail)
    place, url = next((place, url) for place, url in apis(service).items() if url != service.url)
    victim = next(pid for pid in processes_of(service) if place in (Path(f"/proc/{pid}/cmdline").read_text()))
    os.kill(victim, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{victim}").exists(), 10)
    until(lambda: answers(url), 120, service.tail)
    assert apis(service)[place] == url


def processes_of(service):
    """APIs of nodes."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:3] == [b"-m", b"api"] and f"-ray-{service.name}-".encode() in words[-2]:
            yield int(process.name)


def answers(url):
    try:
        reply = httpx.post(
            f"{url}/v1/rollout/generate", json={"prompt_ids": [5], "max_tokens": 2}, headers=HEADERS, timeout=10
        )
    except httpx.TransportError:
        return False
    return reply.status_code == 200

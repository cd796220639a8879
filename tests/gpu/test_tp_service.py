"""The whole service with a replica of two ranks on two GPUs ($TP_RANKS of them): its start, pushes of a torch trainer
on the last card of the host, an adapter's, sleep, and the death of a rank. Skipped without as many devices, torch and
Paddle, whose gloo the ranks use."""

import importlib.util
import json
import os
import signal
import threading
import time

import httpx
import pytest

from benchmarks.gpu import replay
from benchmarks.gpu.service import EmptyService
from rollout_client import RolloutClient, WeightPublisher
from tests.gpu.tp_replica import TP

pytestmark = [pytest.mark.timeout(240)]
BACK_S = 60
PROMPT = [5, 6, 7]


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if importlib.util.find_spec("paddle") is None:
        pytest.skip("needs Paddle")
    if torch.cuda.device_count() < TP:
        pytest.skip(f"needs {TP} devices")
    return torch


@pytest.fixture
def service(torch, tmp_path):
    options = ("--device", "gpu", "--dtype", "float32", "--tp", str(TP), "--set", "worker.num_blocks=512")
    with EmptyService(replay.CONFIG, 1, tmp_path / "service.log", *options) as running:
        yield running
        print((tmp_path / "service.log").read_text()[-3000:], flush=True)


@pytest.fixture
def pids(tmp_path):
    """Of the ranks, as they have told the store last."""

    def read():
        lines = (tmp_path / "service.log").read_text().splitlines()
        return json.loads([line for line in lines if '"replica 0 registered"' in line][-1])["pids"]

    return read


@pytest.fixture
def push(torch, service):
    device = f"cuda:{torch.cuda.device_count() - 1}"
    with WeightPublisher(service.push_endpoint, run_id="tp", transport="cuda_ipc") as publisher:

        def pushed(version):
            tensors = {name: torch.from_numpy(data).to(device) for name, data in replay.weights(version).items()}
            return publisher.push(tensors, version, timeout_s=60)

        yield pushed


@pytest.fixture
def push_adapter(service):
    with WeightPublisher(service.push_endpoint, run_id="tp") as publisher:
        yield lambda version: replay.push_adapter(publisher, "b", version)


@pytest.fixture
def greedy(service):
    with RolloutClient(service.url) as client:

        def asked(max_tokens=40, adapter=""):
            how = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "adapter": adapter}
            (output,) = client.generate(prompt_ids=PROMPT, **how).outputs
            return list(output.token_ids), [span.version for span in output.spans]

        yield asked


def test_it_serves_is_pushed_to_sleeps_and_outlives_a_rank(service, push, push_adapter, greedy, pids):
    assert push(1).filled == 0, "nothing is served yet"
    service.wait_ready()
    first, versions = greedy()
    assert versions == [1]
    assert push(2).filled == TP, "each rank has copied its part from the trainer's GPU"
    second, versions = greedy()
    assert (versions, second == first) == ([2], False)
    push_adapter(1)
    former = greedy(adapter="b")[0]
    push_adapter(2)
    adapted, versions = greedy(adapter="b")
    assert versions == [2]
    assert adapted not in (former, second)
    assert former != second
    for _ in range(3):
        said = httpx.post(f"{service.url}/v1/rollout/memory/release", json={}, timeout=60).raise_for_status().json()
        httpx.post(f"{service.url}/v1/rollout/memory/resume", json={}, timeout=60).raise_for_status()
        assert greedy() == (second, [2])
        assert greedy(adapter="b") == (adapted, [2])
    assert said["released_bytes"] > 0
    for victim in (1, 0):
        under_way = []
        waits = threading.Thread(target=lambda found=under_way: found.append(greedy(200)))
        waits.start()
        time.sleep(0.05)
        before = pids()
        os.kill(before[victim], signal.SIGKILL)
        began = time.monotonic()
        waits.join(BACK_S)
        assert under_way, "what was under way is begun again"
        assert under_way[0][0][: len(second)] == second
        print(f"rank {victim} killed: answered after {time.monotonic() - began:.2f} s", flush=True)
        assert greedy() == (second, [2])
        assert greedy(adapter="b") == (adapted, [2]), "it is held again"
        assert not {*pids()} & {*before}, "all ranks began anew"
    push(3)
    assert greedy()[1] == [3]

"""Replicas on the nodes of a Ray cluster: pushes, deaths, late joiners, more and fewer of them."""

import contextlib
import os
import signal
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from api.cli import app
from rollout_client.http import RolloutClient
from tests.integration.test_replay import Load, check, wait_for
from tests.ray.fleet import until
from tests.reference.checkpoint import random_weights
from tests.reference.llama import Replay

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
PROMPT = [5, 9, 17, 33]


@pytest.fixture
def no_model(monkeypatch):
    """An engine that needs no Paddle: for what is about processes and not about tokens."""
    monkeypatch.setenv("PADDLE_ROLLOUT_ENGINE", "tests.fake_engine:made")


def rank_processes(service):
    """Rank 0 of every replica, on whatever node -> replica."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        ours = any(name in " ".join(words) for name in (service.name, str(service.run_dir)))
        if ours and "worker" in words and "--replica" in words:
            found[int(process.name)] = int(words[words.index("--replica") + 1])
    return found


def actors():
    """Processes of Ray's workers that hold a replica or a store."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        except OSError:
            continue
        if title.startswith(("ray::ReplicaHost", "ray::NodeStore")):
            found[int(process.name)] = title
    return found


def test_a_push_reaches_every_node_and_scaling_loses_nothing(serve, tiny, cluster):
    service = serve("--replicas", "1")
    sets = [random_weights(tiny.config, seed) for seed in (201, 202)]
    service.wait_ready(0)
    with trainer(service, sets) as (publisher, load):
        assert scale(service, 4).exit_code == 0
        service.wait_ready(0, 1, 2, 3, version=0)
        assert len(set(service.nodes().values())) == 3, "not every node has a replica"
        for version in range(1, 6):
            wait_for(load, len(load.answers) + 4)
            publisher.push(sets[version % 2], version)
            service.wait_ready(0, 1, 2, 3, version=version, seconds=20)
        below = httpx.get(f"{service.url}/v1/rollout/weights").json()["relay"]["below"]
        assert len(below) == 2, "the head's own node uses the head's store"
        assert scale(service, 2).exit_code == 0
        service.wait_ready(0, 1, version=5)
        publisher.push(sets[0], 6)
        wait_for(load, len(load.answers) + 4)
    assert not load.failures
    replay = Replay(tiny.config, sets)
    misfits = [check(replay, *answer) for answer in load.answers]
    assert np.mean(misfits) > 0.9
    assert {span.version for _, _, output in load.answers for span in output.spans} >= {0, 2, 4}


@contextlib.contextmanager
def trainer(service, sets):
    """A publisher whose version 0 is live, and load that began after it."""
    with service.publisher(f"run-{uuid.uuid4().hex[:8]}") as publisher:
        publisher.push(sets[0], 0)
        with Load(service.url) as load:
            yield publisher, load


def scale(service, count, wait_s=180):
    return CliRunner().invoke(app, ["scale", str(count), "--run-dir", str(service.run_dir), "--wait-s", str(wait_s)])


@pytest.mark.skipif("RAY_TESTS" not in os.environ, reason="minutes long: make ray-test runs it")
def test_a_killed_node_and_a_late_one(serve, tiny, cluster):
    """The stores form a chain, and the node in its middle dies: whoever was below it joins elsewhere."""
    service = serve("--replicas", "3", "--set", "fleet.fan_out=1")
    service.wait_ready(0, 1, 2)
    (next_below,) = httpx.get(f"{service.url}/v1/rollout/weights").json()["relay"]["below"]
    doomed = next(node for node in service.nodes().values() if node[:8] in next_below)
    sets = [random_weights(tiny.config, seed) for seed in (201, 202)]
    with trainer(service, sets) as (publisher, load):
        wait_for(load, 4)
        pushing = threading.Thread(target=push_until_taken, args=(publisher, sets[1], 1))
        pushing.start()
        cluster.kill(doomed)
        service.dead_nodes.append(doomed)
        pushing.join(400)
        assert not pushing.is_alive()
        until(lambda: doomed not in service.nodes().values(), 120)
        service.wait_ready(0, 1, 2, version=1)  # one of them elsewhere now
        assert scale(service, 4, wait_s=0).exit_code == 0
        late = cluster.add()
        service.wait_ready(0, 1, 2, 3, version=1)
        assert service.nodes()[3] == late
        publisher.push(sets[0], 2)
        service.wait_ready(0, 1, 2, 3, version=2, seconds=20)
        wait_for(load, len(load.answers) + 8)
    check_with_cuts(load, tiny, sets)


def push_until_taken(publisher, weights, version):
    """What a trainer does when a host dies under its push: push again."""
    from rollout_client.errors import PushError

    for _ in range(10):
        try:
            publisher.push(weights, version, timeout_s=40)
        except PushError:
            continue
        return


def check_with_cuts(load, tiny, sets):
    """Answers that ran on a node that died may end early; what they hold is derived all the same."""
    assert not load.failures
    replay = Replay(tiny.config, sets)
    whole = [answer for answer in load.answers if answer[2].finish_reason == "length"]
    assert len(whole) > len(load.answers) / 2
    for answer in whole:
        check(replay, *answer)


@pytest.mark.parametrize("what", ["rank", "ReplicaHost", "NodeStore"])
def test_whatever_dies_on_a_node_comes_back_with_the_live_version(serve, tiny, cluster, no_model, what):
    service = serve("--replicas", "3")
    service.wait_ready(0, 1, 2)
    with service.publisher(f"run-{uuid.uuid4().hex[:8]}") as publisher:
        publisher.push(random_weights(tiny.config, 201), 1)
        service.wait_ready(0, 1, 2, version=1)
        before = rank_processes(service)
        victims = before if what == "rank" else [pid for pid, title in actors().items() if what in title]
        victim = next(pid for pid in victims if what != "rank" or before[pid] == 2)
        os.kill(victim, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{victim}").exists(), 10)
        service.wait_ready(0, 1, 2, version=1)
        publisher.push(random_weights(tiny.config, 202), 2, timeout_s=40)
        service.wait_ready(0, 1, 2, version=2, seconds=20)
    if what == "rank":
        assert len(rank_processes(service).keys() - before.keys()) == 1, "more than the dead one was restarted"


def test_the_fleets_process_dies_and_its_replicas_come_back(serve, cluster, no_model):
    service = serve("--replicas", "2")
    service.wait_ready(0, 1)
    before = rank_processes(service)
    (fleet,) = [p for p in service.processes() if b"fleet_ray" in Path(f"/proc/{p}/cmdline").read_bytes()]
    os.kill(fleet, signal.SIGKILL)
    until(lambda: not before.keys() & rank_processes(service).keys(), 60)
    service.wait_ready(0, 1)
    assert len(rank_processes(service)) == 2


def test_tensor_parallel_ranks_share_a_node(serve, cluster):
    service = serve("--replicas", "1", "--tp", "2")
    service.wait_ready(0)
    assert service.nodes()[0] == cluster.head, "only the head has two CPUs"
    with service.client() as client:
        assert client.generate(prompt_ids=PROMPT, max_tokens=4, ignore_eos=True).outputs[0].finish_reason == "length"


def test_ranks_see_the_gpus_of_their_bundles_and_no_others(serve, cluster, no_model):
    node = cluster.add(cpus=2, gpus=3)
    service = serve("--replicas", "1", "--tp", "2", "--set", "fleet.gpus_per_rank=1")
    service.wait_ready(0)
    assert service.nodes() == {0: node}
    ranks = rank_processes(service)
    assert len(ranks) == 2
    seen = set()
    for pid in ranks:
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        seen |= {line for line in lines if line.startswith("CUDA_VISIBLE_DEVICES=")}
    (devices,) = seen
    assert len(set(devices.partition("=")[2].split(","))) == 2
    assert service.stop() == 0
    cluster.kill(node)


def test_too_many_wait_for_room(serve, cluster, no_model):
    service = serve("--replicas", "1")
    service.wait_ready(0)
    result = scale(service, 9, wait_s=15)
    assert result.exit_code == 1
    assert "no place yet" in result.stdout
    until(lambda: len(service.ready()) == 4, 180)
    assert scale(service, 1).exit_code == 0


def test_requests_go_to_all_and_none_fails_while_replicas_leave(serve, cluster, no_model):
    service = serve("--replicas", "3")
    service.wait_ready(0, 1, 2)

    def ask(number):
        with RolloutClient(service.url) as client:
            outputs = client.generate(prompt_ids=PROMPT, n=2, max_tokens=40, seed=number, ignore_eos=True).outputs
        return [output.finish_reason for output in outputs]

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, n) for n in range(60)]
        assert scale(service, 1).exit_code == 0
        assert {reason for one in asked for reason in one.result(60)} == {"length"}
    assert httpx.get(f"{service.url}/ready").status_code == 200

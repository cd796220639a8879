"""Processes of a running service are killed under load: it answers again, with the right weights."""

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from rollout_client.http import Output, RolloutClient
from tests.integration.live import LiveService
from tests.integration.test_replay import Load
from tests.reference.checkpoint import Checkpoint, random_weights
from tests.reference.llama import Replay
from worker.service import free_ports
from worker.supervisor_messages import (
    GetProcesses,
    Ok,
    Process,
    Processes,
    Reply,
    Request,
    Restart,
    decode_reply,
    encode,
)

BACK_S = 20.0
"""The bars (6 s for a rank, 3 s for the store) are for a quiet host; here it is about coming back at all."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.random(tmp_path_factory.mktemp("deaths") / "model", seed=1)


@pytest.fixture(scope="module")
def live(checkpoint: Checkpoint) -> Iterator[LiveService]:
    """Two replicas that serve version 1, which was pushed: a restart must not bring back what is on disk."""
    (port,) = free_ports(1)  # the same for a store that is started again
    service = LiveService(checkpoint.directory, "--replicas", "2", "--push-endpoint", f"tcp://127.0.0.1:{port}")
    try:
        service.start()
        push(service, checkpoint, 1)
        yield service
        assert service.stop() == 0, service.tail()
        service.assert_nothing_left()
    finally:
        service.close()


def weights_of(checkpoint: Checkpoint, version: int) -> dict[str, np.ndarray]:
    return random_weights(checkpoint.config, 100 + version)


def push(live: LiveService, checkpoint: Checkpoint, version: int) -> None:
    with live.publisher("deaths") as publisher:
        assert publisher.push(weights_of(checkpoint, version), version).version == version


def ask(live: LiveService, message: Request, within_s: float = 5.0) -> Reply:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{live.run_dir / 'supervisor.sock'}")
        socket.send(encode(message))
        assert socket.poll(within_s * 1000), "the supervisor does not answer"
        return decode_reply(socket.recv())


def processes(live: LiveService) -> dict[str, Process]:
    reply = ask(live, GetProcesses("p"))
    assert isinstance(reply, Processes)
    live.processes()
    return {process.name: process for process in reply.items}


def all_ready(live: LiveService) -> bool:
    with RolloutClient(live.url) as client:
        try:
            return all(replica["ready"] for replica in client.ready()["replicas"])
        except Exception:
            return False


def wait_until_back(live: LiveService, killed: Process) -> float:
    began = time.monotonic()
    while processes(live)[killed.name].pid in (None, killed.pid) or not all_ready(live):
        assert time.monotonic() - began < BACK_S, live.tail()
        time.sleep(0.05)
    return time.monotonic() - began


def check(checkpoint: Checkpoint, answers: list[tuple[list[int], float, Output]], version: int) -> None:
    """Every answer is whole or aborted, and each of its logprobs is the pushed version's."""
    replay = Replay(checkpoint.config, [weights_of(checkpoint, version)])
    assert answers
    for prompt, _, output in answers[:40]:
        assert output.finish_reason in ("length", "abort")
        assert {span.version for span in output.spans} == {version}
        ids = np.array(prompt + output.token_ids)
        rows = replay.logprobs(ids[:-1], np.zeros(len(ids) - 1, int))[len(prompt) - 1 :]
        expected = np.take_along_axis(rows, np.array(output.token_ids, int)[:, None], 1)[:, 0]
        np.testing.assert_allclose(output.logprobs, expected, atol=1e-3)


def test_a_killed_rank_comes_back_with_the_live_version(live: LiveService, checkpoint: Checkpoint) -> None:
    with Load(live.url) as load:
        time.sleep(0.5)
        victim = processes(live)["replica-0-rank-0"]
        os.kill(victim.pid, signal.SIGKILL)
        seconds = wait_until_back(live, victim)
        time.sleep(0.5)
    print(f"replica back after {seconds:.1f} s")
    assert not load.failures
    check(checkpoint, load.answers, 1)
    reports = list((live.run_dir / "crashes").glob("*replica-0-rank-0.txt"))
    assert "killed by SIGKILL" in reports[-1].read_text()


def test_a_killed_store_leaves_the_replicas_serving_and_takes_pushes_again(
    live: LiveService, checkpoint: Checkpoint
) -> None:
    ranks = {name: process.pid for name, process in processes(live).items() if "rank" in name}
    with Load(live.url) as load:
        time.sleep(0.3)
        victim = processes(live)["store"]
        os.kill(victim.pid, signal.SIGKILL)
        seconds = wait_until_back(live, victim)
    print(f"store back after {seconds:.1f} s")
    assert not load.failures
    check(checkpoint, load.answers, 1)
    assert {name: process.pid for name, process in processes(live).items() if "rank" in name} == ranks
    push(live, checkpoint, 2)
    push(live, checkpoint, 3)


def test_a_killed_api_finds_its_replicas_again(live: LiveService) -> None:
    before = processes(live)
    os.kill(before["api"].pid, signal.SIGKILL)
    deadline = time.monotonic() + BACK_S
    while True:
        try:
            url = (live.run_dir / "http_url").read_text().strip()
            with RolloutClient(url) as client:
                answer = client.generate(prompt_ids=[1, 2, 3], max_tokens=4, ignore_eos=True)
            break
        except Exception:
            assert time.monotonic() < deadline, live.tail()
            time.sleep(0.1)
    live.url = url
    assert len(answer.outputs[0].token_ids) == 4
    assert {n: p.pid for n, p in processes(live).items() if n != "api"} == {
        n: p.pid for n, p in before.items() if n != "api"
    }


def test_replicas_restart_one_by_one_without_a_failed_request(live: LiveService, checkpoint: Checkpoint) -> None:
    before = processes(live)
    with Load(live.url) as load:
        time.sleep(0.3)
        assert ask(live, Restart("r", drain_s=20.0), within_s=90.0) == Ok("r")
        time.sleep(0.3)
    after = processes(live)
    assert all(after[name].pid != before[name].pid for name in after if "rank" in name)
    assert not load.failures
    assert all(output.finish_reason == "length" for _, _, output in load.answers)
    check(checkpoint, load.answers, 3)

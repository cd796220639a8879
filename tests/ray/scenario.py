"""Three nodes of one replica each, pushes under load, one node loses its power, another one comes late.

What a client and a trainer can observe of it, as facts to hold against bars:
- every token is derived again from the version its span claims (a torn one ends the run with an AssertionError);
- once a trainer was told that a version is live, and once anybody has seen a token of it, no answer that begins
  later holds a token of an older version, wherever it was made (the fleet changes as one);
- what left the trainer's host per push, in copies of the model.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from rollout_client.http import Output, RolloutClient
from tests.integration.test_replay import LENGTH, check
from tests.ray.fleet import RayService, until
from tests.ray.network import Network, RayHosts
from tests.ray.trainer import ENOUGH, MORE, SEEDS
from tests.reference.checkpoint import Checkpoint, random_weights
from tests.reference.llama import Replay

ROOT = Path(__file__).parents[2]
ANSWERS = 30
"""Wanted of a run, and one of several versions: pushes go on for it."""
MORE_S = 90.0
DATA_TOKEN = "a token of the clients"
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
}


class Answer:
    """One output, and when its request began and ended."""

    def __init__(self, prompt: list[int], began: float, output: Output) -> None:
        self.prompt, self.began, self.output = prompt, began, output
        self.ended = time.monotonic()
        self.versions = [span.version for span in output.spans]


class Clients:
    """Requests from a few threads until told to stop."""

    def __init__(self, url: str, count: int) -> None:
        self.answers: list[Answer] = []
        self.failures: list[BaseException] = []
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)

    def asked_enough(self) -> bool:
        """Whether a push has landed inside an answer, and there are as many answers as a run must have."""
        return len(self.answers) > ANSWERS and any(len(answer.versions) > 1 for answer in list(self.answers))

    def _run(self, number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            with RolloutClient(self._url, token=DATA_TOKEN) as client:
                while not self._stop.is_set():
                    prompt, began = rng.integers(1, 500, 12).tolist(), time.monotonic()
                    reply = client.generate(prompt_ids=prompt, max_tokens=LENGTH, temperature=1.0, ignore_eos=True)
                    self.answers += [Answer(prompt, began, output) for output in reply.outputs]
        except BaseException as error:  # the scenario shows it
            self.failures.append(error)


class NetworkService(RayService):
    """On the head of a network's cluster."""

    def __init__(self, network: Network, hosts: RayHosts, model: Path, *args: str) -> None:
        super().__init__(model, hosts.address, *args)
        address = hosts.address.rpartition(":")[0]
        token = self.scratch / "data-token"
        token.write_text(DATA_TOKEN)
        more = ["--host", address, "--data-token-file", str(token), "--push-endpoint", f"tcp://{address}:5600"]
        self._command = network.on("head", *self._command, *more)


def run(pushes: int, kill_at: int, add_at: int, gap_s: float, clients: int = 3) -> dict[str, Any]:
    """The whole scenario; raises AssertionError when something is wrong that has no figure."""
    directory = Path(tempfile.mkdtemp(prefix="ray-scenario-"))
    model = Checkpoint.random(directory / "model", seed=1, **SIZES)
    ray = Path(sys.executable).with_name("ray")
    network = Network()
    hosts = RayHosts(network, directory)
    service = None
    try:
        for host in ("head", "one", "two"):
            hosts.start(host, ray)
        network.add("trainer")
        service = NetworkService(network, hosts, model.directory, "--replicas", "3")
        service.start()
        first_s = service.ready_s
        service.wait_ready(0, 1, 2)
        began = time.monotonic()
        lines, outage = _push_all(network, hosts, service, ray, model, (pushes, kill_at, add_at, gap_s, clients))
        facts = _judge(*lines, model)
        facts |= {"cold_start_s": first_s, "seconds": time.monotonic() - began, "outage": outage}
        assert service.stop() == 0, service.tail()
        return facts
    finally:
        if service is not None:
            service.close()
        network.close()
        hosts.reap()


def _push_all(
    network: Network,
    hosts: RayHosts,
    service: RayService,
    ray: Path,
    model: Checkpoint,
    plan: tuple[int, int, int, float, int],
) -> tuple[tuple[list[dict[str, Any]], list[Answer]], dict[str, float]]:
    pushes, kill_at, add_at, gap_s, count = plan
    command = [sys.executable, "-m", "tests.ray.trainer", service.push_endpoint, json.dumps(model.config)]
    trainer = subprocess.Popen(
        network.on("trainer", *command, str(pushes), str(gap_s)),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    done: list[dict[str, Any]] = []
    outage: dict[str, float] = {}
    load: Clients | None = None
    try:
        for line in trainer.stdout or ():
            done.append(json.loads(line))
            version = done[-1]["version"]
            if version == 0:
                service.wait_ready(0, 1, 2, version=0)
                load = Clients(service.url, count)
            elif version == kill_at:
                outage["killed"] = time.monotonic()
                network.unplug("two")
            elif version == add_at:
                outage["added"] = time.monotonic()
                hosts.start("three", ray)
            if version == pushes:
                over = time.monotonic() + MORE_S
            if version >= pushes:
                assert load is not None
                _say(trainer, ENOUGH if load.asked_enough() or time.monotonic() > over else MORE)
        assert trainer.wait(30) == 0
        until(lambda: len(service.ready()) == 3, 120, lambda: f"{service.fleet()}\n{service.tail()}")
        outage["three_again_s"] = time.monotonic() - outage.pop("added")
        slowest = max(done, key=lambda push: push["told"] - push["began"])
        outage["longest_push_s"] = slowest["told"] - slowest["began"]
        outage["longest_push_began_after_kill_s"] = slowest["began"] - outage.pop("killed")
        time.sleep(1.0)  # answers from the late one
    finally:
        trainer.kill()
        trainer.communicate()  # reads no more, and closes
        if load is not None:
            load.stop()
    assert load is not None
    assert not load.failures, load.failures
    return (done, load.answers), outage


def _say(trainer: "subprocess.Popen[str]", word: str) -> None:
    assert trainer.stdin is not None
    trainer.stdin.write(word)
    trainer.stdin.flush()


def _judge(done: list[dict[str, Any]], answers: list[Answer], model: Checkpoint) -> dict[str, Any]:
    replay = Replay(model.config, [random_weights(model.config, seed) for seed in SEEDS])
    made = [answer for answer in answers if answer.output.token_ids]
    misfits = [check(replay, a.prompt, 1.0, a.output, cut=True) for a in made]  # raises for a torn token
    assert np.mean(misfits) > 0.9, "the two checkpoints are too alike"
    copies = [push["sent"] / push["bytes"] for push in done if not push["failed"]]  # one made again sent more
    seconds = sorted(push["told"] - push["began"] for push in done)
    again = [push for push in done if push["failed"]]
    return {
        "pushes": len(done),
        "answers": len(answers),
        "tokens_derived_again": sum(len(answer.output.token_ids) for answer in made),
        "answers_cut_short": sum(answer.output.finish_reason != "length" for answer in answers),
        "answers_of_several_versions": sum(len(answer.versions) > 1 for answer in answers),
        "stale_after_told": _stale_after_told(done, made),
        "stale_after_seen": _stale_after_seen(made),
        "copies_per_push_median": statistics.median(copies),
        "copies_per_push_max": max(copies),
        "push_s_median": statistics.median(seconds),
        "push_s_max": seconds[-1],
        "pushes_made_again": len(again),
        "why_again": sorted({why for push in again for why in push["failed"]}),
        "replicas": sorted({push["replicas"] for push in done}),
    }


def _stale_after_told(done: list[dict[str, Any]], answers: list[Answer]) -> int:
    """Answers that begin after a trainer was told of a version, and hold an older one."""
    told = [(push["told"], push["version"]) for push in done]
    return sum(answer.versions[0] < max((v for at, v in told if at < answer.began), default=0) for answer in answers)


def _stale_after_seen(answers: list[Answer]) -> int:
    """Answers that begin after another one has ended that held a newer version."""
    events = sorted(itertools.chain(((a.ended, 0, a) for a in answers), ((a.began, 1, a) for a in answers)), key=_when)
    newest, stale = 0, 0
    for _, begins, answer in events:
        if begins:
            stale += answer.versions[0] < newest
        else:
            newest = max(newest, answer.versions[-1])
    return stale


def _when(event: tuple[float, int, Answer]) -> tuple[float, int]:
    return event[0], event[1]

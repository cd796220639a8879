"""A replica whose ranks share a model on two GPUs ($TP_RANKS of them): real ranks, loops, arena and NCCL, between a
scripted store and API.

Skipped without as many devices, and without NCCL. What is measured is printed as lines of JSON (`pytest -s`).
"""

import json
import os
import signal
import time

import numpy as np
import pytest

from benchmarks.gpu import replay
from tests.unit.worker.loop.rig import ProcessRig
from weight_manager.layout import rank_views, region_digests, region_views, version_digest
from weight_manager.messages import Live
from worker.boot import EXIT_GROUP_DEAD
from worker.gpu.driver import CudaError, Driver
from worker.gpu.libraries import load
from worker.messages import Clear, Done, Pause, Reload, Resume

pytestmark = [pytest.mark.timeout(240)]
START_S, CLIENTS = 120, 12
TP = int(os.environ.get("TP_RANKS", "2"))
UPDATES, LIVES = int(os.environ.get("TP_UPDATES", "60")), int(os.environ.get("TP_LIVES", "50"))


@pytest.fixture(scope="module", autouse=True)
def _devices():
    try:
        devices = Driver().devices
        load("libnccl.so.2", "nvidia-nccl-cu13", "gpu-tp")
    except (CudaError, OSError) as error:
        pytest.skip(str(error))
    if devices < TP:
        pytest.skip(f"needs {TP} devices")


class Ranks(ProcessRig):
    """tp ranks, each on a device of its own. Weights of a version are those that `benchmarks.gpu.replay` derives."""

    def __init__(self, **config):
        config = {"tp": TP, "max_batch": 32, "max_tokens_per_step": 256, "num_blocks": 1024, "block_size": 16} | config
        super().__init__(engine="paddle", device="gpu", files={"config": replay.CONFIG}, **config)
        self.epoch = 0
        self.store.register(self.write(1, 0), timeout=START_S)

    def command(self, argv):
        os.environ["RANKS_MEET_AT"] = str(self.run_dir / "ranks.sock")
        return ["tests.gpu.tp_rank" if word == "worker" else word for word in argv]

    def write(self, version, slot):
        """A version into a slot of the arena, as a finished push leaves it."""
        write_epoch = self.arena.bump(slot)
        named, memory = replay.weights(version), self.arena.slot(slot)
        for region, view in zip(self.layout.regions, region_views(self.layout, memory), strict=True):
            box = tuple(slice(s, s + n) for s, n in zip(region.start, region.shape, strict=True))
            view[:] = named[region.name][box].reshape(-1)
        self.epoch += 1
        digest = version_digest(self.layout, region_digests(self.layout, memory))
        assert len(rank_views(self.layout, 1, memory)) > 0
        return Live("run", version, self.epoch, slot, digest, write_epoch)

    @property
    def said(self):
        return (self.run_dir / "ranks.log").read_text()

    def greedy(self, name):
        self.api.generate(name, [5, 6, 7], max_tokens=24)
        tokens, _, finish = self.api.finish(name)
        assert finish == "length"
        return tokens


@pytest.fixture
def ranks():
    made = []

    def make(**config):
        made.append(Ranks(**config))
        return made[-1]

    yield make
    for one in made:
        if one.run_dir.exists():
            print(one.said[-3000:], flush=True)
        one.stop()


def show(**found):
    print(json.dumps(found), flush=True)


def test_every_token_follows_from_the_versions_of_its_spans_while_versions_are_pushed(ranks, tmp_path):
    r = ranks()
    rng = np.random.default_rng(0)
    asked, number, found = {}, 0, []

    def ask():
        nonlocal number
        number += 1
        prompt = rng.integers(0, 512, int(rng.integers(3, 40))).tolist()
        how = {"max_tokens": int(rng.integers(8, 120)), "temperature": 1.0, "seed": int(rng.integers(1 << 40))}
        how |= replay.ASKED[number % len(replay.ASKED)]
        sent = dict(how)
        if "logit_bias" in sent:
            sent["logit_bias"] = {int(i): bias for i, bias in sent["logit_bias"].items()}
        asked[f"r{number}"] = prompt, how
        r.api.generate(f"r{number}", prompt, **sent)

    def take():
        for name in [name for name in asked if r.api.finished(name)]:
            prompt, how = asked.pop(name)
            tokens, spans, finish = r.api.result(name)
            assert finish in {"length", "abort"}, r.api.chunks[name][-1]
            logprobs = [value for chunk in r.api.chunks[name] for value in chunk.logprobs]
            named = [[s.version, s.start, s.end, s.recomputed] for s in spans]
            found.append(
                {
                    "prompt": prompt,
                    "asked": how,
                    "tokens": tokens,
                    "spans": named,
                    "logprobs": logprobs,
                    "finish": finish,
                }
            )

    def made():
        return sum(r.api.tokens(name) for name in asked)

    began = time.monotonic()
    for version in range(2, UPDATES + 2):
        while len(asked) < CLIENTS:
            ask()
        enough = made() + 100
        r.api.until(lambda enough=enough: made() >= enough or all(r.api.finished(name) for name in asked))
        r.store.push(f"s{version}", r.write(version, (version + 1) % 2), replay.POLICIES[version % 4])
        take()
    r.api.until(lambda: all(r.api.finished(name) for name in asked))
    take()
    seconds = time.monotonic() - began
    out = tmp_path / "found.json"
    out.write_text(json.dumps(found))
    spread = sum(len(f["spans"]) > 1 for f in found)
    counters = r.api.stats().counters
    show(updates=UPDATES, answers=len(found), tokens=sum(len(f["tokens"]) for f in found), of_several=spread, s=seconds)
    show(counters={name: counters.get(name, 0) for name in ("steps", "discarded_steps", "engine_errors")})
    assert spread > UPDATES / 4
    assert counters.get("engine_errors", 0) == 0
    assert replay.check(out) == 0


def test_the_same_hidden_states_on_all_ranks_after_every_step(ranks):
    r = ranks(check_ranks=True)
    for number in range(8):
        r.api.generate(f"a{number}", list(range(1, 30 + number)), max_tokens=60)
    for number in range(8):
        assert r.api.finish(f"a{number}")[2] == "length"


def test_several_ranks_say_what_one_says(ranks):
    found = {}
    for tp in (1, TP):
        r = ranks(tp=tp)
        found[tp] = [r.greedy(f"g{number}") for number in range(3)]
        r.stop()
    assert found[1] == found[TP]


def test_shut_and_brought_back_fifty_times_while_requests_wait(ranks):
    r = ranks()
    before = r.greedy("before")
    shut, back, released = [], [], []
    for turn in range(LIVES):
        assert isinstance(r.api.call(Pause, "keep"), Done)
        r.api.generate(f"w{turn}", [5, 6, 7], max_tokens=24)
        began = time.monotonic()
        cleared = r.api.call(Clear)
        shut.append(time.monotonic() - began)
        assert cleared.data["groups"] == [["tp"]] * TP, cleared
        released.append(cleared.data["released"])
        if turn % 5 == 0:  # a version that comes meanwhile
            version = 2 + turn // 5
            live = r.write(version, version % 2)
            r.store.push(f"s{turn}", live, "keep")
            r.store.push(f"t{turn}", r.write(1, (version + 1) % 2), "keep")
        began = time.monotonic()
        brought = r.api.call(Reload)
        back.append(time.monotonic() - began)
        assert isinstance(brought, Done), brought
        assert isinstance(r.api.call(Resume), Done)
        assert r.api.finish(f"w{turn}")[0] == before
    show(lives=LIVES, shut_s=float(np.median(shut)), back_s=float(np.median(back)), worst_back_s=max(back))
    show(released=released[-1])


@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_is_killed_ends_the_other_in_a_bounded_time(ranks, victim):
    r = ranks()
    for number in range(CLIENTS):
        r.api.generate(f"a{number}", [1, 2, 3], max_tokens=200)
    r.api.until(lambda: r.api.tokens("a0") > 5)
    began = time.monotonic()
    os.kill(r.ranks[victim].pid, signal.SIGKILL)
    assert r.ranks[1 - victim].wait(30) == EXIT_GROUP_DEAD
    seconds = time.monotonic() - began
    show(killed=victim, other_left_after_s=round(seconds, 3), said=_last_words(r))
    assert seconds < 10


def test_a_rank_that_stands_still_ends_the_other_by_the_deadline(ranks):
    r = ranks(connect_s=20.0)
    for number in range(CLIENTS):
        r.api.generate(f"a{number}", [1, 2, 3], max_tokens=200)
    r.api.until(lambda: r.api.tokens("a0") > 5)
    os.kill(r.ranks[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        assert r.ranks[0].wait(60) == EXIT_GROUP_DEAD
    finally:
        os.kill(r.ranks[1].pid, signal.SIGCONT)
    seconds = time.monotonic() - began
    show(stopped=1, other_left_after_s=round(seconds, 3), said=_last_words(r))
    assert seconds < 40


def _last_words(r):
    return [json.loads(line)["message"] for line in r.said.splitlines() if '"leaving' in line or "ending the" in line]

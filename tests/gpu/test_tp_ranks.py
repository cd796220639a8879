"""A replica whose ranks share a model on two GPUs ($TP_RANKS of them): real ranks, loops, arena and NCCL, between a
scripted store and API.

Skipped without as many devices, and without NCCL. What is measured is printed as lines of JSON (`pytest -s`).
"""

import os
import signal
import time

import numpy as np
import pytest

from benchmarks.gpu import replay
from tests.gpu.tp_replica import CLIENTS, TP, Asking, show
from worker.boot import EXIT_GROUP_DEAD
from worker.messages import Clear, Done, Pause, Reload, Resume

pytestmark = [pytest.mark.timeout(240)]
UPDATES, LIVES = int(os.environ.get("TP_UPDATES", "60")), int(os.environ.get("TP_LIVES", "50"))


def test_every_token_follows_from_the_versions_of_its_spans_while_versions_are_pushed(ranks, tmp_path):
    r = ranks()
    asking, began = Asking(r), time.monotonic()
    for version in range(2, UPDATES + 2):
        asking.ask()
        asking.run(100)
        r.store.push(f"s{version}", r.write(version, (version + 1) % 2), replay.POLICIES[version % 4])
        asking.take()
    asking.take(all_of_them=True)
    show(updates=UPDATES, s=time.monotonic() - began)
    follows, spread = asking.follow(tmp_path / "found.json")
    assert follows
    assert spread > UPDATES / 4


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
    show(killed=victim, other_left_after_s=round(seconds, 3), said=r.last_words())
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
    show(stopped=1, other_left_after_s=round(seconds, 3), said=r.last_words())
    assert seconds < 40

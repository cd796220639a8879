"""Adapters of a replica whose ranks share a model on two GPUs ($TP_RANKS of them): every token, and the ranks' lives.

Skipped without as many devices, and without NCCL. What is measured is printed as lines of JSON (`pytest -s`).
"""

import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest

from benchmarks.gpu import replay
from tests.gpu import tp_engines
from tests.gpu.test_engine import SHAPES
from tests.gpu.tp_replica import CLIENTS, TP, Adapter, Asking, need_devices, show
from worker.boot import EXIT_GROUP_DEAD
from worker.messages import Clear, Done, Pause, Reload, Resume

pytestmark = [pytest.mark.timeout(240)]
UPDATES = int(os.environ.get("TP_UPDATES", "60"))
PROMPT = [5, 6, 7]


@pytest.fixture
def adapters(ranks):
    """(a replica, its adapters by name), each with its version 1 live."""
    made = []

    def make(names=replay.ADAPTERS, *, bits=False, **config):
        r = ranks(**config)
        found = {name: Adapter(r, name, bits=bits) for name in names}
        made.extend(found.values())
        for adapter in found.values():
            adapter.push(1)
        return r, found

    yield make
    for adapter in made:
        adapter.close()


def test_every_token_follows_from_the_versions_of_its_spans_while_models_and_adapters_are_pushed(adapters, tmp_path):
    r, found = adapters()
    asking, began, took = Asking(r, found), time.monotonic(), []
    for version in range(2, UPDATES + 2):
        asking.ask()
        asking.run(60)
        if version % 3 == 0:
            r.store.push(f"s{version}", r.write(version, (version // 3) % 2), replay.POLICIES[version % 4])
        for number, adapter in enumerate(found.values()):
            if (version + number) % 2:
                at = time.monotonic()
                adapter.push(version, replay.OF_ADAPTERS[(version + number) % len(replay.OF_ADAPTERS)])
                took.append(time.monotonic() - at)
        asking.take()
    asking.take(all_of_them=True)
    show(updates=UPDATES, adapters=len(took), push_ms=1000 * float(np.median(took)), s=time.monotonic() - began)
    follows, spread = asking.follow(tmp_path / "found.json")
    assert follows
    assert spread > UPDATES / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_ranks_say_with_adapters_what_one_says(adapters, dtype):
    """dtype: of the adapters; the model is float32, so these are widened on the devices."""
    said = {}
    for tp in (1, TP):
        r, found = adapters(bits=dtype == "bfloat16", tp=tp)
        said[tp] = [r.greedy(f"g{name}", name) for name in ("", *found)]
        r.stop()
    assert said[1] == said[TP]
    assert len({tuple(tokens) for tokens in said[TP]}) == 4, "each says something else"


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen2-0.5b"])
def test_merged_weights_of_real_shapes_in_bfloat16(name, tmp_path):
    """Steps of few and of many rows: products of few add adapters on their way, and a rank has its part of them."""
    need_devices()
    found = tp_engines.errors(SHAPES[name], tmp_path, TP)
    show(shape=name, off={count: max(errors) for count, errors in found.items()})
    assert max(max(errors) for errors in found.values()) < 0.05


def test_adapters_outlive_what_is_shut_and_brought_back(adapters):
    r, found = adapters()
    before = {name: r.greedy(f"before{name}", name) for name in found}
    for turn in range(3):
        assert isinstance(r.api.call(Pause, "keep"), Done)
        assert isinstance(r.api.call(Clear), Done)
        if turn == 1:
            found["a"].push(2)
        assert isinstance(r.api.call(Reload), Done)
        assert isinstance(r.api.call(Resume), Done)
        after = {name: r.greedy(f"after{turn}{name}", name) for name in found}
        assert {name for name in found if after[name] != before[name]} == ({"a"} if turn else set())


@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_is_killed_while_versions_come_ends_the_other_in_a_bounded_time(adapters, victim):
    r, found = adapters()
    for number in range(CLIENTS):
        r.api.generate(f"a{number}", PROMPT, adapter="abc"[number % 3], max_tokens=200)
    r.api.until(lambda: r.api.tokens("a0") > 5)
    took = []

    def kill():
        killed = time.monotonic()
        os.kill(r.ranks[victim].pid, signal.SIGKILL)
        status = r.ranks[1 - victim].wait(30)
        took.append((status, time.monotonic() - killed))

    def push():
        for version, adapter in itertools.product(range(2, 1000), found.values()):
            adapter.patience_s = 5.0
            adapter.push(version)

    timer = threading.Timer(0.3, kill)
    timer.start()
    with pytest.raises(AssertionError):
        push()
    timer.join()
    ((status, seconds),) = took
    show(killed=victim, other_left_after_s=round(seconds, 3), said=r.last_words())
    assert status == EXIT_GROUP_DEAD
    assert seconds < 10

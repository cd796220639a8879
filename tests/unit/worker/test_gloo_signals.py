"""Real ranks in real processes over real gloo."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from worker.rendezvous import group_environment, ports_needed
from worker.service import free_ports

HEAD = """
import json, os, signal, sys, time
import numpy as np
from worker.gloo_signals import GlooSignals
from worker.process_groups import join
from worker.orders import GroupDead, Order, Phase, Signal
from weight_manager.adapters.plan import AdapterShape
from weight_manager.messages import InPlace, Live, LiveAdapter
rank, size = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
joined = join(rank, size, deadline_s=30)
signals = GlooSignals(joined.signal, rank, size)
def tell(**what): print(json.dumps(what), flush=True)
for line in sys.stdin:
    exec(json.loads(line))
"""


class Ranks:
    """size processes that joined one signal group and run what they are given."""

    def __init__(self, size):
        ports = free_ports(ports_needed(size))
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", HEAD],
                env={**os.environ, **group_environment(rank, ports), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(size)
        ]

    def run(self, code):
        for process in self.processes:
            process.stdin.write(json.dumps(code) + "\n")
            process.stdin.flush()

    def result(self, rank):
        return json.loads(self.processes[rank].stdout.readline())

    def results(self, code):
        self.run(code)
        return [self.result(rank) for rank in range(len(self.processes))]

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait(10)
            process.stdin.close()
            process.stdout.close()


@pytest.fixture(scope="module", autouse=True)
def standing():
    """Two ranks, of which one stands still, for gloo's 30 s: beside the other tests, from the first one on."""
    ranks = Ranks(2)
    ranks.run(
        """
try:
    for tick in range(2):
        if rank == 1 and tick == 1:
            tell(pid=os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
        signals.agree(Order() if rank == 0 else None)
        signals.vote((0, 0))
except GroupDead as error:
    tell(text=str(error), lost=error.lost)
""",
    )
    assert ranks.result(1)["pid"]
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def three():
    ranks = Ranks(3)
    yield ranks
    ranks.close()


def test_every_rank_learns_the_same(three):
    three.run(
        """
live = Live("run", 7, 3, 1, "ab", 9)
orders = [Order(), Order(Signal.PAUSE, vote=True), Order(step=True),
          Order(Signal.UPDATE, Phase.PREPARE, session="s", live=live, vote=True),
          Order(Signal.CLEAR, Phase.RELEASE, tags=("weights", "kv_cache"))]
got = [signals.agree(order if rank == 0 else None) for order in orders]
batches = [None, np.arange(5, dtype=np.int32), np.arange(2047, dtype=np.int32), np.arange(5000, dtype=np.int32)]
shared = [signals.share(batch if rank == 0 else None) for batch in batches]
joined.groups.prove()  # all three are there: it says nothing
same = all((a is None and b is None) or np.array_equal(a, b) for a, b in zip(batches, shared))
tell(orders=got == orders, batches=same, votes=signals.vote((rank, 10 + rank)),
     words=[w.decode() for w in signals.gather(b"" if rank == 1 else f"rank {rank} ".encode() * 100)],
     pids=signals.pids, mine=os.getpid(), ticks=signals.ticks)
""",
    )
    results = [three.result(rank) for rank in range(3)]
    for rank, result in enumerate(results):
        assert (result["orders"], result["batches"], result["ticks"]) == (True, True, 5)
        assert result["votes"] == [[0, 10], [1, 11], [2, 12]]
        assert result["words"] == ["rank 0 " * 100, "", "rank 2 " * 100]
        assert result["pids"][rank] == result["mine"]
    assert len({tuple(result["pids"]) for result in results}) == 1


def test_no_field_of_an_order_stays_behind(three):
    """Each alone: an order that is sent without one has the ranks do something else, or nothing."""
    three.run(
        """
live = Live("run", 7, 3, 1, "ab", 9)
values = {"signal": Signal.ADAPTER, "phase": Phase.FORGET, "vote": True, "step": True, "session": "s", "live": live,
          "arena_path": "/dev/shm/a", "tags": ("kv_cache",), "epoch": 5,
          "in_place": InPlace(1, 9, [(0, 64)], "policy-a", "/dev/shm/b"),
          "regions": b"ab", "arrived": (InPlace(1, 9, [(0, 64)]),),
          "adapter": LiveAdapter("policy-a", live, "/dev/shm/b", AdapterShape("float32", ()))}
got = {name: signals.agree(Order(**{name: value}) if rank == 0 else None) for name, value in values.items()}
tell(same={name: getattr(got[name], name) == value for name, value in values.items()},
     all=set(values) == set(Order.__struct_fields__))
""",
    )
    for rank in range(3):
        result = three.result(rank)
        assert result["all"], "an order has a field that is not looked at here"
        assert all(result["same"].values()), result["same"]


def test_one_slow_rank_is_waited_for_without_spinning(three):
    three.run(
        """
began, cpu = time.monotonic(), time.process_time()
seen = []
for tick in range(3):
    if rank == 2:
        time.sleep(2)
    order = signals.agree(Order(Signal.PAUSE if tick == 1 else Signal.RUN, vote=True) if rank == 0 else None)
    seen.append([order.signal.name, signals.vote((rank, tick))])
tell(seen=seen, seconds=time.monotonic() - began, cpu=time.process_time() - cpu)
""",
    )
    results = [three.result(rank) for rank in range(3)]
    assert results[0]["seen"] == results[1]["seen"] == results[2]["seen"]
    assert [name for name, _ in results[0]["seen"]] == ["RUN", "PAUSE", "RUN"]
    for result in results:
        assert result["seconds"] > 5.5
        assert result["cpu"] < 0.05 * result["seconds"]


def test_the_idle_heartbeat_keeps_the_group_alive_and_costs_nothing(three):
    three.run(
        """
cpu = time.process_time()
for _ in range(3):
    if rank == 0:
        time.sleep(2)
    signals.agree(Order() if rank == 0 else None)
tell(cpu=time.process_time() - cpu)
""",
    )
    for rank in range(3):
        assert three.result(rank)["cpu"] < 0.02 * 6


def test_a_killed_rank_is_named_at_once(three):  # the last of those that share the ranks
    three.run(
        """
try:
    while True:
        signals.agree(Order(vote=True) if rank == 0 else None)
        signals.vote((0, 0))
        time.sleep(0.01)
except GroupDead as error:
    try:
        sums = joined.groups.prove()
    except GroupDead as dead:
        sums = str(dead)
    tell(text=str(error), lost=error.lost, sums=sums)
    os._exit(0)  # as a worker does: a rank that stayed would hold up one that waits for it in the same collective
""",
    )
    time.sleep(0.3)
    killed = time.monotonic()
    os.kill(three.processes[1].pid, signal.SIGKILL)
    three.processes[1].wait(30)
    for rank in (0, 2):
        result = three.result(rank)
        assert time.monotonic() - killed < 5
        assert not result["lost"] or 1 in result["lost"], result  # the first to leave may be gone too
        assert "is gone" in result["text"] or "closed the group" in result["text"]
        assert "sums is dead" in result["sums"]


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_rank_that_stands_still_past_the_limit_is_told_from_a_dead_one(standing):
    result = standing.result(0)
    assert result["lost"] == []
    assert "every rank lives" in result["text"]

"""The contract of shutting and restarting groups: a stand-in for ProcessGroupNCCL beside real gloo groups.

Everything runs in processes of its own, because Paddle's registry of groups is one per process.
"""

import json
import os
import subprocess
import sys

import pytest

from worker.rendezvous import group_environment, ports_needed
from worker.service import free_ports

HEAD = """
import json, os, sys
import paddle.distributed as dist
from paddle.distributed import collective
from worker.process_groups import GroupError, PaddleTooOld, ProcessGroups, can_be_shut, join

journal = []

class NcclStandIn:
    '''What ProcessGroupNCCL documents: shutdown and restart in pairs, an error when used in between.'''
    def __init__(self, name, fail=()):
        self.group, self.up, self.fail = name, True, list(fail)
    def name(self): return "NCCL"
    def shutdown(self):
        journal.append(("shutdown", self.group))
        if "shutdown" in self.fail: self.fail.remove("shutdown"); raise RuntimeError("nccl: unhandled system error")
        assert self.up, "shut twice"
        self.up = False
    def restart(self):
        journal.append(("restart", self.group))
        if "restart" in self.fail: self.fail.remove("restart"); raise RuntimeError("nccl: remote process exited")
        assert not self.up, "restarted while up"
        self.up = True
    def allreduce(self):
        if not self.up: raise RuntimeError("communicator was shut down")
        return "sum"

def register(name, gid, *fail):
    '''As new_group does.'''
    backend = NcclStandIn(name, fail)
    group = dist.communication.group.Group(rank, gid, list(range(size)), pg=backend, name=name)
    collective._group_map_by_name[name] = group
    return backend

rank, size = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
joined = join(rank, size, deadline_s=30)
groups = joined.groups

def gloo_works(group=joined.signal):
    import numpy as np, paddle
    tensor = paddle.to_tensor(np.array([rank + 1], dtype=np.int64))
    dist.all_reduce(tensor, group=group)
    return tensor.item() == sum(range(1, size + 1))

def shut():
    return [g.name for g in groups.groups() if g.name in collective._get_shutdown_group_map_by_name()]

def raised(call, *args):
    try: call(*args)
    except BaseException as error: return type(error).__name__ + ": " + str(error)
    return None

for line in sys.stdin:
    kept = dict(collective._group_map_by_name)
    journal.clear()
    scope = dict(globals())
    exec(json.loads(line), scope)
    print(json.dumps(scope["run"]()), flush=True)
    collective._get_group_map_by_name().clear()
    collective._get_group_map_by_name().update(kept)
    collective._clear_shutdown_group_map_by_name()
"""


@pytest.fixture(scope="module")
def on_two_ranks():
    """Runs a function body on two ranks and returns what it returns on each; the registry is as new every time."""
    ports = free_ports(ports_needed(2))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HEAD],
            env={**os.environ, **group_environment(rank, ports), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]

    def run(body):
        code = "def run():\n" + "".join(f"    {line}\n" for line in body.strip().splitlines())
        for process in processes:
            process.stdin.write(json.dumps(code) + "\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in processes]
        assert all(lines), [process.stderr.read()[-2000:] for process in processes]
        return [json.loads(line) for line in lines]

    yield run
    for process in processes:
        process.kill()
        process.communicate(timeout=10)


def test_what_can_be_shut_is_shut_and_comes_back_in_one_order(on_two_ranks):
    results = on_two_ranks("""
late, early = register("moe", 40), register("pipe", 30)   # ids, not names or age, make the order
seen = {"capable": [g.name for g in groups.groups()], "gloo": can_be_shut(joined.signal)}
before = dict(collective._group_map_by_name)
for _ in range(3):
    seen["shut"] = groups.shutdown()
    seen["again"] = groups.shutdown()
    seen["now"] = shut()
    seen["use"] = raised(late.allreduce)
    assert gloo_works()
    seen["restarted"] = groups.restart()
    seen["nothing"] = groups.restart()
    assert gloo_works() and late.allreduce() == "sum"
seen["registry"] = before == dict(collective._group_map_by_name)
seen["new"] = raised(dist.new_group, [0])
seen["journal"] = journal[:4]
return seen
""")
    for seen in results:
        assert seen["capable"] == seen["shut"] == seen["now"] == seen["restarted"] == ["pipe", "moe"]
        assert (seen["gloo"], seen["again"], seen["nothing"]) == (False, [], [])
        assert seen["use"] == "RuntimeError: communicator was shut down"
        assert seen["journal"] == [["shutdown", "pipe"], ["shutdown", "moe"], ["restart", "pipe"], ["restart", "moe"]]
        assert (seen["registry"], seen["new"]) == (True, None)


def test_a_failure_in_the_middle_leaves_a_known_state_and_can_be_repeated(on_two_ranks):
    results = on_two_ranks("""
register("a", 30), register("b", 31, "shutdown", "restart"), register("c", 32)
seen = {"first": raised(groups.shutdown), "shut": shut(), "rest": groups.shutdown()}
seen["restart"] = raised(groups.restart)
seen["still"] = shut()
seen["finish"] = groups.restart()
seen["end"] = shut()
return seen
""")
    for seen in results:
        assert seen["first"].startswith("GroupError: cannot shutdown group b (before it: a)")
        assert seen["shut"] == ["a"]
        assert seen["rest"] == ["b", "c"]
        assert "cannot restart group b" in seen["restart"]
        assert seen["still"] == ["b", "c"]
        assert (seen["finish"], seen["end"]) == (["b", "c"], [])


def test_the_world_group_is_kept(on_two_ranks):
    results = on_two_ranks("""
world = collective._group_map_by_name["_default_pg"]
gloo, world._pg = world._pg, NcclStandIn("world")   # as on a GPU
kept = groups.shutdown()
world._pg = gloo
return kept
""")
    assert results == [[], []]


def test_an_old_paddle_says_what_is_missing(on_two_ranks):
    results = on_two_ranks("""
class Paddle26:
    collective = collective
old = ProcessGroups(Paddle26())
nothing = old.shutdown()        # only gloo groups: nothing has to be shut
register("moe", 40)
return [nothing, raised(old.shutdown)]
""")
    for nothing, error in results:
        assert nothing == []
        assert error.startswith("PaddleTooOld: this Paddle has no shutdown_process_group")
        assert "moe" in error


def test_paddles_own_walk_stops_at_a_gloo_group_with_the_groups_before_it_shut(on_two_ranks):
    results = on_two_ranks("""
dist.new_group([0])
names = dict(collective._group_map_by_name)
signal = names.pop(joined.signal.name)
collective._group_map_by_name.clear()
collective._group_map_by_name.update({**{k: v for k, v in names.items() if k == "_default_pg"}})
before = register("before", 30)
collective._group_map_by_name[signal.name] = signal
after = register("after", 40)
walk = raised(dist.shutdown_process_group)
state = [before.up, after.up]
ours = groups.shutdown()
return [walk, state, ours, [before.up, after.up], groups.restart()]
""")
    for walk, state, ours, states, back in results:
        assert walk.startswith("AttributeError")
        assert "shutdown" in walk
        assert state == [False, True]
        assert (ours, states, back) == (["after"], [False, False], ["before", "after"])


def test_editing_the_registry_ends_new_groups_for_ever(on_two_ranks):
    results = on_two_ranks("""
taken = {name: collective._group_map_by_name.pop(name) for name, group in list(collective._group_map_by_name.items())
         if not can_be_shut(group)}
broken = raised(dist.new_group, [0, 1])
collective._group_map_by_name.update(taken)
return broken
""")
    assert results == ["KeyError: '_default_pg'"] * 2


def test_a_rank_loads_paddle_before_it_waits_for_the_first_one():
    """Which loads it meanwhile: seconds, and the first listens only then."""
    code = """
import sys
from worker import process_groups
def wait(*_):
    print("paddle" in sys.modules)
    sys.exit(0)
process_groups._wait_for = wait
process_groups.join(1, 2, deadline_s=1.0)
"""
    environment = {**os.environ, **group_environment(1, free_ports(ports_needed(2))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.stdout.split()[-1:] == ["True"], ran.stderr[-2000:]

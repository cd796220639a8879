"""A replica of two ranks on GPUs, whole but for the devices: processes, gloo, engines and loops are real, NVIDIA's
libraries are recorded (recorded_rank.py)."""

import json
import os
import signal
import time

import pytest

from tests.unit.worker.loop.recorded_rank import TOKEN
from tests.unit.worker.loop.rig import MODEL, ProcessRig
from tests.unit.worker.loop.test_adapter_commits import Adapter
from worker.boot import EXIT_GROUP_DEAD
from worker.messages import Clear, Done, Pause, Reload, Resume, Verify

pytestmark = [pytest.mark.timeout(240)]  # two processes load Paddle, beside whatever else runs


class Ranks(ProcessRig):
    def __init__(self, folder, **config):
        self.recorded = folder / "calls"
        os.environ["RECORDED"], os.environ["XDG_CACHE_HOME"] = str(self.recorded), str(folder)
        model = MODEL | {"hidden_size": 32, "intermediate_size": 32}
        super().__init__(tp=2, engine="paddle", device="gpu", num_blocks=128, files={"config": model}, **config)

    def command(self, argv):
        return ["tests.unit.worker.loop.recorded_rank" if word == "worker" else word for word in argv]

    @property
    def said(self):
        return (self.run_dir / "ranks.log").read_text()


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    for name in ("RECORDED", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    made = Ranks(tmp_path, heartbeat_s=1.0)
    try:
        made.store.register(made.store.write(0, 0), timeout=120)
        yield made
    finally:
        made.stop()


def test_two_ranks_serve_are_pushed_to_cleared_and_brought_back_and_launch_the_same(ranks):
    for number in range(3):
        ranks.api.generate(f"a{number}", [1, 2], max_tokens=60)
    ranks.api.generate("scored", list(range(1, 60)), max_tokens=2)
    for round_ in range(1, 4):
        ranks.store.push(f"s{round_}", ranks.store.write(round_, round_ % 2), "keep")
        assert isinstance(ranks.api.call(Pause, "keep"), Done)
        cleared = ranks.api.call(Clear)
        assert cleared.data["groups"] == [["tp"], ["tp"]]
        brought = ranks.api.call(Reload)
        assert isinstance(brought, Done), brought
        assert isinstance(ranks.api.call(Resume), Done)
        ranks.api.generate(f"b{round_}", [3], max_tokens=20)
        assert ranks.api.finish(f"b{round_}")[0] == [TOKEN] * 20
    for name in ("a0", "a1", "a2"):
        assert ranks.api.finish(name)[2] == "length"
    sums = ranks.api.call(Verify).data
    assert set(sums) == {"0", "1"}
    ranks.stop()
    first, second = (json.loads(ranks.recorded.with_suffix(f".{rank}").read_text()) for rank in range(2))
    assert first[0] == second[0]
    assert first[1] == second[1] > 50, "graphs launched"
    assert {name for name, *_ in first[0]} == {"sum_ranks", "ncclAllGather", "ncclBroadcast"}
    assert first[2] == second[2] == ["ncclCommInitRank", *["ncclCommDestroy", "ncclCommInitRank"] * 3]


def test_two_ranks_hold_adapters_and_launch_the_same_and_get_memory_in_their_loops_alone(ranks):
    adapter = Adapter(ranks)
    for number in range(3):
        ranks.api.generate(f"a{number}", [1, 2], max_tokens=200)
    for version in range(1, 5):
        adapter.push(version)
        ranks.api.generate(f"b{version}", [3], adapter="a", max_tokens=30)
    for name in ("a0", "b1", "b2", "b3", "b4"):
        assert ranks.api.finish(name)[2] == "length"
    ranks.stop()
    first, second = (json.loads(ranks.recorded.with_suffix(f".{rank}").read_text()) for rank in range(2))
    assert first[0] == second[0]
    for rank in (first, second):
        of = {method: {thread for name, thread in rank[3] if name == method} for method in ("_memory", "_give_back")}
        assert of == {"_memory": {"MainThread"}, "_give_back": {"MainThread"}}
        held = [thread for name, thread in rank[3] if name == "hold"]
        assert len(held) == 4
        assert held[0] == "work", "the first takes long, and steps go on"


@pytest.mark.parametrize("victim", [1, 0])
def test_when_one_rank_is_killed_the_other_leaves_at_once(ranks, victim):
    ranks.api.generate("a", max_tokens=400)
    ranks.api.until(lambda: ranks.api.tokens("a") > 0)
    began = time.monotonic()
    os.kill(ranks.ranks[victim].pid, signal.SIGKILL)
    assert ranks.ranks[1 - victim].wait(30) == EXIT_GROUP_DEAD
    assert time.monotonic() - began < 30
    assert "leaving: " in ranks.said

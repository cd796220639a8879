"""Two ranks in processes of their own over real gloo, with an engine that needs no model."""

import os
import signal
import time

import pytest

from tests.processor import calm
from tests.unit.worker.loop.rig import ProcessRig
from tests.unit.worker.loop.test_adapter_commits import Adapter
from worker.boot import EXIT_GROUP_DEAD
from worker.messages import Clear, Done, Pause, Reload, Resume, Verify


@pytest.fixture(scope="module")
def pair():
    rig = ProcessRig(tp=2, fake={"step_s": 0.002}, heartbeat_s=1.0)
    try:
        rig.first = rig.store.write(0, 0)
        rig.store.register(rig.first, timeout=40)
        rig.live = rig.first
        yield rig
    finally:
        rig.stop()


def test_both_ranks_serve_and_follow_every_order(pair):
    pair.api.generate("a", max_tokens=300)
    pair.api.until(lambda: pair.api.tokens("a") > 3)
    pair.store.push("s1", pair.store.write(1, 1), "keep")
    assert isinstance(pair.api.call(Pause, "keep"), Done)
    pair.store.push("s2", pair.store.write(2, 0), "keep")
    cleared = pair.api.call(Clear)
    assert [sorted(rank) for rank in cleared.data["released"]] == [["kv_cache", "weights"]] * 2
    pair.store.push("s3", pair.store.write(3, 1), "keep")
    assert isinstance(pair.api.call(Reload), Done)
    assert isinstance(pair.api.call(Resume), Done)
    _, spans, finish = pair.api.finish("a", 10)
    assert finish == "length"
    assert [span.version for span in spans] == [0, 1, 3]
    pair.check(pair.api, "a")
    sums = pair.api.call(Verify).data
    assert set(sums) == {"0", "1"}
    assert sums["0"]["model.layers.0.self_attn.q_proj.weight"] != sums["1"]["model.layers.0.self_attn.q_proj.weight"]
    assert sums["0"]["model.norm.weight"] == sums["1"]["model.norm.weight"]
    stats = pair.api.stats()
    assert [rank["pid"] for rank in stats.ranks] == [rank.pid for rank in pair.ranks]
    assert all(rank["rss_bytes"] > rank["private_bytes"] > 0 for rank in stats.ranks)


def test_a_vote_names_the_rank_that_cannot(pair):
    live = pair.store.write(4, 0)
    pair.arena.bump(0)
    vote = pair.store.prepare("s4", live)
    assert (vote.ok, vote.rank, "given away" in vote.error) == (False, 0, True)


def test_idle_ranks_stay_together_and_cost_nothing(pair):
    # one heartbeat a second here; the default beats every four
    calm(lambda: [rank.pid for rank in pair.ranks], wakes=200, window_s=6.0)
    pair.api.generate("after idle", max_tokens=1)
    began = time.monotonic()
    pair.api.finish("after idle")
    assert time.monotonic() - began < 0.9  # the next heartbeat is not what it waited for


@pytest.mark.parametrize("victim", [1, 0])
def test_when_one_rank_is_killed_the_other_leaves_at_once(victim):
    rig = ProcessRig(tp=2, fake={"step_s": 0.002})
    try:
        rig.store.register(rig.store.write(0, 0), timeout=40)
        rig.api.generate("a", max_tokens=400)
        rig.api.until(lambda: rig.api.tokens("a") > 0)
        os.kill(rig.ranks[victim].pid, signal.SIGKILL)
        assert rig.ranks[1 - victim].wait(30) == EXIT_GROUP_DEAD
        log = (rig.run_dir / "ranks.log").read_text()
        assert "leaving: " in log
    finally:
        rig.stop()


def test_both_ranks_go_back_when_the_store_is_gone_after_a_flip_while_adapters_are_prepared():
    rig = ProcessRig(tp=2, fake={"step_s": 0.005}, hold_s=0.2, unknown_s=0.6)
    try:
        rig.store.register(rig.store.write(0, 0), timeout=40)
        rig.api.generate("long", max_tokens=100)
        rig.api.until(lambda: rig.api.tokens("long") > 2)
        assert rig.store.prepare("s1", rig.store.write(1, 1)).ok
        assert rig.store.flip("s1").ok
        adapter = Adapter(rig)
        for number in range(3, 6):
            adapter.prepare(number)
        rig.store.close()
        _, spans, finish = rig.api.finish("long", 30)
        assert (finish, [span.version for span in spans]) == ("length", [0])
        rig.check(rig.api, "long")
    finally:
        rig.stop()

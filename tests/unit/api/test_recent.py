import logging

import pytest

from api.recent import SETTLED_S, SPAN_S, Recent
from weight_manager.messages import Status
from worker.messages import Stats


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def recent(clock):
    return Recent(clock)


def stats(tokens, stalls=(), wasted=0):
    counters = {"generation_tokens": float(tokens), "wasted_tokens": float(wasted)}
    place = {"kv_blocks_used": 0, "kv_blocks_total": 1, "block_size": 1}
    load = {"epoch": 1, "running": 0, "waiting": 0, "held": 0}
    samples = {"stall_s": list(stalls)}
    return Stats("", 0, "serving", None, 1, counters=counters, histograms=samples, **place, **load)


def per_second(recent, clock, seconds=SETTLED_S):
    clock.now += seconds
    first, found = recent.seconds()
    return {first + i: one for i, one in enumerate(found) if one.tokens or one.stall_ms or one.wasted}


def test_tokens_are_spread_over_the_time_since_the_last_word(recent, clock):
    recent.heard(0, stats(1000))
    clock.now = 1002.0
    recent.heard(0, stats(1100, wasted=4))
    clock.now = 1002.5
    recent.heard(0, stats(1110, wasted=4))
    found = per_second(recent, clock, 5)
    assert {second: one.tokens for second, one in found.items()} == {1000: 50.0, 1001: 50.0, 1002: 10.0}
    assert found[1000].wasted == 2.0


def test_replicas_add_up_and_a_restarted_one_counts_from_nothing(recent, clock):
    for replica in (0, 1):
        recent.heard(replica, stats(70))
    clock.now = 1001.0
    recent.heard(0, stats(80))
    recent.heard(1, stats(5))
    assert per_second(recent, clock)[1000].tokens == 15.0


def test_the_longest_stall_of_a_second_counts_and_old_seconds_go(recent, clock):
    recent.heard(0, stats(0, [0.002, 0.012]))
    recent.heard(0, stats(0, [0.004]))
    assert per_second(recent, clock)[1000].stall_ms == pytest.approx(12.0)
    clock.now += 2 * SPAN_S
    recent.heard(0, stats(0, [0.001]))
    assert list(per_second(recent, clock)) == [1000 + SETTLED_S + 2 * SPAN_S]
    assert len(recent.seconds()[1]) == SPAN_S


def test_trouble_is_listed_once_newest_first(recent):
    log = logging.getLogger("api.of_this_test")
    log.addHandler(recent.warnings)
    log.warning("replica %d lost: %s", 1, "silent")
    log.warning("replica %d lost: %s", 1, "silent")
    log.info("not trouble")
    log.removeHandler(recent.warnings)
    fields = {"live": None, "previous": None, "session": None, "replicas": {}, "history": [], "counters": {}}
    error = {"time": 5.0, "code": "shape_mismatch", "message": "lm_head"}
    for _ in range(2):
        recent.store_said(Status(call="", last_error=error, last_push=None, **fields))
    assert [(t.source, t.message, t.times) for t in recent.troubles] == [
        ("store", "shape_mismatch: lm_head", 1),
        ("api", "replica 1 lost: silent", 2),
    ]

"""A push that copies on the same cores gets a gap after each step."""

import time

import pytest

from rollout_client.arena_file import ArenaFile

STEP_S, SHARE = 0.12, 0.75


@pytest.fixture
def asked(make_rig):
    """Serving in steps of 120 ms, with a stream under way and a push that asks for turns."""
    rig = make_rig(fake={"step_s": STEP_S, "kv_weights": False}, push_gap=SHARE)
    rig.serve()
    with ArenaFile(rig.arena.path, write=True) as arena:
        arena.ask_for_turns(time.monotonic_ns() + 19 * 10**8)
        rig.api.generate("long", max_tokens=12)
        rig.api.until(lambda: rig.api.tokens("long") > 1)
        rig.asking = arena
        yield rig


def test_tokens_go_on_with_gaps_between_them(asked):
    before, began = asked.api.tokens("long"), time.monotonic()
    asked.api.until(lambda: asked.api.tokens("long") >= before + 5)
    took = (time.monotonic() - began) / 5
    assert took >= STEP_S * (1 + SHARE) * 0.9
    asked.api.finish("long")
    asked.check(asked.api, "long")


def test_the_word_tells_steps_from_gaps(asked):
    seen = set()
    for _ in range(60):
        seen.add(int(asked.asking.turns()[0][0]) & 1 == 1)
        time.sleep(0.005)
    assert seen == {False, True}


def test_a_commit_that_comes_in_a_gap_is_sound(make_rig):
    rig = make_rig(fake={"step_s": 0.15, "kv_weights": False})
    rig.serve()
    with ArenaFile(rig.arena.path, write=True) as arena:
        arena.ask_for_turns(time.monotonic_ns() + 19 * 10**8)
        rig.api.generate("long", max_tokens=8)
        rig.api.until(lambda: rig.api.tokens("long") > 2)  # a gap begins
        report = rig.store.push("s1", rig.store.write(1, 1))
        assert report.stall_ms < 150
        arena.ask_for_turns(0)
    rig.api.finish("long")
    assert rig.versions("long") == [0, 1]
    rig.check(rig.api, "long")

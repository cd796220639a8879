"""A push that copies on the same cores gets a gap after each step."""

import contextlib
import threading
import time

import pytest

from rollout_client.arena_file import ArenaFile

STEP_S, SHARE = 0.12, 0.75


@contextlib.contextmanager
def asking(rig):
    """A push that asks for turns all the time; the arena as it sees it."""
    over = threading.Event()
    with ArenaFile(rig.arena.path, write=True) as arena:

        def ask():
            while not over.wait(0.1):
                arena.ask_for_turns(time.monotonic_ns() + 10**9)

        arena.ask_for_turns(time.monotonic_ns() + 10**9)
        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield arena
        finally:
            over.set()
            thread.join()
            arena.ask_for_turns(0)


@pytest.fixture
def rig(make_rig):
    """Serving in steps of 120 ms, with a stream under way."""
    rig = make_rig(fake={"step_s": STEP_S, "kv_weights": False}, push_gap=SHARE)
    rig.serve()
    rig.api.generate("long", max_tokens=12)
    rig.api.until(lambda: rig.api.tokens("long") > 0)
    return rig


def test_tokens_go_on_with_gaps_between_them(rig):
    with asking(rig):
        rig.api.until(lambda: rig.api.tokens("long") > 2)
        before, began = rig.api.tokens("long"), time.monotonic()
        rig.api.until(lambda: rig.api.tokens("long") >= before + 5)
        took = (time.monotonic() - began) / 5
    assert took >= STEP_S * (1 + SHARE) * 0.75  # the first of the five may have been under way
    rig.api.finish("long")
    rig.check(rig.api, "long")


def test_the_word_tells_steps_from_gaps(rig):
    seen = set()
    with asking(rig) as arena:
        end = time.monotonic() + 5
        while len(seen) < 2 and time.monotonic() < end:
            seen.add(int(arena.turns()[0][0]) & 1 == 1)
            time.sleep(0.005)
    assert seen == {False, True}


def test_a_commit_that_comes_in_a_gap_is_sound(rig):
    with asking(rig):
        before = rig.api.tokens("long")
        rig.api.until(lambda: rig.api.tokens("long") > before + 1)  # a gap begins
        rig.store.push("s1", rig.store.write(1, 1))
    rig.api.finish("long")
    assert rig.versions("long") == [0, 1]
    rig.check(rig.api, "long")

import time

import pytest

from weight_manager import messages as store_messages
from weight_manager.messages import Rollback, RolledBack
from worker.event_loop import Interrupting

STEP_S = 0.4


@pytest.fixture
def begin(make_rig):
    """Serves version 0 in long steps, with a stream under way."""

    def begun(step_s):
        rig = make_rig(fake={"step_s": step_s, "kv_weights": False})
        rig.serve()
        rig.api.generate("long", max_tokens=5)
        rig.api.until(lambda: rig.api.tokens("long") > 0)
        time.sleep(step_s / 4)  # into the step
        return rig

    return begun


@pytest.fixture
def slow(begin):
    return begin(STEP_S)


def counter(rig, name):
    return rig.api.stats().counters.get(name, 0)


def test_a_commit_does_not_wait_for_a_long_step(begin):
    step_s = 2.0  # a push of this size takes milliseconds, and half a second where the processor is not free
    slow = begin(step_s)
    began = time.monotonic()
    report = slow.store.push("s1", slow.store.write(1, 1))
    assert time.monotonic() - began < step_s / 2
    assert report.stall_ms < step_s / 2 * 1000
    assert slow.api.finish("long")[2] == "length"
    assert slow.versions("long") == [0, 1]
    slow.check(slow.api, "long")
    assert counter(slow, "interrupted_steps") == 1


def test_the_step_after_an_interrupted_one_runs_to_its_end(slow):
    for number in range(1, 12):
        before = slow.api.tokens("long")
        slow.store.push(f"s{number}", slow.store.write(number, number % 2))
        if slow.api.finished("long"):
            break
        slow.api.pump(0.0)
        assert slow.api.tokens("long") >= before
    assert slow.api.finish("long")[2] == "length"
    slow.check(slow.api, "long")
    assert counter(slow, "interrupted_steps") <= counter(slow, "steps") + 1


def test_after_a_vote_no_step_begins_for_a_while_and_then_one_does(slow):
    assert slow.store.prepare("s1", slow.store.write(1, 1)).ok
    before = slow.api.tokens("long")
    slow.api.until(lambda: slow.api.tokens("long") > before)
    slow.store.send(Rollback("s1", "another replica is slow"))
    assert slow.store.expect(RolledBack) == RolledBack("s1")
    slow.api.finish("long")
    assert slow.versions("long") == [0]
    slow.check(slow.api, "long")


@pytest.mark.parametrize(("step_s", "tokens"), [(0.004, 100), (0.05, 24)])
def test_short_steps_are_left_alone(make_rig, step_s, tokens):
    rig = make_rig(fake={"step_s": step_s})
    rig.serve()
    rig.api.generate("long", max_tokens=tokens)
    rig.api.until(lambda: rig.api.tokens("long") > 2)
    for number in range(1, 6):
        rig.store.push(f"s{number}", rig.store.write(number, number % 2))
    rig.api.finish("long")
    assert counter(rig, "interrupted_steps") == 0


@pytest.mark.parametrize(
    ("part", "given_up"), [(0.01, False), (0.1, True), (0.79, True), (0.81, False), (1.2, False), (1.3, True)]
)
def test_a_step_that_is_nearly_through_is_let_go_to_its_end(part, given_up):
    """Given up late, it would make a gap of two steps; what takes longer than the one before it is another step."""
    now, last_s = 0.0, 0.25
    interrupting = Interrupting(waiting=lambda: True, clock=lambda: now)
    interrupting.begin(last_s)
    now = part * last_s
    assert interrupting.asked() is given_up


def test_a_commit_that_drains_lets_steps_run(slow):
    slow.store.send(store_messages.Prepare("s1", slow.store.write(1, 1), "wait", 10.0))
    assert slow.store.expect(store_messages.Prepared).ok
    assert slow.api.finish("long")[2] == "length"
    slow.store.send(Rollback("s1", "enough"))
    slow.store.expect(RolledBack)


def test_nothing_is_given_up_where_that_is_not_wanted(make_rig):
    rig = make_rig(fake={"step_s": STEP_S}, give_up_steps=False)
    rig.serve()
    rig.api.generate("long", max_tokens=4)
    rig.api.until(lambda: rig.api.tokens("long") > 0)
    time.sleep(STEP_S / 4)
    rig.store.push("s1", rig.store.write(1, 1))
    rig.api.finish("long")
    assert rig.versions("long") == [0, 1]
    assert counter(rig, "interrupted_steps") == 0

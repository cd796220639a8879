import time
from types import SimpleNamespace

import pytest

from weight_manager import messages as store_messages
from weight_manager.life import State
from weight_manager.messages import Live, Rollback, RolledBack
from worker.interrupting import Interrupting
from worker.membership import Session
from worker.stepping import Stepping

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


USUAL_S = 0.25


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def policy(*, steps=(USUAL_S,) * 4, given_up=False):
    clock = Clock()
    interrupting = Interrupting(waiting=lambda: clock.now >= clock.message, clock=clock)
    clock.message = 0.0
    for seconds in steps:
        interrupting.ended(seconds)
    if given_up:
        interrupting.given_up()
    return interrupting, clock


def commit(part, length_s, **begun):
    """A commit that comes after that part of a step of `length_s`: what those who are served wait between two tokens,
    and the commit itself, in usual steps."""
    interrupting, clock = policy(**begun)
    clock.message = part * length_s
    interrupting.begin()
    operations = 200
    for operation in range(1, operations + 1):
        clock.now = length_s * operation / operations
        if interrupting.asked():
            return (clock.now + USUAL_S) / USUAL_S, (clock.now - clock.message) / USUAL_S
    return length_s / USUAL_S, (length_s - clock.message) / USUAL_S


@pytest.mark.parametrize("slowed", [1.0, 1.3, 1.75, 3.0])
def test_a_commit_costs_those_who_are_served_less_than_half_a_step(slowed):
    """slowed: by a trainer that copies, which steps before it were not, and the one done again is not."""
    gaps = [commit(part / 100, slowed * USUAL_S)[0] for part in range(100)]
    assert max(gaps) <= max(1.45, slowed)
    before = [commit(part / 100, USUAL_S, steps=(*(USUAL_S,) * 3, slowed * USUAL_S))[0] for part in range(100)]
    assert max(before) <= 1.45


def test_a_commit_waits_for_a_fifth_of_a_step_on_average():
    waits = [commit(part / 100, USUAL_S)[1] for part in range(100)]
    assert sum(waits) / 100 <= 0.2
    assert max(waits) <= 0.6


def test_the_step_after_one_that_was_given_up_is_spared():
    assert commit(0.2, USUAL_S, given_up=True) == (1.0, pytest.approx(0.8))
    assert commit(0.2, USUAL_S)[0] < 1.3


def test_steps_whose_usual_length_is_short_are_left_alone_whatever_the_last_one_took():
    interrupting, clock = policy(steps=(0.05,) * 5 + (2.0,))
    interrupting.begin()
    clock.now = 0.3
    assert not interrupting.asked()
    assert interrupting.usual_s == 0.0


def still_for(until_flips=(), *, state=State.READY, in_flight="keep"):
    """Usual steps for which none begins after a vote at 10 s, or since what is in `state` was asked for, then too."""
    interrupting, clock = policy()
    session = Session("s1", Live("run", 1, 1, 0, ""), in_flight, 100.0, state, began=10.0, voted=10.0)
    membership = SimpleNamespace(session=session, until_flips=until_flips)
    adapters = SimpleNamespace(settles_by=lambda patience_s: 0.0)
    stepping = Stepping(
        *(None, None, membership, None, adapters), admits=lambda: True, interrupting=interrupting, clock=clock
    )
    return round(max(0.0, stepping.not_before - 10.0) / USUAL_S, 3)


def test_after_a_vote_no_step_begins_for_as_long_as_flips_have_taken_lately():
    assert still_for() == 0.75  # nothing is known: another replica may have most of a step to go
    assert still_for([0.002, 0.001, 0.9]) == 0.125  # they come at once, and one was late
    assert still_for([0.05, 0.06, 0.05]) == 0.48
    assert still_for([0.0, 0.0, 0.14]) == 0.75  # some replica has far to go at times
    assert still_for([3.0, 0.1, 4.0]) == 0.125  # longer than it can be waited for


def test_while_a_version_is_prepared_no_step_begins_for_a_quarter_of_one():
    assert still_for([0.001], state=State.PREPARING) == 0.25
    assert still_for([0.001], state=State.SEALED) == 0.25


def test_nobody_stands_still_for_a_commit_that_drains():
    assert still_for(in_flight="wait") == 0.0


def test_how_long_a_vote_waits_for_its_flip_is_remembered(slow):
    asked = time.monotonic()
    assert slow.store.prepare("s1", slow.store.write(1, 1)).ok
    time.sleep(0.1)
    assert slow.store.flip("s1").ok
    (took,) = slow.loop._leader.membership.until_flips
    assert 0.1 <= took <= time.monotonic() - asked


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

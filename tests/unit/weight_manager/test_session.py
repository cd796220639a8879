import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_manager.errors import IllegalTransition
from weight_manager.session import TRANSITIONS, Event, Machine, State, step

EVENTS = st.lists(st.sampled_from(Event), max_size=30)


def test_the_table_is_the_designed_one():
    assert {(a.name, e.name, b.name) for (a, e), b in TRANSITIONS.items()} == {
        ("IDLE", "BEGIN", "STAGING"),
        ("STAGING", "SEAL_OK", "SEALED"),
        ("STAGING", "ABORT", "IDLE"),
        ("SEALED", "ALL_PREPARED", "COMMITTING"),
        ("SEALED", "ABORT", "IDLE"),
        ("COMMITTING", "ALL_FLIPPED", "IDLE"),
        ("COMMITTING", "ROLLED_BACK", "IDLE"),
    }


@given(EVENTS)
def test_a_machine_takes_exactly_the_steps_of_the_table(events):
    machine = Machine()
    state = State.IDLE
    for event in events:
        if (state, event) in TRANSITIONS:
            state = machine.fire(event)
        else:
            with pytest.raises(IllegalTransition):
                machine.fire(event)
        assert machine.state is state


@given(EVENTS)
def test_every_version_that_goes_live_was_sealed_and_prepared(events):
    machine = Machine(keep=1000)
    for event in events:
        if (machine.state, event) in TRANSITIONS:
            machine.fire(event)
    path = [event for _, event, _, _ in machine.history]
    for i, event in enumerate(path):
        if event is Event.ALL_FLIPPED:
            assert path[i - 3 : i] == [Event.BEGIN, Event.SEAL_OK, Event.ALL_PREPARED]


@pytest.mark.parametrize("state", State)
def test_every_state_leads_back_to_idle(state):
    reached = {state}
    for _ in State:
        reached |= {b for (a, _), b in TRANSITIONS.items() if a in reached}
    assert State.IDLE in reached


def test_an_illegal_step_tells_how_it_came_to_it():
    machine = Machine()
    machine.fire(Event.BEGIN, "session a1")
    machine.fire(Event.SEAL_OK)
    with pytest.raises(
        IllegalTransition, match=r"BEGIN is not allowed in SEALED.*IDLE -BEGIN-> STAGING \(session a1\)"
    ):
        machine.fire(Event.BEGIN)
    with pytest.raises(IllegalTransition, match="history: none"):
        Machine().fire(Event.SEAL_OK)


def test_step_is_pure():
    assert step(State.IDLE, Event.BEGIN) is State.STAGING
    assert step(State.IDLE, Event.BEGIN) is State.STAGING

"""The table of a version's life: whole, sound, and what the design says about each state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_manager.errors import IllegalTransition
from weight_manager.life import (
    ABORTS,
    ANSWERS,
    ASKED,
    CELLS,
    Bound,
    Bug,
    Event,
    Go,
    Ignored,
    Life,
    Refused,
    Role,
    State,
    bound,
    may_end,
    states_of,
)

EVERY = [(role, state, event) for role in Role for state in states_of(role) for event in Event]


@pytest.mark.parametrize("role", Role)
def test_every_event_is_decided_in_every_state_and_says_why_nothing_happens(role):
    for state in states_of(role):
        for event in Event:
            cell = CELLS.get((role, state, event))
            assert cell is not None, f"nobody has decided {event.name} in {state.name} of a {role.value}"
            assert isinstance(cell, Go) or cell.why
            assert not isinstance(cell, Go) or cell.to in states_of(role)
    assert set(CELLS) == set(EVERY), "cells of states that the role does not have"


def test_the_four_questions_are_answered_for_every_state():
    assert set(ANSWERS) == set(State)
    for state in State:
        assert all(vars(ANSWERS[state]).values()), state
    for role in Role:
        for state in states_of(role):
            forever = bound(role, state) is Bound.NONE
            assert forever == (state is State.OVER), "a wait without an end"


@pytest.mark.parametrize("role", Role)
def test_every_state_is_reached_and_ends(role):
    moves = {(s, cell.to) for (r, s, _), cell in CELLS.items() if r is role and isinstance(cell, Go)}
    reached, ends = {State.STAGING}, {State.OVER}
    for _ in State:
        reached |= {b for a, b in moves if a in reached}
        ends |= {a for a, b in moves if b in ends}
    assert reached == ends == set(states_of(role))


def test_what_is_recorded_or_voted_for_is_not_taken_back():
    for role in Role:
        for state in (State.LIVE, State.OVER):
            assert may_end(role, state) == ()
    assert may_end(Role.RELAY, State.DOUBT) == (Event.WITHDRAWN,)
    for event in (Event.OPERATOR_ABORTS, Event.TRAINER_ABORTS):
        assert isinstance(CELLS[Role.ROOT, State.LIVE, event], Refused), "who asks is told that it is live"
    assert isinstance(CELLS[Role.RELAY, State.DOUBT, Event.OPERATOR_ABORTS], Refused)


def test_an_operator_may_end_whatever_nobody_has_promised():
    for role in Role:
        for state in states_of(role):
            promised = state in (State.DOUBT, State.LIVE, State.UNDOING, State.OVER)
            assert (Event.OPERATOR_ABORTS in may_end(role, state)) is not promised


def test_whoever_was_asked_is_told_to_go_back():
    for (role, state, event), cell in CELLS.items():
        if event in ABORTS and isinstance(cell, Go):
            asked = state in (*ASKED, State.DOUBT)
            assert cell.to is (State.UNDOING if asked else State.OVER), (role, state, event)


@pytest.mark.parametrize("role", [Role.ROOT, Role.RELAY])
def test_what_cannot_be_written_down_is_undone_where_this_store_has_the_word(role):
    """Below, it has voted when it finds that out: it is asked above until it is known."""
    assert CELLS[role, State.FLIPPED, Event.UNWRITTEN] == Go(State.UNDOING)
    assert role is Role.ROOT or isinstance(CELLS[role, State.DOUBT, Event.UNWRITTEN], Ignored)


def test_a_trainer_that_is_silent_after_its_commit_ends_nothing():
    for state in ASKED:
        if state in states_of(Role.ROOT):
            assert isinstance(CELLS[Role.ROOT, state, Event.TRAINER_SILENT], Ignored)


def test_what_was_whole_once_stays_where_it_is():
    for role in Role:
        states = states_of(role)
        for state in states[states.index(State.CHECKING) + 1 :]:
            assert isinstance(CELLS[role, state, Event.WHOLE], Ignored)


def test_the_store_above_is_told_where_its_word_comes_to_nothing_and_not_where_it_comes_early():
    relay = {event: {s: CELLS[Role.RELAY, s, event] for s in states_of(Role.RELAY)} for event in Event}
    for state in (State.STAGING, State.CHECKING, State.UNDOING, State.OVER):
        assert isinstance(relay[Event.PREPARE][state], Refused)
        assert isinstance(relay[Event.FLIP][state], Refused)
    assert isinstance(relay[Event.FLIP][State.PREPARING], Ignored), "it votes yet"
    assert isinstance(relay[Event.RECORDED][State.UNDOING], Refused), "it is not served here"


def test_a_store_below_neither_takes_commits_nor_records_what_it_has_not_voted_for():
    for state in states_of(Role.RELAY):
        for event in (Event.COMMIT, Event.OPERATOR_COMMITS):
            assert isinstance(CELLS[Role.RELAY, state, event], Refused)
        assert isinstance(CELLS[Role.RELAY, state, Event.RECORDED], Go) is (state is State.DOUBT)


@given(st.sampled_from(Role), st.lists(st.sampled_from(Event), max_size=60))
def test_a_life_takes_exactly_the_steps_of_the_table(role, events):
    life = Life(role, keep=100)
    for event in events:
        before, cell = life.state, CELLS[role, life.state, event]
        if isinstance(cell, Bug):
            with pytest.raises(IllegalTransition):
                life.fire(event)
        else:
            assert life.fire(event, "x") is cell
        assert life.state is (cell.to if isinstance(cell, Go) else before)
    path = [event for _, event, _, _ in life.trail]
    way_up = [Event.SENT, Event.WHOLE, Event.PREPARE if role is Role.RELAY else Event.COMMIT, Event.PREPARED]
    way_up += [Event.FLIP] * (role is Role.RELAY) + [Event.ALL_FLIPPED, Event.ALL_FENCED]
    way_up += [Event.NOTED] * (role is Role.RELAY) + [Event.RECORDED]
    asked = [Event.COMMIT if event is Event.OPERATOR_COMMITS else event for event in path]
    assert Event.RECORDED not in asked or asked[: len(way_up)] == way_up, "what goes live went the whole way"


def test_a_bug_tells_how_it_came_to_it():
    life = Life(Role.ROOT)
    life.fire(Event.SENT, "session a1")
    with pytest.raises(IllegalTransition, match=r"RECORDED in CHECKING of a root.*STAGING -SENT-> CHECKING \(session"):
        life.fire(Event.RECORDED)
    with pytest.raises(IllegalTransition, match="so far: nothing"):
        Life(Role.ROOT).fire(Event.RECORDED)

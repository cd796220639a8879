import pytest

from worker.lifecycle import TRANSITIONS, Event, IllegalTransition, Lifecycle, WorkerState, step

S, E = WorkerState, Event


def test_the_table_covers_every_live_state_but_for_what_is_refused():
    refused = {(s, e) for s in S for e in E if (s, e) not in TRANSITIONS and s not in (S.STOPPED, S.FAILED)}
    assert refused == {(S.STARTING, E.CLEAR), (S.STARTING, E.RELOAD)}


@pytest.mark.parametrize("end", [S.STOPPED, S.FAILED])
def test_nothing_leads_out_of_an_end(end):
    assert {after for (state, _), after in TRANSITIONS.items() if state is end} == {end}


def test_what_the_design_asks_for():
    walk = [
        E.MAPPED,
        E.PAUSE,
        E.RESUME,
        E.CLEAR,
        E.MAPPED,
        E.RELOAD,
        E.PAUSE,
        E.CLEAR,
        E.RELOAD,
        E.LOST,
        E.MAPPED,
        E.STOP,
    ]
    states = [S.STARTING]
    for event in walk:
        states.append(step(states[-1], event))
    assert " ".join(s.value for s in states) == (
        "starting serving paused serving cleared cleared serving paused cleared serving starting serving stopped"
    )


def test_a_cleared_worker_that_lost_its_slot_stays_cleared():
    assert step(S.CLEARED, E.LOST) is S.CLEARED


def test_a_refusal_names_state_event_and_what_is_possible():
    with pytest.raises(IllegalTransition, match=r"cannot clear while starting; possible now: .*mapped"):
        step(S.STARTING, E.CLEAR)
    with pytest.raises(IllegalTransition, match="it has ended"):
        step(S.FAILED, E.RESUME)


def test_a_refused_event_leaves_the_cell_alone_and_changes_are_told_once():
    told = []
    cell = Lifecycle(lambda state, reason: told.append((state, reason)))
    with pytest.raises(IllegalTransition):
        cell.apply(E.CLEAR)
    cell.apply(E.MAPPED, "version 3")
    cell.apply(E.RESUME)
    assert cell.state is S.SERVING
    assert told == [(S.SERVING, "version 3")]

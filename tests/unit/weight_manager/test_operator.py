"""Calls of the API: each gets its one answer, whatever becomes of it."""

from types import SimpleNamespace

import pytest

from weight_manager.errors import IllegalTransition
from weight_manager.history import Intent
from weight_manager.life import Event, Life, Role
from weight_manager.messages import AbortSession, CommitSession, GetStatus, Live, RollbackWeights
from weight_manager.operator import UNTOLD_S, Operator


class Coordinator:
    """Fails with this, whatever is asked."""

    def __init__(self, error):
        self._error = error

    def __getattr__(self, name):
        raise self._error


def an_operator(coordinator, said, lines=None):
    """With nothing else behind it. said: what it sends."""
    return Operator(
        *(SimpleNamespace(), coordinator),
        replicas=None,
        lines=lines,
        adapters=None,
        files=None,
        counters=None,
        relay=lambda now: None,
        send=lambda peer, message: said.append(message) or True,
    )


@pytest.fixture
def ask():
    def ask(error, call):
        said = []
        an_operator(Coordinator(error), said).request(b"api", call)
        return said

    return ask


@pytest.mark.parametrize("call", [RollbackWeights("x"), AbortSession("x")])
def test_a_call_that_fails_is_answered_and_not_left_to_its_deadline(ask, call):
    (answer,) = ask(ZeroDivisionError(), call)
    assert (answer.call, answer.ok, answer.code) == ("x", False, "internal")
    assert "ZeroDivisionError" in answer.message


def test_when_nobody_knows_what_is_live_the_store_ends(ask):
    with pytest.raises(IllegalTransition):
        ask(IllegalTransition("twice"), RollbackWeights("x"))


def test_subscribers_hear_of_a_push_within_a_while_and_of_its_end_at_once():
    history = SimpleNamespace(live=None)
    coordinator = SimpleNamespace(changes=0, idle=True, session=None, history=history)
    lines = SimpleNamespace(changes=0, idle=True)
    said = []
    operator = an_operator(coordinator, said, lines)
    operator.status = lambda call: coordinator.changes + lines.changes
    operator.request(b"api", GetStatus("", subscribe=True))
    assert said == [0]
    lines.changes, lines.idle = 1, False
    operator.publish(1.0)
    assert operator.next_deadline() == 1.0 + UNTOLD_S
    lines.changes = 2
    operator.publish(1.0 + UNTOLD_S / 2)
    assert said == [0]
    operator.publish(1.0 + UNTOLD_S)
    assert said == [0, 2]
    assert operator.next_deadline() is None
    coordinator.changes, coordinator.idle = 1, False
    operator.publish(2.0)
    lines.idle = coordinator.idle = True
    operator.publish(2.001)
    assert said == [0, 2, 3]


@pytest.mark.parametrize("undone", [False, True])
def test_a_commit_is_answered_by_what_became_of_it_and_not_by_what_is_live_by_then(undone):
    """The next version may be live before whoever waits for this one is told."""
    life = Life(Role.ROOT)
    for event in (Event.SENT, Event.WHOLE, Event.OPERATOR_COMMITS):
        life.fire(event)
    intent = Intent("run", 7, "push")
    session = SimpleNamespace(intent=intent, life=life, seconds={"commit": 0.1})
    coordinator = SimpleNamespace(changes=0, idle=True, session=session, history=SimpleNamespace(live=None))
    coordinator.last_error, coordinator.check_root = None, lambda: None
    coordinator.commit = lambda *_: None
    said = []
    operator = an_operator(coordinator, said, SimpleNamespace(changes=0, idle=True))
    operator._config.patience = lambda seconds: seconds
    operator.request(b"api", CommitSession("x"))
    coordinator.changes = 1
    operator.publish(1.0)
    assert not said
    if undone:
        life.fire(Event.REFUSED)
        coordinator.last_error = {"code": "refused", "message": "replica 0 cannot prepare"}
    else:
        for event in (Event.PREPARED, Event.ALL_FLIPPED, Event.ALL_FENCED, Event.RECORDED):
            life.fire(event)
    coordinator.session, coordinator.changes = None, 2
    coordinator.history.live = Live("run", 8 if not undone else 7, 9, 0, "d" * 16)
    operator.publish(2.0)
    (answer,) = said
    assert (answer.call, answer.ok) == ("x", not undone)
    if undone:
        assert answer.message == "replica 0 cannot prepare"
    else:
        assert answer.data == {"version": 7, "seconds": {"commit": 0.1}}

"""Calls of the API: each gets its one answer, whatever becomes of it."""

from types import SimpleNamespace

import pytest

from weight_manager.errors import IllegalTransition
from weight_manager.messages import AbortSession, GetStatus, RollbackWeights
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

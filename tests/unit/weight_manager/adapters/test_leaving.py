"""Unloads that wait until nobody begins anything under a name."""

from types import SimpleNamespace

import pytest

from weight_manager.adapters.leaving import Leaving
from weight_manager.errors import PushRefused

AUDIENCE = SimpleNamespace(serving=lambda name: {2} if name == "served" else set())
MEMBERS = SimpleNamespace(beginning=lambda name, now: {})


def test_an_unload_is_answered_once_nobody_serves_it_or_at_its_deadline():
    leaving, answers = Leaving(AUDIENCE, MEMBERS), []
    leaving.add("served", 10.0, answers.append)
    leaving.add("gone", 10.0, answers.append)
    leaving.tick({}, 9.0)
    assert (answers, leaving.names, leaving.next_deadline()) == ([None], ["served"], 10.0)
    leaving.tick({}, 10.0)
    (refusal,) = answers[1:]
    assert isinstance(refusal, PushRefused)
    assert refusal.code == "deadline"
    assert "replica 2" in refusal.message
    assert (leaving.names, leaving.next_deadline()) == ([], None)


def test_of_a_name_that_was_loaded_again_nobody_is_waited_for():
    leaving, answers = Leaving(AUDIENCE, MEMBERS), []
    leaving.add("served", 10.0, answers.append)
    leaving.tick({"served"}, 1.0)
    assert answers == [None]


def test_an_unload_whose_answer_fails_is_over_all_the_same():
    def fails(_):
        raise OSError("nobody is there")

    leaving = Leaving(AUDIENCE, MEMBERS)
    leaving.add("gone", 10.0, fails)
    with pytest.raises(OSError, match="nobody is there"):
        leaving.tick({}, 1.0)
    leaving.tick({}, 1.0)
    assert leaving.names == []

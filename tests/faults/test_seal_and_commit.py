"""A seal that is to be committed at once: `Sealed` and then what a `Commit` is answered with, or one refusal."""

import pytest

from rollout_client import protocol as wire
from tests.faults.test_push_forms import join, shards


@pytest.fixture
def staged(trainer, weights):
    """A trainer that has sent all of version 2."""
    one = trainer()
    one.placement = one.begin(weights(2), 2)
    one.say(wire.Written(one.placement.session, one.write()))
    return one


def test_it_is_live_without_a_commit_of_its_own(store, replica, staged, weights, digest_of):
    r = replica()
    session = staged.placement.session
    assert isinstance(staged.ask(wire.Seal(session, commit=True)), wire.Sealed)
    committed = staged.hear(5)
    assert (committed.version, committed.digest) == (2, digest_of(weights(2)))
    assert store.serving() == r.served() == (2, digest_of(weights(2)))
    assert staged.ask(wire.Commit(session)) == committed, "who asks again is told again"


def test_bytes_that_are_wrong_are_refused_once_and_nothing_is_committed(store, replica, trainer, weights, digest_of):
    r, one = replica(), trainer()
    placement = one.begin(weights(2), 2)
    wrong = [(copy, digest ^ (copy == 0)) for copy, digest in one.write()]
    one.say(wire.Written(placement.session, wrong))
    assert one.ask(wire.Seal(placement.session, commit=True)).code == "checksum_mismatch"
    assert one.quiet(0.5)
    assert store.serving() == r.served()
    assert store.serving()[0] != 2


def test_a_vote_against_it_is_the_answer_to_the_commit(store, replica, staged):
    r = replica(prepare="no")
    before = store.serving()
    assert isinstance(staged.ask(wire.Seal(staged.placement.session, commit=True)), wire.Sealed)
    assert staged.hear(5).code == "refused"
    assert store.serving() == before == r.served()


@pytest.mark.parametrize("first_too", [True, False])
def test_ranks_are_told_whether_they_asked_with_their_seal_or_after_it(store, trainer, weights, digest_of, first_too):
    a, b = (join(trainer, part, rank) for rank, part in enumerate(shards(weights(5), 2)))
    for one in (a, b):
        one.say(wire.Written(one.placement.session, one.write()))
    a.say(wire.Seal(a.placement.session, commit=first_too))
    assert isinstance(b.ask(wire.Seal(b.placement.session, commit=True)), wire.Sealed)
    assert isinstance(a.hear(5), wire.Sealed)
    committed = b.hear(5)
    assert committed.digest == digest_of(weights(5))
    assert (a.hear(5) if first_too else a.ask(wire.Commit(a.placement.session))) == committed
    assert store.serving() == (committed.version, committed.digest)

"""The stores below as the one above sees them: who may join and serve, and what a failure of either costs."""

import errno
import time
from types import SimpleNamespace

import pytest

from tests.faults.small_model import LAYOUT
from weight_manager.config import StoreConfig
from weight_manager.history import History, Record
from weight_manager.messages import Live
from weight_manager.relay import messages as wire
from weight_manager.relay.downstreams import Downstreams
from weight_manager.relay.members import Members
from weight_manager.relay.messages import Holdings, VersionName, version_of
from weight_manager.relay.roster import Enrolment
from weight_manager.relay.stream import Stream
from weight_manager.relay.upstream import own_name
from weight_manager.watching import Watching


class Above:
    """Members whose words are noted down instead of sent, and coordinators that have nothing to do."""

    def __init__(self, directory):
        config = StoreConfig(run_dir=directory, model=directory, relay_lease_s=2.0)
        self.history = History(directory / "weights.json", 10)
        self.said = []
        self.below = Members(config, LAYOUT, history=self.history, lease=None)
        self.model = SimpleNamespace(settled=True, ballot=None, session=None, changes=0, history=self.history)
        self.model.below = self.line = Downstreams(
            *(config, LAYOUT),
            coordinator=self.model,
            members=self.below,
            slots=None,
            history=self.history,
            background=None,
        )
        self.adapters = {}
        self.below.live = lambda: Holdings(version_of(self.history.live), self.adapters)
        self.below.lines = lambda: [self.model]
        self.taken = True
        router = SimpleNamespace(send=self._send)
        self.below.roster.open(router, None, Watching())

    def _send(self, peer, content):
        self.said.append((peer, wire.decode_from_above(content)))
        return self.taken

    def join(self, peer, store, name):
        self.said.clear()
        self.below.request(peer, wire.Join(store, name, LAYOUT.digest, Holdings()))
        (told,) = [message for to, message in self.said if to == peer]
        return told

    @property
    def names(self):
        return [store.name for store in self.below.roster.all()]


@pytest.fixture
def above(tmp_path):
    return Above(tmp_path)


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_two_stores_of_one_name_do_not_vote_as_one(above):
    assert isinstance(above.join(b"1", "1234aaaa", "t@host"), wire.Joined)
    refused = above.join(b"2", "1234bbbb", "t@host")
    assert isinstance(refused, wire.NotJoined)
    assert refused.refused
    assert [store.id for store in above.below.roster.all()] == ["1234aaaa"]
    assert isinstance(above.join(b"3", "1234aaaa", "t@host"), wire.Joined), "a new life of the first one"


def test_stores_that_agree_in_a_few_digits_have_names_of_their_own(tmp_path):
    config = StoreConfig(run_dir=tmp_path, model=tmp_path)
    assert own_name(config, "1234aaaabbbbcccc") != own_name(config, "1234ddddeeeeffff")


def test_a_full_disk_keeps_stores_out_and_does_not_end_the_store(above, monkeypatch):
    """Who is not written down is not waited for by the next life, and may not have a lease."""
    above.join(b"1", "a" * 16, "first")
    monkeypatch.setattr("weight_manager.history.write_atomically", full)
    refused = above.join(b"2", "b" * 16, "second")
    assert isinstance(refused, wire.NotJoined)
    assert "No space left" in refused.message
    assert above.names == ["first"]
    above.below.request(b"1", wire.Leave())
    assert above.names == []
    monkeypatch.undo()
    assert isinstance(above.join(b"2", "b" * 16, "second"), wire.Joined)
    assert above.history.saved.members == ["second"]


def test_a_store_whose_message_cannot_be_handled_must_join_again(above):
    above.join(b"1", "a" * 16, "first")
    above.below.broken(b"1", "sent nonsense")
    (_, told) = above.said[-1]
    assert isinstance(told, wire.NotJoined)
    assert above.names == []


def test_a_store_that_misses_a_message_must_join_again(above):
    """What it was not told it would wait for; the next thing that it says is answered with `NotJoined`."""
    above.join(b"1", "a" * 16, "first")
    above.taken = False
    above.below.request(b"1", wire.Beat(1, Holdings()))
    assert above.below.next_deadline() == 0.0
    above.below.tick(0.0)
    assert above.names == []
    above.taken = True
    above.below.request(b"1", wire.Beat(2, Holdings()))
    assert isinstance(above.said[-1][1], wire.NotJoined)


def test_whoever_may_be_serving_and_does_not_vote_is_waited_for(above):
    """Also a store that joined again after the others had sealed: its lease goes on, and it is not staged."""
    above.join(b"1", "a" * 16, "first")
    (store,) = above.below.roster.all()
    store.serves_until = 10.0
    assert above.line.outsiders(9.0) == {"first": "is not staged"}
    assert above.below.serving(9.0)
    assert above.line.outsiders(10.0) == {}
    assert not above.below.serving(10.0)
    above.below.roster.remove(store)
    above.below.roster.absent["first"] = 20.0
    assert above.line.outsiders(19.0) == {"first": "is away"}
    assert above.below.serving(19.0)


@pytest.mark.parametrize("serving", [False, True])
def test_stores_below_one_that_stops_are_waited_for(above, serving):
    """They serve on under leases that it gave them, none of which is longer than its own."""
    above.join(b"1", "a" * 16, "first")
    (store,) = above.below.roster.all()
    now = time.monotonic()
    store.serves_until = now + 60
    above.below.request(b"1", wire.Leave(serving))
    assert above.names == []
    assert above.line.outsiders(now) == ({"first": "is away"} if serving else {})


def test_a_join_that_was_held_does_not_take_the_place_of_a_later_one(above):
    """Its connection is gone; the later one's would be known and its store would not."""
    above.model.settled = False
    above.below.request(b"old", wire.Join("a" * 16, "first", LAYOUT.digest, Holdings()))
    above.model.settled = True
    above.join(b"new", "a" * 16, "first")
    above.below.tick(0.0)
    (store,) = above.below.roster.all()
    assert store.identity == b"new"
    assert above.below.roster.of_peer(b"old") is None


def test_a_commit_gives_no_lease_to_a_store_that_does_not_vote_in_it(above):
    """The commit waits for the leases that there were when it began, and for no other."""
    live = Live("run", 1, 1, 0, "d" * 16)
    above.history.commit(live, Record("run", 1, 1, "d" * 16, 0.0, "push"))
    above.below.request(b"1", wire.Join("a" * 16, "first", LAYOUT.digest, Holdings(version_of(live))))

    def leased():
        above.below.request(b"1", wire.Beat(1, Holdings(version_of(live))))
        return above.said[-1][1].lease_s

    coordinator = above.model
    assert leased() > 0
    coordinator.settled, coordinator.ballot = False, SimpleNamespace(voters={0, "second"})
    assert leased() == 0
    coordinator.ballot.voters.add("first")
    assert leased() > 0
    coordinator.settled, coordinator.ballot = True, None
    assert leased() > 0


def test_a_store_that_says_it_holds_another_version_than_is_believed_gets_no_lease(above):
    """It has heard of a commit that was taken back since: it would serve what is not live."""
    old, new = Live("run", 1, 1, 0, "d" * 16), Live("run", 2, 2, 1, "e" * 16)
    above.history.commit(old, Record("run", 1, 1, "d" * 16, 0.0, "push"))
    above.below.request(b"1", wire.Join("a" * 16, "first", LAYOUT.digest, Holdings(version_of(old))))
    for held in (new, None):
        above.said.clear()
        above.below.request(b"1", wire.Beat(1, Holdings(held and version_of(held))))
        assert not above.said, "neither a lease nor its end"
    above.below.request(b"1", wire.Beat(2, Holdings(version_of(old))))
    assert above.said[-1][1].lease_s > 0


def test_a_store_that_joins_twice_hears_which_session_goes_on(above):
    above.join(b"1", "a" * 16, "first")
    (store,) = above.below.roster.all()
    store.enrolments[""] = Enrolment("the session", Stream(LAYOUT), memoryview(b""), required=True)
    assert above.join(b"1", "a" * 16, "first").sessions == ["the session"]


def test_a_store_that_asks_during_a_commit_of_an_adapter_hears_that_it_is_not_decided(above):
    above.join(b"1", "a" * 16, "first")
    line = SimpleNamespace(settled=False, ballot=SimpleNamespace(session="s", voters={"first"}))
    line.below = Downstreams(
        *(above.below._config, LAYOUT),
        coordinator=line,
        members=above.below,
        slots=None,
        history=above.history,
        background=None,
    )
    above.below.lines = lambda: [above.model, line]
    assert above.join(b"1", "a" * 16, "first").undecided == ["s"]
    line.settled = True
    assert above.join(b"1", "a" * 16, "first").undecided == []


@pytest.mark.parametrize("moving", [False, True])
def test_a_commit_waits_for_whom_a_store_that_holds_its_version_has_still_to_move(above, moving):
    """It missed the word that it was recorded, and learned it by joining again: those below it have not heard yet."""
    live = Live("run", 1, 1, 0, "d" * 16)
    above.join(b"1", "a" * 16, "first")
    above.history.commit(live, Record("run", 1, 1, "d" * 16, 0.0, "push"))
    moved = []
    above.model.ballot = SimpleNamespace(live=live, store_finalized=lambda store, *_: moved.append(store))
    above.model.drive = lambda now: None
    above.below.request(b"1", wire.Holds(version_of(live), moving=moving))
    (store,) = above.below.roster.all()
    assert store.holds.model == version_of(live), "it may have a lease"
    assert moved == ([] if moving else ["first"])


@pytest.mark.parametrize("last", ["is over", "waits for it", "waits for others"])
def test_a_store_that_leaves_ends_the_push_that_waits_for_it_whatever_the_last_commit_waits_for(above, last):
    """A trainer pushes on while replicas and stores still report of the version before. A store that is told to stop
    then was taken out of that commit alone: the push waited for it until its deadline.
    """
    above.join(b"1", "a" * 16, "first")
    (store,) = above.below.roster.all()
    gone, ended = [], []
    if last != "is over":
        voters = {"first"} if last == "waits for it" else {0}
        above.model.ballot = SimpleNamespace(voters=voters, gone=lambda store, *_: gone.append(store))
        above.model.drive = lambda now: None
    session = SimpleNamespace(id="s", intent=SimpleNamespace(source="push"))
    above.line._session = above.model.session = session
    store.enrolments[""] = Enrolment("s", Stream(LAYOUT), memoryview(b""), required=True)
    above.model.abort = lambda session, refusal, now: ended.append((session, refusal.retryable, refusal.message))
    above.below.request(b"1", wire.Leave())
    assert ended == [(session, True, "store first has stopped; push again")]
    assert gone == ([] if last == "is over" else ["first"])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_while_an_adapter_of_another_shape_is_pushed_its_live_version_hears_of_stores_too(above, order):
    """Two lines have its name: one is live and one is not yet."""
    live = Live("run", 7, 2, 0, "e" * 16)
    above.join(b"1", "a" * 16, "first")
    moved = []
    lines = []
    for ballot in (SimpleNamespace(live=live, store_finalized=lambda store, *_: moved.append(store)), None):
        history = SimpleNamespace(saved=SimpleNamespace(adapter="x", shape=None), live=None)
        line = SimpleNamespace(settled=True, ballot=ballot, changes=0, history=history, drive=lambda now: None)
        line.below = Downstreams(
            *(above.below._config, LAYOUT),
            coordinator=line,
            members=above.below,
            slots=None,
            history=history,
            background=None,
        )
        lines.append(line)
    above.below.lines = lambda: [above.model, *(lines[i] for i in order)]
    above.adapters = {"x": version_of(live)}
    above.below.request(b"1", wire.Holds(version_of(live), "x"))
    (store,) = above.below.roster.all()
    assert store.holds == Holdings(None, {"x": version_of(live)})
    assert moved == ["first"]


def test_what_a_store_holds_of_an_adapter_that_is_not_live_is_not_believed(above):
    above.join(b"1", "a" * 16, "first")
    above.below.request(b"1", wire.Holds(X, "x"))
    (store,) = above.below.roster.all()
    assert store.holds == Holdings()


X, Y = VersionName("run", 1, "a" * 16), VersionName("run", 2, "b" * 16)


@pytest.mark.parametrize(
    ("held", "leased"),
    [({"x": X, "y": Y}, True), ({"y": Y, "x": X}, True), ({"x": X}, False), ({"x": X, "y": X}, False)],
)
def test_only_a_store_that_holds_every_adapter_that_is_live_may_serve(above, held, leased):
    live = Live("run", 1, 1, 0, "d" * 16)
    above.history.commit(live, Record("run", 1, 1, "d" * 16, 0.0, "push"))
    above.adapters = {"x": X, "y": Y}
    holds = Holdings(version_of(live), held)
    above.below.request(b"1", wire.Join("a" * 16, "first", LAYOUT.digest, holds))
    above.below.request(b"1", wire.Beat(1, holds))
    assert (above.said[-1][1].lease_s > 0) is leased


def test_a_store_that_holds_an_adapter_too_many_is_told_and_has_no_lease_before_it_has_unloaded_it(above):
    live = Live("run", 1, 1, 0, "d" * 16)
    above.history.commit(live, Record("run", 1, 1, "d" * 16, 0.0, "push"))
    above.adapters = {"y": Y}
    many, right = (Holdings(version_of(live), held) for held in ({"x": X, "y": Y}, {"y": Y}))
    above.below.request(b"1", wire.Join("a" * 16, "first", LAYOUT.digest, many))
    for beat in (1, 2):  # it is said again: it may not have been able to
        above.below.request(b"1", wire.Beat(beat, many))
        assert above.said[-1][1] == wire.Adapters(["y"])
    (store,) = above.below.roster.all()
    store.serves_until = 1e9
    assert above.below.beginning("x", 0.0) == {"first": 1e9}
    above.below.request(b"1", wire.Beat(3, right, ["x"]))
    assert above.said[-1][1].lease_s > 0
    assert "first" in above.below.beginning("x", 0.0), "replicas of it have not said so yet"
    above.below.request(b"1", wire.Beat(4, right))
    assert above.below.beginning("x", 0.0) == {}


def test_a_store_that_comes_back_without_an_adapter_is_not_taken_to_speak_for_those_below_it(above):
    """It was killed after it had unloaded it, and before they had: they have leases of its last life."""
    live = Live("run", 1, 1, 0, "d" * 16)
    above.history.commit(live, Record("run", 1, 1, "d" * 16, 0.0, "push"))
    above.adapters = {"x": X}
    holds = Holdings(version_of(live), {"x": X})
    above.below.request(b"1", wire.Join("a" * 16, "first", LAYOUT.digest, holds))
    above.below.request(b"1", wire.Beat(1, holds))
    above.adapters = {}
    above.below.unloaded("x")
    now = time.monotonic()
    assert above.below.beginning("x", now).keys() == {"first"}
    until = above.below.beginning("x", now)["first"]
    rest = Holdings(version_of(live))
    above.below.request(b"2", wire.Join("a" * 16, "first", LAYOUT.digest, rest))
    above.below.request(b"2", wire.Beat(1, rest))
    assert above.said[-1][1].lease_s > 0
    assert above.below.beginning("x", now) == {"first": until}
    assert above.below.beginning("x", until) == {}


def test_who_does_not_know_what_is_live_has_nobody_unload_anything(above):
    """A store in the middle that has restarted without its adapters: those below have them still."""
    above.below._lease = SimpleNamespace(closed=True, left_s=lambda now: 0.0)
    above.below.request(b"1", wire.Join("a" * 16, "first", LAYOUT.digest, Holdings(None, {"x": X})))
    above.below.request(b"1", wire.Beat(1, Holdings(None, {"x": X})))
    assert not [message for _, message in above.said if isinstance(message, wire.Adapters)]

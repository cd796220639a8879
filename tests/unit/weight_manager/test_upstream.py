"""A store that follows another one whose messages make no sense: that costs the session with it, and nothing else."""

import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from tests.faults.small_model import LAYOUT
from weight_manager.adapters.plan import AdapterShape
from weight_manager.config import StoreConfig
from weight_manager.errors import IllegalTransition
from weight_manager.life import Event
from weight_manager.messages import Live
from weight_manager.relay import messages as wire
from weight_manager.relay import upstream as module
from weight_manager.relay.lease import Lease
from weight_manager.relay.messages import Holdings, version_of
from weight_manager.relay.relayed import Relayed
from weight_manager.relay.upstream import Upstream
from weight_manager.watching import Watching


class Coordinator:
    """Of a store without weights; `fails` is what happens to whoever ends its session first."""

    settled, ballot, in_doubt, layout, changes, session = True, None, False, LAYOUT, 0, None
    history = SimpleNamespace(saved=SimpleNamespace(id="a" * 16), live=None)

    def __init__(self, fails=None):
        self.fails = fails

    def abort(self, *_):
        fails, self.fails = self.fails, None
        if fails is not None:
            raise fails


def relayed(coordinator, stage):
    """What a session of the store above came to here. stage: of it, or its name."""
    stage = wire.Stage(stage, "run", 1) if isinstance(stage, str) else stage
    made = Relayed(stage, coordinator, *[SimpleNamespace()] * 4)
    made.session = coordinator.session = SimpleNamespace(life=SimpleNamespace(state=None))
    return made


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """(the store below, a function that says something to it from above and returns what it says after that)."""
    monkeypatch.setattr(module, "JOIN_AGAIN_S", 0.0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"

        def connect():
            socket = context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            socket.connect(endpoint)
            return socket

        config = StoreConfig(run_dir=tmp_path, model=tmp_path, upstream=endpoint)
        arena = SimpleNamespace(needs_lease=True, lease=lambda until: None)
        lease = Lease(arena, config.relay_lease_s)
        members = SimpleNamespace(live=Holdings, serving=lambda now: False)
        below = Upstream(
            *(config, Coordinator(), SimpleNamespace(leaving=[]), members),
            lease=lease,
            data=None,
            connect=connect,
            watching=Watching(),
        )

        def heard():
            assert router.poll(2000)
            peer, content = router.recv_multipart()
            return peer, wire.decode_from_below(content)

        def say(message):
            below.tick(time.monotonic())
            peer, join = heard()
            assert isinstance(join, wire.Join)
            router.send_multipart([peer, message if isinstance(message, bytes) else wire.encode(message)])
            assert below.socket.poll(2000)
            below.receive()
            return peer, heard

        yield below, say
        below.socket.close()


@pytest.mark.parametrize("message", [wire.Rollback("s", "why"), wire.Lease(1, float("nan")), b"\xc1"])
def test_a_message_from_above_that_cannot_be_handled_does_not_end_the_store(pair, message):
    below, say = pair
    below.relayed[""] = relayed(Coordinator(ZeroDivisionError()), "s")
    peer, heard = say(message)
    if isinstance(message, wire.Rollback):
        below.tick(time.monotonic())
        again, join = heard()
        assert isinstance(join, wire.Join)
        assert again != peer, "on a connection of its own"
    assert below.lease.closed


def test_when_nobody_knows_what_is_live_the_store_ends(pair):
    below, say = pair
    below.relayed[""] = relayed(Coordinator(IllegalTransition("twice")), "s")
    with pytest.raises(IllegalTransition):
        say(wire.Rollback("s", "why"))


def test_who_claims_to_be_fenced_takes_no_lease_that_was_on_its_way(pair):
    below, _ = pair
    asked = below.lease.ask(Holdings())
    below.over("s")
    below.lease.given(asked, 2.0, Holdings())
    assert below.lease.closed, "the commit above goes on without it"
    below.lease.given(below.lease.ask(Holdings()), 2.0, Holdings())
    assert not below.lease.closed


@pytest.mark.parametrize("serving", [False, True])
def test_a_store_that_stops_says_whether_stores_below_it_may_serve_on(pair, serving):
    below, say = pair
    _, heard = say(wire.Joined(Holdings(), 2.0))
    below._members.serving = lambda now: serving
    below.close()
    assert isinstance(heard()[1], wire.Beat)
    assert heard()[1] == wire.Leave(serving)


def test_who_could_not_catch_up_asks_again_also_when_it_was_welcomed_meanwhile(pair):
    below, say = pair
    _, heard = say(wire.Joined(Holdings(), 2.0))
    assert isinstance(heard()[1], wire.Beat)
    now = time.monotonic()
    below.failed_to_catch_up(now)
    below._handle(wire.Joined(Holdings(), 2.0), now)
    assert below.next_deadline() <= now + module.FAILED_AGAIN_S
    below.tick(now + module.FAILED_AGAIN_S)
    assert any(isinstance(heard()[1], wire.Join) for _ in range(3))


@pytest.mark.parametrize(("told", "ends"), [("mine", False), ("", True), ("another", True)])
def test_a_welcome_ends_the_session_that_it_does_not_name(pair, told, ends):
    below, say = pair
    ended = []
    coordinator = SimpleNamespace(ballot=None, in_doubt=False)
    coordinator.abort = lambda session, refusal, now, event: ended.append(event)
    mine = wire.StagedAdapter("policy-a", AdapterShape("float32", ()))
    below.relayed["policy-a"] = relayed(coordinator, wire.Stage("mine", "run", 1, adapter=mine))
    say(wire.Joined(Holdings(), 2.0, ["of another line", *filter(None, [told])]))
    assert ended == [Event.ABOVE_LOST] * ends


def test_a_session_that_is_told_twice_goes_on_with_what_has_come(pair):
    below, say = pair
    ended = []
    coordinator = SimpleNamespace(ballot=None, in_doubt=False)
    coordinator.abort = lambda session, refusal, now, event: ended.append(event)
    stage = wire.Stage("mine", "run", 1, adapter=wire.StagedAdapter("policy-a", AdapterShape("float32", ())))
    say(stage)
    del below.next["policy-a"]  # it was begun
    below.relayed["policy-a"] = relayed(coordinator, stage)
    below._handle(stage, time.monotonic())
    assert (ended, below.next) == ([], {})
    del below.relayed["policy-a"]  # it has ended
    below._handle(stage, time.monotonic())
    assert below.next == {}
    below._join(time.monotonic())  # and the store above may take us into it anew
    below._handle(stage, time.monotonic())
    assert below.next == {"policy-a": stage}
    below.relayed["policy-a"] = relayed(coordinator, stage)
    below._handle(msgspec.structs.replace(stage, session="another"), time.monotonic())
    assert (ended, below.next["policy-a"].session) == ([Event.ABOVE_LOST], "another")


def test_of_adapters_that_are_unloaded_nothing_is_kept(pair):
    below, _ = pair
    below._lines.keep = lambda names, deadline: None
    for name in ("gone", "kept", "begun"):
        adapter = wire.StagedAdapter(name, AdapterShape("float32", ()))
        below._handle(wire.Stage(f"session of {name}", "run", 1, adapter=adapter), time.monotonic())
    del below.next["gone"], below.next["kept"]  # their sessions are over
    below._handle(wire.Adapters(["kept"]), time.monotonic())
    assert sorted(below._told) == ["begun", "kept"]


MINE, ANOTHER = Live("run", 2, 5, 1, "d" * 16), Live("run", 1, 4, 0, "e" * 16)


def in_doubt(below, line):
    """A store with a lease, in doubt of MINE. Returns a beat that was sent before, and what becomes of it."""
    below.lease.given(below.lease.ask(Holdings()), 2.0, Holdings())
    asked = below.lease.ask(Holdings())
    did = []
    coordinator = SimpleNamespace(
        in_doubt=True,
        ballot=SimpleNamespace(live=MINE),
        recorded_above=lambda session, now: did.append(("recorded", below.lease.closed)),
        abort=lambda session, refusal, now, event: did.append((event, below.lease.closed)),
    )
    adapter = wire.StagedAdapter(line, AdapterShape("float32", ())) if line else None
    below.relayed[line] = relayed(coordinator, wire.Stage("mine", "run", 2, adapter=adapter))
    return asked, did


def test_a_store_in_doubt_waits_while_the_one_above_has_not_decided_either(pair):
    """What was live before is no answer: the vote may be counted yet."""
    below, say = pair
    _, did = in_doubt(below, "policy-a")
    say(wire.Joined(Holdings(None, {"policy-a": version_of(ANOTHER)}), 2.0, ["mine"], ["mine"]))
    assert not did


@pytest.mark.parametrize("line", ["", "policy-a"])
@pytest.mark.parametrize("above", [MINE, ANOTHER, None])
def test_whom_the_store_above_knows_nothing_of_serves_nothing_until_its_next_lease(pair, above, line):
    """The store above may have restarted and not caught up yet, while the others serve what is undone here."""
    below, say = pair
    asked, did = in_doubt(below, line)
    say(wire.Joined(Holdings().having(line, above and version_of(above)), 2.0))
    assert did[0] == (("recorded", False) if above is MINE else (Event.WITHDRAWN, True))
    below.lease.given(asked, 2.0, Holdings())
    assert below.lease.closed is (above is not MINE), "a lease that was on its way speaks of what was live before"


@pytest.mark.parametrize("ballot", [None, "open"])
def test_a_store_that_is_to_catch_up_with_what_it_has_just_recorded_says_who_has_not_moved_yet(pair, ballot):
    below, say = pair
    coordinator = below._coordinator
    coordinator.ballot, coordinator.history = ballot, SimpleNamespace(live=MINE, saved=coordinator.history.saved)
    _, heard = say(wire.Stage("s", "run", 2, digest=MINE.digest, catch_up=True))
    below.tick(time.monotonic())
    said = [heard()[1], heard()[1]]
    assert wire.Holds(version_of(MINE), moving=ballot is not None) in said, said


@pytest.mark.parametrize("given_away", [False, True])
def test_a_slot_is_reused_by_a_note_of_it_only_while_it_was_not_given_away(given_away):
    """A crash leaves the note of a version that the slot held before another was staged there."""
    noted = Live("run", 1, 5, 1, "d" * 16, write_epoch=7)
    arena = SimpleNamespace(backed=lambda slot: True, write_epoch=lambda slot: 7 + given_away)
    coordinator = SimpleNamespace(
        history=SimpleNamespace(saved=SimpleNamespace(live=None, previous=None, doubt=noted)),
        slots=SimpleNamespace(arena=arena),
    )
    stage = wire.Stage("s", "run", 1, digest="d" * 16)
    assert relayed(coordinator, stage)._held() == (None if given_away else noted)

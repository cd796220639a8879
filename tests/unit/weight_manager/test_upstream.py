"""A store that follows another one whose messages make no sense: that costs the session with it, and nothing else."""

import time
from types import SimpleNamespace

import pytest
import zmq

from tests.faults.small_model import LAYOUT
from weight_manager.config import StoreConfig
from weight_manager.errors import IllegalTransition
from weight_manager.life import Event
from weight_manager.messages import Live
from weight_manager.relay import messages as wire
from weight_manager.relay import upstream as module
from weight_manager.relay.lease import Lease
from weight_manager.relay.messages import version_of
from weight_manager.relay.relayed import Relayed
from weight_manager.relay.upstream import Upstream
from weight_manager.watching import Watching


class Coordinator:
    """Of a store without weights; `fails` is what happens to whoever asks for its session."""

    settled, ballot, in_doubt, layout, changes = True, None, False, LAYOUT, 0
    fails: Exception | None = None
    history = SimpleNamespace(saved=SimpleNamespace(id="a" * 16), live=None)

    @property
    def session(self):
        if self.fails is not None:
            raise self.fails
        return None


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
        below = Upstream(
            *(config, Coordinator(), SimpleNamespace()),
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
    below._coordinator.fails = ZeroDivisionError()
    peer, heard = say(message)
    if isinstance(message, wire.Rollback):
        below.tick(time.monotonic())
        again, join = heard()
        assert isinstance(join, wire.Join)
        assert again != peer, "on a connection of its own"
    assert below.lease.closed


def test_when_nobody_knows_what_is_live_the_store_ends(pair):
    below, say = pair
    below._coordinator.fails = IllegalTransition("twice")
    with pytest.raises(IllegalTransition):
        say(wire.Rollback("s", "why"))


def test_who_claims_to_be_fenced_takes_no_lease_that_was_on_its_way(pair):
    below, _ = pair
    below._below = SimpleNamespace(serving=lambda now: False)
    asked = below.lease.ask(time.monotonic(), None)
    below.over("s")
    below.lease.given(asked, 2.0, None)
    assert below.lease.closed, "the commit above goes on without it"
    below.lease.given(below.lease.ask(time.monotonic(), None), 2.0, None)
    assert not below.lease.closed


def test_who_could_not_catch_up_asks_again_also_when_it_was_welcomed_meanwhile(pair):
    below, say = pair
    _, heard = say(wire.Joined(None, 2.0))
    assert isinstance(heard()[1], wire.Beat)
    now = time.monotonic()
    below.failed_to_catch_up(now)
    below._handle(wire.Joined(None, 2.0), now)
    assert below.next_deadline() <= now + module.FAILED_AGAIN_S
    below.tick(now + module.FAILED_AGAIN_S)
    assert any(isinstance(heard()[1], wire.Join) for _ in range(3))


@pytest.mark.parametrize(("told", "ends"), [("mine", False), ("", True), ("another", True)])
def test_a_welcome_ends_the_session_that_it_does_not_name(pair, told, ends):
    below, say = pair
    ended = []
    session = SimpleNamespace(life=SimpleNamespace(state=None))
    below.relayed = SimpleNamespace(id="mine", session=session, lost_at=float("inf"), tick=lambda now: None, voted="")
    below._coordinator = SimpleNamespace(
        settled=True,
        ballot=None,
        in_doubt=False,
        layout=LAYOUT,
        changes=0,
        history=Coordinator.history,
        session=session,
    )
    below._coordinator.abort = lambda session, refusal, now, event: ended.append(event)
    say(wire.Joined(None, 2.0, told))
    assert ended == [Event.ABOVE_LOST] * ends


MINE, ANOTHER = Live("run", 2, 5, 1, "d" * 16), Live("run", 1, 4, 0, "e" * 16)


@pytest.mark.parametrize("above", [MINE, ANOTHER, None])
def test_whom_the_store_above_knows_nothing_of_serves_nothing_until_its_next_lease(pair, above):
    """The store above may have restarted and not caught up yet, while the others serve what is undone here."""
    below, say = pair
    below.lease.given(below.lease.ask(time.monotonic(), None), 2.0, None)
    asked = below.lease.ask(time.monotonic(), None)
    did = []
    below._coordinator = SimpleNamespace(
        settled=True,
        in_doubt=True,
        layout=LAYOUT,
        changes=0,
        history=Coordinator.history,
        session=SimpleNamespace(life=SimpleNamespace(state=None)),
        ballot=SimpleNamespace(live=MINE),
        recorded_above=lambda session, now: did.append(("recorded", below.lease.closed)),
        abort=lambda session, refusal, now, event: did.append((event, below.lease.closed)),
    )
    say(wire.Joined(above and version_of(above), 2.0))
    assert did[0] == (("recorded", False) if above is MINE else (Event.WITHDRAWN, True))
    below.lease.given(asked, 2.0, None)
    assert below.lease.closed is (above is not MINE), "a lease that was on its way speaks of what was live before"


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
    relayed = Relayed(stage, coordinator, *[SimpleNamespace()] * 5)
    assert relayed._held() == (None if given_away else noted)

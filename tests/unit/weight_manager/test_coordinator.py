"""Two sessions at once: one that is recorded and waits for stall figures, and the next one. On a simulated host."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rollout_client.protocol import Begin, Written
from tests.simulation.host import Host, Memory, edges
from tests.simulation.network import Network
from tests.simulation.parties import Replica
from tests.simulation.run import TIMES
from tests.simulation.world import World
from weight_manager.coordinator import STILL_ARRIVES_S
from weight_manager.errors import PushRefused
from weight_manager.history import Intent
from weight_manager.layout import unpacked, version_digest
from weight_manager.life import Event, State
from weight_manager.messages import Finalized, Prepare
from weight_manager.metrics import Counters
from weight_manager.trainer_group import TrainerGroup, TrainerRank
from worker import membership


class Owner:
    """Commits once it is sealed, and notes how it ends."""

    def __init__(self, coordinator, world):
        self._coordinator, self._world = coordinator, world
        self.outcome = None

    def sealed(self, session):
        self._coordinator.commit(session, 5.0, self._world.now)

    def committed(self, session, report):
        self.outcome, self.report = report.version, report

    def ended(self, session, refusal):
        self.outcome = refusal.code


@pytest.fixture
def hub():
    """A store that serves version 0 on a replica which never says `Finalized`."""
    Memory.reset()
    world = World(1)
    net = Network(world)
    with world.inside(**edges(world, net)):
        host = Host(world, net, "a", None, lambda *_: None, **(TIMES | {"finalize_s": 5.0}))
        host.start()
        replica = Replica(host, 0, lambda *_: None)
        send = replica.membership._send
        replica.membership._send = lambda message: isinstance(message, Finalized) or send(message)
        coordinator = host.store._coordinator

        def push(version):
            owner = Owner(coordinator, world)
            # the bytes are those of the version before, where they lie
            intent = Intent("run", version, "disk", force=True)
            session = coordinator.begin(intent, owner, world.now, reuse=coordinator.history.live)
            return session, owner

        def seal(session):
            coordinator.seal(session, world.now + 5.0, world.now)
            host.store.wake()
            world.run(world.now + 1.0)

        first, _ = push(0)
        seal(first)
        yield SimpleNamespace(coordinator=coordinator, world=world, replica=replica, push=push, seal=seal)


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_that_share_a_version_are_sent_its_regions_digests(hub, tp):
    hub.coordinator.layout = replace(hub.coordinator.layout, tp=tp)
    session, _ = hub.push(1)
    heard = []
    take = hub.replica.membership.take
    hub.replica.membership.take = lambda message: heard.append(message) or take(message)
    hub.seal(session)
    (prepare,) = (message for message in heard if isinstance(message, Prepare))
    if tp == 1:
        assert prepare.regions == b"", "a rank that has all of it needs the version's alone"
    else:
        assert version_digest(hub.coordinator.layout, unpacked(prepare.regions)) == prepare.live.digest


def test_what_a_recorded_push_still_says_does_not_end_the_next_one(hub):
    recorded, owner = hub.push(1)
    hub.seal(recorded)
    assert (recorded.life.state, owner.outcome) == (State.LIVE, None)
    following, _ = hub.push(2)
    hub.coordinator.abort(recorded, PushRefused("bad_message", "said too late"), hub.world.now)
    with pytest.raises(PushRefused, match="is already live"):
        hub.coordinator.abort(recorded, PushRefused("aborted", "x"), hub.world.now, Event.TRAINER_ABORTS)
    assert hub.coordinator.session is following
    assert (following.life.state, recorded.life.state) == (State.STAGING, State.LIVE)


def test_the_next_push_may_be_ended_while_the_last_one_waits_for_figures(hub):
    recorded, owner = hub.push(1)
    hub.seal(recorded)
    following, next_owner = hub.push(2)
    following.owner = SimpleNamespace(
        sealed=lambda session: None, ended=next_owner.ended
    )  # leaves the commit to others
    hub.seal(following)
    assert following.life.state is State.SEALED
    hub.coordinator.drive(hub.world.now)
    assert following.life.state is State.SEALED, "what the last commit comes to moves no other"
    hub.coordinator.abort(following, PushRefused("aborted", "x"), hub.world.now, Event.OPERATOR_ABORTS)
    assert (next_owner.outcome, owner.outcome) == ("aborted", None)
    hub.world.run(hub.world.now + 6.0)
    assert owner.outcome == 1


def test_the_answer_says_what_the_time_went_to(hub):
    """Up to the wait for the replica that never says that it goes on: five seconds, of which one is over by then."""
    session, owner = hub.push(1)
    hub.seal(session)
    hub.world.run(hub.world.now + 30.0)
    assert list(owner.report.seconds) == ["stage", "seal", "prepare", "commit", "record", "finalize"]
    assert 4.5 < owner.report.seconds["finalize"] < 6.0
    assert owner.report.seconds["record"] < 1.0


def test_no_push_of_an_adapter_begins_before_everybody_has_moved_to_the_last_one(hub):
    """Its commit would end the wait, and the trainer of the last one would hear that all had moved."""
    recorded, owner = hub.push(1)
    hub.seal(recorded)
    hub.coordinator._holds = False  # as of an adapter: nobody holds its output meanwhile
    with pytest.raises(PushRefused, match="not everybody has moved") as refused:
        hub.push(2)
    assert (refused.value.code, refused.value.retryable, owner.outcome) == ("busy", True, None)
    hub.world.run(hub.world.now + 6.0)
    assert owner.outcome == 1
    hub.push(2)


def test_ranks_that_copy_from_the_trainer_hear_now_and_then_that_the_version_arrives(hub, monkeypatch):
    """They need not know what is in the slot, but that they are to hear the store beside their steps."""
    session, _ = hub.push(1)
    told = []
    monkeypatch.setattr(hub.coordinator.replicas, "in_place", lambda *said: told.append(said))
    spans = [[(64 * number, 64)] for number in range(4)]
    for some in spans:
        session.checker._told.in_place(some)
    assert told == [(session.slot, session.write_epoch, some) for some in spans], "else all of them, as they come"
    session.taken = True
    told.clear()
    for some in spans:
        session.checker._told.in_place(some)
    assert told == [(session.slot, session.write_epoch, spans[0])]
    hub.world.run(hub.world.now + STILL_ARRIVES_S)
    session.checker._told.in_place(spans[3])
    assert len(told) == 2
    assert 2 * STILL_ARRIVES_S < membership._ARRIVING_S


@pytest.mark.parametrize(("offered", "taken"), [(2, True), (1, False), (0, False)])
def test_a_trainer_from_which_not_all_ranks_copy_leaves_them_the_slot(offered, taken):
    session = SimpleNamespace(id="s", taken=None, checker=SimpleNamespace(arrived=list, written=lambda *_: 0))
    coordinator = SimpleNamespace(ranks=2, arena_heard=lambda *_: None)
    group = TrainerGroup(SimpleNamespace(lease_s=1.0), coordinator, None, Counters(), None)
    group.session, group._offered = session, ["socket"] * offered
    group.ranks[b"trainer"] = TrainerRank(Begin(1, []), 0, 1, 0.0)
    group.written(b"trainer", Written("s", []), 0.0)
    assert session.taken is False
    group.written(b"trainer", Written("s", [], taken=True), 0.0)
    assert session.taken is taken

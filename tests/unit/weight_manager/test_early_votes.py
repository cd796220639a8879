"""Ranks with memory of their own are asked to prepare while the store still compares bytes. On a simulated host."""

from types import SimpleNamespace

import pytest

from rollout_client.digest import digest_of
from rollout_client.protocol import Part
from tests.simulation.host import Host, Memory, edges
from tests.simulation.network import Network
from tests.simulation.parties import Replica
from tests.simulation.run import TIMES
from tests.simulation.world import World
from weight_manager.errors import PushRefused
from weight_manager.history import Intent
from weight_manager.layout import region_digests, version_digest
from weight_manager.life import Event, State
from weight_manager.messages import Finalize, Flip, Prepare, Rollback
from weight_manager.plan import place


class Owner:
    def __init__(self, coordinator, world):
        self._coordinator, self._world = coordinator, world
        self.outcome = None

    def sealed(self, session):
        self._coordinator.commit(session, 5.0, self._world.now)

    def committed(self, session, report):
        self.outcome = report.version

    def ended(self, session, refusal):
        self.outcome = refusal.code


DEVICE, CPU = 0, 1
COMMIT = [Prepare, Flip, Finalize]


@pytest.fixture
def hub():
    """A store that serves version 0 on a replica with a device and on one without, and takes the slot for a large
    one. heard: what each was told of commits.
    """
    Memory.reset()
    world = World(3)
    net = Network(world)
    with world.inside(**edges(world, net)):
        host = Host(world, net, "a", None, lambda *_: None, **TIMES)
        host.start()
        replicas = [Replica(host, number, lambda *_: None) for number in (DEVICE, CPU)]
        assert [replica.ranks.copies_ahead for replica in replicas] == [True, False]
        coordinator, heard = host.store._coordinator, ([], [])
        for number, replica in enumerate(replicas):

            def take(message, number=number, take=replica.membership.take):
                if isinstance(message, Prepare | Flip | Finalize | Rollback):
                    heard[number].append(message)
                take(message)

            replica.membership.take = take

        def begin(version, **how):
            owner = Owner(coordinator, world)
            intent = Intent("run", version, "push", "", how.get("in_flight", "keep"), "shm", True)
            session = coordinator.begin(intent, owner, world.now)
            return session, owner

        def send(session, version, *, wrong=False, commits=True):
            """All of a version, and that it is all."""
            layout, slot = coordinator.layout, session.staging.slot
            parts = [Part(p.name, "float32", p.shape) for p in layout.manifest.parameters]
            copies = place(parts, layout)
            session.staging.add(copies, [parts[copy.part].name for copy in copies])
            slot[:] = bytes([version]) * len(slot)
            sizes = [4 * copy.shape[0] for copy in copies]
            digests = [digest_of(bytes([version]) * size) for size in sizes]
            session.checker.written(list(enumerate(digests)))
            if wrong:
                slot[0] ^= 1
            coordinator.seal(session, world.now + 5.0, world.now, commits=commits)
            return version_digest(layout, region_digests(layout, slot))

        def push(version, **how):
            session, owner = begin(version)
            send(session, version, **how)
            world.run(world.now + 1.0)
            return owner.outcome

        world.run(world.now + 2.0)
        assert push(1) == 1, "nobody serves yet: no votes"
        world.run(world.now + 2.0)
        assert [replica.ranks.live.version for replica in replicas] == [1, 1]
        for said in heard:
            said.clear()
        yield SimpleNamespace(**locals())


def kinds(messages):
    return [type(message) for message in messages]


def test_who_has_memory_of_its_own_is_asked_while_bytes_are_compared_and_once(hub):
    session, owner = hub.begin(2)
    digest = hub.send(session, 2)
    assert session.life.state is State.CHECKING
    early = hub.coordinator._early
    assert (early.asked, early.live.digest, early.live.version) == ({DEVICE}, digest, 2)
    hub.world.run(hub.world.now + 1.0)
    assert owner.outcome == 2
    assert [kinds(said) for said in hub.heard] == [COMMIT, COMMIT]
    assert hub.heard[DEVICE][0].live == hub.heard[CPU][0].live == early.live
    assert [replica.ranks.live.version for replica in hub.replicas] == [2, 2]


def test_the_record_is_written_ahead_meanwhile_and_not_again(hub, monkeypatch):
    history, put, drafts = hub.coordinator.history, [], []
    draft, commit = history.draft, history.commit
    monkeypatch.setattr(history, "draft", lambda *said, **how: (drafts.append(said), draft(*said, **how)))
    written = history._write
    monkeypatch.setattr(history, "_write", lambda saved: (put.append(saved), written(saved)))
    session, owner = hub.begin(2)
    hub.send(session, 2)
    assert session.life.state is State.CHECKING
    assert [live.version for live, _ in drafts] == [2]
    monkeypatch.setattr(history, "commit", lambda *said, **how: (put.clear(), commit(*said, **how)))
    hub.world.run(hub.world.now + 1.0)
    assert (owner.outcome, len(drafts), put) == (2, 1, []), "put in its place, and not written"


def test_nobody_flips_before_the_bytes_are_compared(hub):
    run = hub.coordinator._background.digests
    held = []
    hub.coordinator._background.digests = lambda *asked: held.append(asked)
    session, owner = hub.begin(2)
    hub.send(session, 2)
    hub.world.run(hub.world.now + 0.5)
    assert kinds(hub.heard[DEVICE]) == [Prepare]
    assert hub.coordinator._early.votes[DEVICE].ok
    assert (session.life.state, owner.outcome) == (State.CHECKING, None)
    hub.coordinator._background.digests = run
    for asked in held:
        run(*asked)
    hub.world.run(hub.world.now + 1.0)
    assert owner.outcome == 2
    assert [kinds(said) for said in hub.heard] == [COMMIT, COMMIT]


def test_bytes_that_differ_end_the_push_and_who_was_asked_goes_back(hub):
    assert hub.push(2, wrong=True) == "checksum_mismatch"
    assert [kinds(said) for said in hub.heard] == [[Prepare, Rollback], []]
    assert [replica.ranks.live.version for replica in hub.replicas] == [1, 1]
    assert hub.coordinator.idle
    assert hub.push(3) == 3
    assert [replica.ranks.live.version for replica in hub.replicas] == [3, 3]


def test_a_no_that_came_early_ends_the_push_in_the_commit(hub):
    hub.replicas[DEVICE].refuses = 1.0
    assert hub.push(2) == "refused"
    hub.replicas[DEVICE].refuses = 0.0
    assert [replica.ranks.live.version for replica in hub.replicas] == [1, 1]
    assert hub.push(3) == 3


def test_who_has_registered_anew_is_asked_in_the_commit(hub):
    session, owner = hub.begin(2)
    hub.send(session, 2)
    hub.coordinator.replica_gone(DEVICE, "registered anew")
    assert hub.coordinator._early.asked == set()
    hub.world.run(hub.world.now + 1.0)
    assert (owner.outcome, hub.coordinator._early) == (2, None)
    assert [replica.ranks.live.version for replica in hub.replicas] == [2, 2]


def test_whoever_ends_the_session_has_those_go_back_who_were_asked(hub):
    session, owner = hub.begin(2)
    hub.send(session, 2)
    refusal = PushRefused("aborted", "an operator's word")
    hub.coordinator.abort(session, refusal, hub.world.now, Event.OPERATOR_ABORTS)
    hub.world.run(hub.world.now + 1.0)
    assert owner.outcome == "aborted"
    assert [kinds(said) for said in hub.heard] == [[Prepare, Rollback], []]
    assert hub.push(3) == 3


@pytest.mark.parametrize(
    "why", ["waits for sequences", "looks at all numbers", "another commit is not over", "no commit is asked for"]
)
def test_where_it_is_not_asked_early_it_is_in_the_commit(hub, why, monkeypatch):
    session, owner = hub.begin(2, in_flight="wait" if why.startswith("waits") else "keep")
    if why.startswith("looks"):
        strict = hub.coordinator._config.model_copy(update={"refuse_non_finite": True})
        monkeypatch.setattr(hub.coordinator, "_config", strict)
    if why.startswith("another"):
        monkeypatch.setattr(hub.coordinator, "ballot", SimpleNamespace(), raising=False)
    hub.send(session, 2, commits=not why.startswith("no commit"))
    assert hub.coordinator._early is None
    monkeypatch.undo()
    hub.world.run(hub.world.now + 1.0)
    assert owner.outcome == 2
    assert [kinds(said) for said in hub.heard] == [COMMIT, COMMIT]

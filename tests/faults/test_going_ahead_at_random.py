"""Versions that go live from device memory while trainer, ranks and store die by chance: `AHEAD_SEEDS=200` is the long
run of it, `AHEAD_FIRST=5000` begins it elsewhere.

The store and its helpers are real processes, the locks, sockets and memory real ones of the kernel (of memfds where a
GPU would be); replicas and trainer stand at the edge. tests/simulation has the same in simulated time, with thousands
of seeds; here the kernel lets go of what the dead held.
"""

import os
import random
import signal
from collections import defaultdict

import pytest

from rollout_client import protocol as wire
from rollout_client import slot_lock
from rollout_client.arena_file import ArenaFile
from tests.faults.test_going_ahead import libcuda, pusher, ranks  # noqa: F401  fixtures
from tests.faults.waiting import until

FIRST = int(os.environ.get("AHEAD_FIRST", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("AHEAD_SEEDS", "3")))
ROUNDS = 6
STAGES = ("begun", "ahead", "written", "sealed")
EVENTS = ("nothing", "nothing", "store", "rank", "everybody", "late rank")


class Life:
    """A service on devices, what its trainers were told, and what happened to whom."""

    def __init__(self, rng, store, join, connect, weights, digest_of):
        self.rng, self.store, self.join, self.connect = rng, store, join, connect
        self.weights, self.digest_of = weights, digest_of
        self.serving = [join(0)]
        self.numbers = 1
        self.version = self.safe = 0  # safe: the last one that was committed
        self.ahead = 0  # versions that went live before the arena had them
        self.told = {}  # digest by version that was said to be live
        self.pushed = defaultdict(set, {0: {digest_of(weights(0))}})
        self.all_died = False
        self.said = []

    def round(self, *, quiet=False):
        """A push, which somebody dies in. quiet: nobody does."""
        rng = self.rng
        lost = self.store.status().lost
        if lost is not None and rng.random() < 0.5:
            self.version = lost.version  # once more: the same bytes, or others
        else:
            self.version += rng.randrange(1, 3)
        number = self.version if rng.random() < 0.8 else 100 + self.version
        dies, when, event = rng.choice((*STAGES, "", "")), rng.choice(STAGES), rng.choice(EVENTS)
        if quiet:
            dies, event = "", "nothing"
        self.said.append(f"version {self.version} of weights {number}: {event} when {when}; the trainer dies {dies}")
        trainer, arena = self.connect(), None
        try:
            for stage in STAGES:
                if stage == "begun":
                    arena = self.begin(trainer, number)
                elif stage == "ahead":
                    if self.is_live(trainer):
                        self.ahead += 1
                        self.told[self.version] = self.digest_of(self.weights(number))
                elif stage == "written":
                    trainer.say(wire.Written(trainer.placement.session, trainer.write()))
                else:
                    trainer.say(wire.Seal(trainer.placement.session, commit=True))
                if stage == when and not self.befalls(event):
                    return  # it has lost its store
                if stage == dies:
                    return
            answers = trainer.hear(30), trainer.hear(30)
            assert isinstance(answers[1], wire.Committed), (answers, self.said)
            self.told[self.version], self.safe = answers[1].digest, self.version
        except Refused as refused:
            self.said.append(f"refused: {refused}")
        finally:
            trainer.close()
            if arena is not None:
                arena.close()

    def begin(self, trainer, number):
        placement = trainer.begin(self.weights(number), self.version, devices=True, durability="device")
        if isinstance(placement, wire.Error):
            raise Refused(placement.message)
        self.pushed[self.version].add(self.digest_of(self.weights(number)))
        trainer.prepare()
        arena = ArenaFile(trainer.welcome.arena_path, write=True)
        assert slot_lock.lock_shared(arena.fd, placement.slot_offset, placement.slot_bytes)
        return arena

    def is_live(self, trainer):
        """Whether the version goes ahead; not where a rank died that was to copy it."""
        if not trainer.placement.ahead or not trainer.fill():
            return False
        return isinstance(trainer.ask(wire.Ahead(trainer.placement.session, trainer.digests)), wire.IsLive)

    def befalls(self, event):
        """False where nobody is left who could answer the trainer."""
        if event == "rank":
            self.serving.pop(self.rng.randrange(len(self.serving))).die() if self.serving else None
        elif event == "late rank":
            self.serving.append(self.join(self.numbers, wait=False))
            self.numbers += 1
        elif event in ("store", "everybody"):
            self.store.end(signal.SIGKILL)
            if event == "everybody":
                self.all_died = True
                while self.serving:
                    self.serving.pop().die()
            self.store.start()
            return False
        return True

    def settle(self):
        """Nobody fails any more. Everybody has the same, and what was committed is not gone."""
        until(lambda: (status := self.store.status()).ahead is None and status.session is None and status.live)
        if not self.serving:
            self.serving.append(self.join(self.numbers))
            self.numbers += 1
        numbers = [str(one.number) for one in self.serving]
        until(lambda: all(self.store.status().replicas.get(n, {}).get("ready") for n in numbers))
        status = self.store.status()
        version, digest = status.live.version, status.live.digest
        assert digest in self.pushed[version], self.said
        assert self.store.serving() == (version, digest), self.said
        assert [one.served() for one in self.serving] == [(version, digest)] * len(self.serving), self.said
        assert version >= self.safe, (version, self.safe, self.said)
        last = max(self.told, default=0)
        if version < last:
            assert status.lost is not None, (version, last, self.said)
            assert status.lost.version == last, (version, status.lost, self.said)
            assert self.all_died, f"version {last} is lost, and not everybody had died: {self.said}"
        elif version in self.told:
            assert self.told[version] == digest, self.said


class Refused(Exception):
    """A push that the store does not take."""


@pytest.fixture
def life(store, ranks, pusher, weights, digest_of):  # noqa: F811
    return lambda seed: Life(random.Random(seed), store, ranks, pusher, weights, digest_of)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_torn_or_lost_but_with_everybody(life, seed):
    one = life(seed)
    one.round(quiet=True)
    assert one.ahead == 1
    for _ in range(ROUNDS):
        one.settle()
        one.round()
    one.settle()

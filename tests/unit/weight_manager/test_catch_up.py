"""Bringing a store below to what is live: the digests it is told are those of the bytes it is sent."""

from types import SimpleNamespace

from tests.faults.small_model import LAYOUT
from weight_manager.messages import Live
from weight_manager.relay.catch_up import CatchUp
from weight_manager.relay.messages import Holdings
from weight_manager.relay.stream import Claim

OLD, NEW = Live("run", 4, 132, 1, "a" * 16), Live("run", 5, 133, 0, "b" * 16)
OLD_DIGESTS, NEW_DIGESTS = ([first + region for region in range(len(LAYOUT.regions))] for first in (100, 200))


class Scene:
    """A `CatchUp` whose one store below, once offered anything, is `given` a stream; readings end when told to."""

    def __init__(self):
        self.given = []
        self.readings = []
        self.store = SimpleNamespace(enrolments={}, holds=Holdings())
        self.history = SimpleNamespace(live=OLD, is_merged=lambda digest: False)
        roster = SimpleNamespace(
            all=lambda: [self.store],
            give=lambda store, line, enrolment: self.given.append(enrolment) or (0, b""),
            send=lambda store, message: None,
        )
        arena = SimpleNamespace(slot=lambda slot: memoryview(b""))
        self.failures = []
        background = SimpleNamespace(submit=self._submit)
        self.busy = False
        self.late = CatchUp(
            *(None, LAYOUT, roster, SimpleNamespace(arena=arena), self.history, background), busy=lambda: self.busy
        )

    def _submit(self, work, done, failed):
        self.readings.append(done)
        self.failures.append(failed)

    def claimed(self):
        return [item.digest for item in self.given[-1].stream.log if isinstance(item, Claim)]


def test_a_reading_of_the_version_before_that_ends_late_is_not_taken_for_the_new_one():
    scene = Scene()
    scene.late.offer(scene.store)
    (done,) = scene.readings
    scene.busy = True  # a push, sealed while that reading runs
    scene.late.sealed(NEW_DIGESTS)
    done(OLD_DIGESTS)
    scene.busy, scene.history.live = False, NEW
    scene.late.went_live(NEW)
    scene.late.offer(scene.store)
    assert scene.claimed() == NEW_DIGESTS


def test_a_push_that_failed_leaves_what_was_read_of_the_live_version():
    scene = Scene()
    scene.late.offer(scene.store)
    scene.readings[0](OLD_DIGESTS)
    scene.late.sealed(NEW_DIGESTS)  # and it did not go live
    scene.late.offer(scene.store)
    assert scene.claimed() == OLD_DIGESTS
    assert len(scene.readings) == 1


def test_a_version_is_read_once_however_many_stores_wait_for_it():
    """Each reading hashes all of it, beside a push maybe; after a restart of this store all come back at once."""
    scene = Scene()
    for _ in range(8):
        scene.late.offer(scene.store)
    assert len(scene.readings) == 1
    scene.failures[0](MemoryError())
    scene.late.offer(scene.store)
    assert len(scene.readings) == 2, "it is tried again"
    scene.history.live = NEW
    scene.late.offer(scene.store)
    assert len(scene.readings) == 3, "what is read is no longer live"
    scene.readings[1](OLD_DIGESTS)
    scene.late.offer(scene.store)
    assert len(scene.readings) == 3
    scene.readings[2](NEW_DIGESTS)
    assert scene.claimed() == NEW_DIGESTS

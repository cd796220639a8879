"""An adapter's commit while steps run: it waits for the step under way, and not for those after it as well."""

import threading
import time

import msgspec
import numpy as np
import pytest

from rollout_client.peft import AdapterConfig
from rollout_client.protocol import Part
from weight_manager import messages as store_messages
from weight_manager.adapters.plan import AdapterPlanner, adapter_layout
from weight_manager.arena import Arena
from weight_manager.layout import region_digests, version_digest
from weight_manager.messages import (
    Finalize,
    Finalized,
    InPlace,
    Live,
    LiveAdapter,
    Prepare,
    Prepared,
    Rollback,
    RolledBack,
)

STEP_S = 2.0  # what a commit takes without steps is milliseconds, and half a second where the processor is not free
MODULE = "model.layers.0.self_attn.q_proj"


class Adapter:
    """Versions of an adapter as the store has them, in an arena of their own."""

    def __init__(self, rig):
        self._rig = rig
        (shape,) = [p.shape for p in rig.layout.manifest.parameters if p.name == f"{MODULE}.weight"]
        halves = {"lora_A": (2, shape[1]), "lora_B": (shape[0], 2)}
        parts = [Part(f"{MODULE}.{half}", "float32", of_half) for half, of_half in halves.items()]
        self._shape = AdapterPlanner(rig.layout).shape(AdapterConfig(2, 2.0), parts, 256)
        self._layout = adapter_layout(self._shape, rig.layout)
        self.spans = self._layout.ranges
        self._arena = Arena.create(rig.run_dir, "adapters", self._layout.slot_bytes, slots=3)

    def written(self, number):
        slot = number % 3
        epoch = self._arena.bump(slot)
        np.frombuffer(self._arena.slot(slot), np.float32)[:] = number
        digest = version_digest(self._layout, region_digests(self._layout, self._arena.slot(slot)))
        live = Live("run", number, 100 + number, slot, digest, epoch)
        return LiveAdapter("a", live, str(self._arena.path), self._shape)

    def prepare(self, number, in_flight="keep"):
        self.live = self.written(number)
        self._rig.store.send(Prepare(f"s{number}", self.live.live, in_flight, 30.0, self.live))

    def push(self, number, in_flight="keep"):
        """A whole commit."""
        self.prepare(number, in_flight)
        assert self.expect(Prepared).ok
        self.finalize(number)
        return self.expect(Finalized)

    def finalize(self, number):
        self._rig.store.send(Finalize(f"s{number}", "a", 100 + number))

    def expect(self, kind):
        """The next message but those that say what is held."""
        while isinstance(message := self._rig.store.poll(30.0), store_messages.AdaptersHeld):
            pass
        assert isinstance(message, kind), f"wanted {kind.__name__}, got {message}"
        return message


@pytest.fixture
def busy(make_rig):
    """Version 1 of an adapter is live, and a stream of the model itself is in the middle of a long step."""
    rig = make_rig(fake={"step_s": STEP_S})
    rig.serve()
    rig.adapter = Adapter(rig)
    rig.adapter.push(1)
    rig.api.generate("long", max_tokens=6)
    rig.api.until(lambda: rig.api.tokens("long") > 0)
    return rig


def test_a_commit_waits_for_the_step_under_way_alone(busy):
    time.sleep(STEP_S / 4)  # into the step
    before = busy.loop._actions.engine.steps
    busy.adapter.push(2)
    assert busy.loop._actions.engine.steps <= before + 1, "the next step begins when it is through"
    assert busy.api.finish("long")[2] == "length"


def test_a_word_that_does_not_come_puts_off_one_step_for_a_while(busy):
    busy.adapter.prepare(2)
    assert busy.adapter.expect(Prepared).ok
    before, began = busy.loop._actions.engine.steps, time.monotonic()
    busy.api.until(lambda: busy.loop._actions.engine.steps > before + 1)
    assert time.monotonic() - began < 2 * STEP_S, "the second is not put off"
    busy.store.send(Rollback("s2", "another replica is slow"))
    busy.adapter.expect(RolledBack)


def test_commits_one_after_the_other_leave_room_for_steps(busy):
    before, number = busy.api.tokens("long"), 1
    began = time.monotonic()
    while busy.api.tokens("long") < before + 2:
        number += 1
        busy.adapter.push(number)
        busy.api.pump(0.0)
        assert time.monotonic() - began < 30.0


def test_what_arrives_is_copied_before_the_vote_is_asked_for(make_rig):
    rig = make_rig()
    rig.serve()
    adapter = Adapter(rig)
    assert next(m for m in rig.store.seen if isinstance(m, store_messages.Register)).adapters_ahead
    adapter.push(1)
    two, taken = adapter.written(2), rig.loop._actions.engine.adapters.taken
    place = two.live.slot, two.live.write_epoch
    for number, span in enumerate(adapter.spans):
        rig.store.send(InPlace(*place, [span], "a", two.arena_path))
        rig.api.until(lambda number=number: taken[-1].numbers == list(range(number + 1)))
    rig.store.send(InPlace(place[0], place[1] - 1, adapter.spans, "a", two.arena_path))  # of a push that is over
    rig.store.send(Prepare("s2", two.live, "keep", 30.0, two))
    assert adapter.expect(Prepared).ok
    assert taken[-1].numbers == [0, 1], "nothing was left to be copied"
    adapter.finalize(2)
    adapter.expect(Finalized)


def test_what_stays_on_an_overwritten_version_ends_and_the_rest_is_served(make_rig):
    rig = make_rig(fake={"step_s": 0.05})
    first = rig.serve()
    adapter = Adapter(rig)
    adapter.push(1)
    rig.api.generate("stays", adapter="a", max_tokens=10_000)
    rig.api.until(lambda: rig.api.tokens("stays") > 0)
    adapter.push(2, "finish")
    adapter.written(4)  # as a store that was started again: the slot of version 1 is free, as far as it knows
    assert rig.api.finish("stays")[2] == "abort"
    assert rig.api.tokens("stays") > 0
    adapter.expect(store_messages.Register)
    rig.store.send(store_messages.Registered(rig.store.arena_path, first, 1.0, [adapter.live]))
    rig.api.generate("next", adapter="a", max_tokens=3)
    assert rig.api.finish("next")[2] == "length"


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_replica_that_cannot_hold_an_adapter_says_so_to_a_push_of_the_model(make_rig, asked):
    """It serves nothing, and would prepare nothing: every push ended at its deadline, without a word why."""
    rig = make_rig()
    adapter = Adapter(rig)
    live, other = rig.store.write(0, 0), rig.store.write(1, 1)
    rig.store.expect(store_messages.Register)
    spoilt = adapter.written(1)
    np.frombuffer(adapter._arena.slot(spoilt.live.slot), np.float32)[:] = 7.0  # it is not what the store says
    prepare = Prepare("s1", other, "keep", 30.0)
    rig.store.send(store_messages.Registered(rig.store.arena_path, live, 1.0, [spoilt]))
    while asked == "after" and not rig.loop._leader.adapters.problem:
        time.sleep(0.01)
    rig.store.send(prepare)
    while not isinstance(answer := rig.store.poll(20.0), Prepared):
        assert answer is not None, "nothing was said"
    assert not answer.ok
    assert "it cannot serve: rank 0 cannot map adapter a" in answer.error


@pytest.mark.parametrize("stays", [False, True])
def test_a_store_without_its_history_is_followed_though_an_adapters_epoch_comes_again(make_rig, stays):
    rig = make_rig(fake={"step_s": 0.05})
    first = rig.serve()
    adapter = Adapter(rig)
    adapter.push(1)
    if stays:
        rig.api.generate("stays", adapter="a", max_tokens=10_000)
        rig.api.until(lambda: rig.api.tokens("stays") > 0)
    new = adapter.written(2)
    new = msgspec.structs.replace(new, live=msgspec.structs.replace(new.live, epoch=101))
    rig.store.send(store_messages.Registered(rig.store.arena_path, first, 1.0, [new]))
    if stays:
        assert rig.api.finish("stays")[2] == "abort"
    rig.api.until(lambda: list(rig.loop._leader.adapters.live.values()) == [new])
    rig.api.generate("next", adapter="a", max_tokens=3)
    assert rig.api.finish("next")[2] == "length"
    assert {span.adapter_digest for span in rig.api.result("next")[1]} == {new.live.digest}
    assert rig.loop._leader.adapters.problem == ""


def test_an_epoch_whose_old_version_still_computes_is_no_new_ones(make_rig):
    """The vote is no, and neither version stands for the other; the store's next epoch is another."""
    rig = make_rig(fake={"step_s": 0.05})
    rig.serve()
    adapter = Adapter(rig)
    adapter.push(1)
    rig.api.generate("stays", adapter="a", max_tokens=60)
    rig.api.until(lambda: rig.api.tokens("stays") > 0)
    adapter.push(2, "finish")
    new = adapter.written(3)
    new = msgspec.structs.replace(new, live=msgspec.structs.replace(new.live, epoch=101))
    rig.store.send(Prepare("s3", new.live, "keep", 30.0, new))
    answer = adapter.expect(Prepared)
    assert not answer.ok
    assert "epoch 101" in answer.error
    assert rig.api.finish("stays")[2] == "length"


@pytest.fixture
def flipped(make_rig, monkeypatch):
    """The store has said to flip, and the ranks have; then an adapter is prepared, until `may_end` is set."""
    rig = make_rig(fake={"step_s": 0.01}, hold_s=1.0, unknown_s=1.3)
    rig.serve()
    began, rig.may_end = threading.Event(), threading.Event()
    views = rig.loop._actions.adapters
    prepare = views.prepare

    def slow(version):
        began.set()
        assert rig.may_end.wait(30.0)
        prepare(version)

    monkeypatch.setattr(views, "prepare", slow)
    rig.api.generate("long", max_tokens=60)
    rig.api.until(lambda: rig.api.tokens("long") > 2)
    assert rig.store.prepare("s1", rig.store.write(1, 1)).ok
    assert rig.store.flip("s1").ok
    Adapter(rig).prepare(1)
    assert began.wait(10.0)
    return rig


def test_a_word_that_is_there_and_cannot_be_acted_on_yet_is_no_silence(flipped):
    """The store is not asked what is live, and nothing is undone."""
    flipped.store.send(Finalize("s1"))
    time.sleep(2.0)
    flipped.may_end.set()
    said = [type(flipped.store.poll(30.0)) for _ in range(2)]
    assert said == [Prepared, Finalized]
    assert flipped.api.finish("long")[2] == "length"
    assert flipped.versions("long") == [0, 1]
    flipped.check(flipped.api, "long")


@pytest.mark.parametrize("word", ["none", "rollback"])
def test_a_flip_is_taken_back_while_an_adapter_is_still_prepared(flipped, word):
    """No step runs until the ranks have gone back: they are bound to what is not served."""
    rig = flipped
    if word == "none":
        rig.store.close()
    else:
        rig.store.send(Rollback("s1", "another replica could not flip"))
    rig.api.pump(0.1)
    before, until = rig.api.tokens("long"), time.monotonic() + 2.0
    rig.api.until(lambda: time.monotonic() > until)
    assert rig.error is None
    assert rig.api.tokens("long") == before
    rig.may_end.set()
    assert rig.api.finish("long")[2] == "length"
    assert rig.versions("long") == [0]
    rig.check(rig.api, "long")


def test_the_store_hears_what_is_held_when_a_commit_is_over_and_not_with_the_vote_too(make_rig):
    """It is told as often as anything changes, and each message is a turn of its loop while a trainer waits."""
    rig = make_rig()
    rig.serve()
    adapter = Adapter(rig)
    adapter.push(1)
    adapter.push(2)
    while rig.store.poll(1.0) is not None:
        pass
    adapter.prepare(3)
    message = rig.store.poll(30.0)
    assert isinstance(message, Prepared), f"before its vote: {message}"
    assert message.ok
    assert rig.store.poll(0.3) is None
    adapter.finalize(3)
    assert isinstance(rig.store.poll(30.0), Finalized)
    held = rig.store.poll(30.0)
    assert isinstance(held, store_messages.AdaptersHeld)
    assert held.live == {"a": 103}
    adapter.prepare(4)
    assert adapter.expect(Prepared).ok
    rig.store.send(Rollback("s4", "no"))
    held = rig.store.poll(30.0)
    assert isinstance(held, store_messages.AdaptersHeld), "it is held until it is let go of, though it was taken back"
    assert {one.epoch for one in held.held} == {103, 104}
    assert isinstance(rig.store.poll(30.0), RolledBack)
    epochs = {104}
    while 104 in epochs:  # and it is let go of at the next tick
        held = rig.store.poll(30.0)
        assert isinstance(held, store_messages.AdaptersHeld)
        assert held.live == {"a": 103}
        epochs = {one.epoch for one in held.held}
    assert epochs == {103}

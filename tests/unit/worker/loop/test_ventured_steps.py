"""What a device computes between a flip and the store's last word: a step that counts if the version does. The engine
computes on the host and answers as a device does: tokens are drawn when they are asked for."""

import threading
import time
from types import SimpleNamespace

import pytest

from tests import fake_engine
from tests.fake_engine import FakeEngine
from tests.unit.worker.conftest import Ahead
from weight_manager.messages import Finalize, Finalized, Rollback, RolledBack
from worker.messages import Abort, Pause, Resume


@pytest.fixture
def steps(monkeypatch):
    """The weights of each step, as the engine was bound when it was launched."""
    found = []

    class Device(FakeEngine):
        def free_memory(self):
            return 0

        def forward(self, batch):
            host = SimpleNamespace(spec=self.spec, forward=self._launch)
            return Ahead(host, self._launch(batch))

        def _launch(self, batch):
            found.append(self._weights)
            return super().forward(batch)

    monkeypatch.setattr(fake_engine, "FakeEngine", Device)
    return found


STREAMED = 4
NAMES = [f"s{number}" for number in range(STREAMED + 1)]


@pytest.fixture
def busy(make_rig, steps):
    """Four streams and an answer under way on a device."""
    rig = make_rig(fake={"step_s": 0.003}, num_blocks=2000, hold_s=20.0, unknown_s=30.0)
    rig.serve()
    for number, name in enumerate(NAMES):
        rig.api.generate(name, [1 + number, 2], max_tokens=250, stream=number < STREAMED)
    rig.api.until(lambda: all(rig.api.tokens(name) > 20 for name in NAMES[:STREAMED]))
    return rig


def _quiet(steps):
    """How many steps there were, once none begins any more."""
    seen, since, end = len(steps), time.monotonic(), time.monotonic() + 30
    while time.monotonic() < since + 0.3:
        if len(steps) != seen:
            seen, since = len(steps), time.monotonic()
        assert time.monotonic() < end
        time.sleep(0.005)
    return seen


def test_a_rank_that_is_alone_says_that_it_has_flipped_before_the_next_step(busy):
    """Which would keep the store waiting."""
    held, free, engine = threading.Event(), threading.Event(), busy.loop._actions.engine
    bind, launch = engine.bind, engine._launch

    def bound(prepared):
        try:
            bind(prepared)
        finally:
            free.clear()
            held.set()

    def launched(batch):
        if held.is_set():
            assert free.wait(30)
        return launch(batch)

    engine.bind, engine._launch = bound, launched
    assert busy.store.prepare("s", busy.store.write(1, 1)).ok
    assert busy.store.flip("s").ok
    assert not free.is_set(), "the step is still to come"
    free.set()
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    for name in NAMES:
        busy.api.finish(name)


def _flipped(rig, steps, policy="keep"):
    """Commit up to the flip; how many steps were begun under the new version, and that nothing is told of them."""
    one = rig.store.write(1, 1)
    assert rig.store.prepare("s", one, policy).ok
    assert rig.store.flip("s").ok
    seen = _quiet(steps)
    rig.api.pump(0.1)
    told = [rig.api.tokens(name) for name in NAMES]
    rig.api.pump(0.2)
    assert told == [rig.api.tokens(name) for name in NAMES]
    assert {span.version for name in NAMES[:STREAMED] for span in rig.api.result(name)[1]} == {0}
    return sum(weights == rig.store.hashes[1] for weights in steps[:seen])


def _finish(rig):
    found = []
    for number, name in enumerate(NAMES):
        assert rig.api.finish(name)[2] == "length"
        rig.check(rig.api, name, (1 + number, 2))
        found.append(rig.versions(name))
        _check_as_it_came(rig.api.chunks[name])
    return found


def _check_as_it_came(chunks):
    """What a client was told of each token's version then is what the whole answer says."""
    at = 0
    for chunk in chunks:
        at += len(chunk.token_ids)
        (version,) = {span.version for span in chunks[-1].spans if span.start < at <= span.end}
        assert chunk.spans[-1].version == version, f"token {at - 1}"


def test_a_step_is_computed_while_the_store_decides_and_its_tokens_come_after(busy, steps):
    assert _flipped(busy, steps) == 1
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    assert _finish(busy) == [[0, 1]] * len(NAMES)
    assert busy.api.stats().counters.get("discarded_steps", 0) == 0, "it counted"


@pytest.mark.parametrize("ends", ["finalize", "rollback"])
def test_tokens_are_drawn_on_the_device_meanwhile_and_fetched_once_the_version_is_live(busy, steps, monkeypatch, ends):
    begun, fetched, begin, drawn = [], [], Ahead.begin, Ahead.drawn
    monkeypatch.setattr(Ahead, "begin", lambda self, *given: begun.append(self) or begin(self, *given))
    monkeypatch.setattr(Ahead, "drawn", lambda self: fetched.append(self) or drawn(self))
    assert _flipped(busy, steps) == 1
    assert begun[-1] not in fetched
    assert begun[-2] in fetched
    ventured, many = begun[-1], len(begun)
    if ends == "finalize":
        busy.store.send(Finalize("s"))
        busy.store.expect(Finalized)
    else:
        busy.store.send(Rollback("s", "a replica said no"))
        busy.store.expect(RolledBack)
    assert _finish(busy) == [[0, 1] if ends == "finalize" else [0]] * len(NAMES)
    assert len(begun) > many
    assert (ventured in fetched) == (ends == "finalize")
    assert begun.count(ventured) == 1


def test_a_step_of_a_version_that_is_rolled_back_is_thrown_away(busy, steps):
    assert _flipped(busy, steps) == 1
    busy.store.send(Rollback("s", "a replica said no"))
    busy.store.expect(RolledBack)
    assert _finish(busy) == [[0]] * len(NAMES)
    assert busy.api.stats().counters["discarded_steps"] == 1


@pytest.mark.parametrize("policy", ["recompute", "abort"])
def test_nothing_is_computed_ahead_for_sequences_that_do_not_go_on_as_they_are(busy, steps, policy):
    assert _flipped(busy, steps, policy) == 0
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    for name in NAMES:
        busy.api.finish(name)


def test_a_request_that_is_aborted_meanwhile_ends_with_what_it_has(busy, steps):
    assert _flipped(busy, steps) == 1
    busy.api.call(Abort, ["s0"])
    assert busy.api.finish("s0")[2] == "abort"
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    for number, name in enumerate(NAMES[1:], 1):
        assert busy.api.finish(name)[2] == "length"
        busy.check(busy.api, name, (1 + number, 2))
    assert busy.versions("s0") == [0]


def test_a_pause_that_comes_meanwhile_is_kept(busy, steps):
    assert _flipped(busy, steps) == 1
    busy.api.call(Pause, "keep", clear_cache=False)
    told = {name: busy.api.tokens(name) for name in NAMES}
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    _quiet(steps)
    busy.api.pump(0.2)
    assert told == {name: busy.api.tokens(name) for name in NAMES}
    busy.api.call(Resume)
    assert _finish(busy) == [[0, 1]] * len(NAMES)


def test_a_step_that_cannot_be_launched_is_launched_once_the_version_is_final(busy, steps):
    engine = busy.loop._actions.engine
    answered = engine.forward

    def fails_once(batch):
        if engine._weights == busy.store.hashes.get(1):
            engine.forward = answered
            raise RuntimeError("no")
        return answered(batch)

    engine.forward = fails_once
    assert _flipped(busy, steps) == 0
    busy.store.send(Finalize("s"))
    busy.store.expect(Finalized)
    assert _finish(busy) == [[0, 1]] * len(NAMES)

"""Steps that ranks on devices launch together: each launches the same ones in the same order, whatever the first throws
away. Two real loops in threads; their signals only pass messages, their engines compute on the host, and what a device
would hand to the other devices (the tokens that were drawn) goes from one engine to the other."""

import os
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests import fake_engine
from tests.fake_engine import FakeEngine
from tests.unit.worker.conftest import Ahead
from tests.unit.worker.loop.rig import Rig
from tests.unit.worker.test_event_loop import ThreadSignals
from weight_manager.messages import Finalize, Finalized, InPlace, Rollback, RolledBack
from worker import boot
from worker.boot import build_loop
from worker.messages import Abort, Clear, Done, Pause, Reload, Resume

PATIENCE_S = 30


MADE = {}  # the two of the test that runs, by rank


class Told(Ahead):
    """Logits of the first rank: a step behind them is told, and its tokens handed over, before it is computed."""

    def __init__(self, engine, logits):
        host = SimpleNamespace(spec=engine.spec, forward=lambda batch: engine.launch(batch, told=True))
        super().__init__(host, logits)


class Device(FakeEngine):
    """Of two ranks on devices. tokens: from the first rank's to the other's."""

    def __init__(self, spec, *, rank, **options):
        super().__init__(spec, rank=0, **options)
        self.number, self.launched, self.fails, self.followed = rank, [], [], 0
        self.telling = lambda batch: None
        self.tokens = queue.SimpleQueue() if rank == 0 else MADE[0].tokens
        MADE[rank] = self

    def free_memory(self):
        return 0

    def forward(self, batch):
        if self.fails and batch.positions[0] > self.fails[0]:
            del self.fails[0]
            raise RuntimeError("no such launch")
        logits = self.launch(batch)
        return Told(self, logits) if self.number == 0 else None

    def follow(self, batch):
        assert self.number == 1
        self.followed += 1
        tokens = self.tokens.get(timeout=PATIENCE_S)
        assert (batch.token_ids == 0).all(), "they are not known to a host"
        self.launch(type(batch)(tokens, *(getattr(batch, name) for name in FIELDS)))

    def launch(self, batch, *, told=False):
        if told:
            self.telling(type(batch)(np.zeros_like(batch.token_ids), *(getattr(batch, name) for name in FIELDS)))
            self.tokens.put(batch.token_ids.copy())
        logits = super().forward(batch)
        self.launched.append((batch.pack().tolist(), self._weights))
        return logits


FIELDS = (
    *("positions", "slots", "query_lens", "context_lens", "block_tables", "logits_rows", "block_copies"),
    *("draft", "adapters", "former"),
)


class Pair(Rig):
    """Two loops over one arena."""

    def launch(self):
        shared = {"cells": [None, None], "barrier": threading.Barrier(2, timeout=PATIENCE_S)}
        made = {rank: ThreadSignals(rank, shared) for rank in range(2)}
        self.journal = [[], []]

        def joined(config, replica, rank):
            groups = SimpleNamespace(
                shutdown=lambda: self.journal[rank].append("shut") or [],
                restart=lambda: self.journal[rank].append("up") or [],
                prove=lambda: self.journal[rank].append("prove"),
            )
            return boot._World(replica, rank, made[rank], groups, None, [os.getpid()] * 2)

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(boot, "_join", joined)
        self.patch.setattr(fake_engine, "FakeEngine", Device)
        super().launch()
        self.other_error = None
        self.other = build_loop(self.config, None, 0, 1, lambda: None)
        self._other = threading.Thread(target=self._run_other, daemon=True)
        self._other.start()

    def _run_other(self):
        try:
            self.other.run()
        except BaseException as error:
            self.other_error = error

    def end(self):
        ended = super().end()
        self._other.join(PATIENCE_S)
        self.patch.undo()
        return ended and not self._other.is_alive()

    @property
    def engines(self):
        return MADE[0], MADE[1]

    def require_same(self):
        """Every step was launched by both, in one order, of the same tokens, under the same version."""
        first, second = (self._told(engine.launched) for engine in self.engines)
        assert first == second
        assert first

    def _told(self, launched):
        """Each rank's weights are its own part: which of the versions it has had."""
        versions = list(dict.fromkeys(weights for _, weights in launched))
        return [(packed, versions.index(weights)) for packed, weights in launched]


@pytest.fixture
def pair():
    made = Pair(tp=2, fake={"step_s": 0.002}, num_blocks=2000, hold_s=20.0, unknown_s=30.0, heartbeat_s=0.5)
    made.serve()
    for number, name in enumerate(NAMES):
        made.api.generate(name, [1 + number, 2], max_tokens=200)
    made.api.until(lambda: all(made.api.tokens(name) > 20 for name in NAMES))
    yield made
    made.stop()
    assert made.other_error is None
    made.require_same()


NAMES = ["a", "b", "c"]


def finish(pair, names=NAMES):
    for name in names:
        assert pair.api.finish(name)[2] == "length"
        pair.check(pair.api, name, (1 + NAMES.index(name), 2))


def test_steps_are_launched_ahead_by_both_and_whoever_waits_is_let_in(pair):
    pair.api.generate("late", [7, 7], max_tokens=30)
    pair.api.finish("late")
    pair.check(pair.api, "late", (7, 7))
    finish(pair)
    assert pair.engines[1].followed > 150, "of 200 steps"
    assert pair.engines[0].tokens.empty(), "all that were handed over were taken"


@pytest.mark.parametrize("policy", ["keep", "recompute", "abort", "wait"])
def test_a_commit_comes_between_steps_on_both(pair, policy):
    pair.store.push("s", pair.store.write(1, 1), policy)
    for name in NAMES:
        pair.api.finish(name)
    if policy != "abort":
        finish(pair)
    pair.api.generate("after", [5], max_tokens=5)
    pair.api.finish("after")
    assert pair.versions("after") == [1]


def _flipped(pair):
    one = pair.store.write(1, 1)
    assert pair.store.prepare("s", one, "keep").ok
    assert pair.store.flip("s").ok
    for _ in range(3):  # more would have come by then, and the test is to say so
        pair.api.pump(0.2)
    assert [weights for _, weights in pair.engines[0].launched].count(pair.store.hashes[1]) == 1


def test_a_step_is_ventured_by_both_and_counts(pair):
    _flipped(pair)
    pair.store.send(Finalize("s"))
    pair.store.expect(Finalized)
    finish(pair)
    assert pair.api.stats().counters.get("discarded_steps", 0) == 0


def test_a_step_that_was_ventured_is_thrown_away_after_a_rollback(pair):
    _flipped(pair)
    pair.store.send(Rollback("s", "a replica said no"))
    pair.store.expect(RolledBack)
    finish(pair)
    assert pair.api.stats().counters["discarded_steps"] == 1
    assert [pair.versions(name) for name in NAMES] == [[0]] * 3


def test_an_abort_while_a_step_is_ventured(pair):
    _flipped(pair)
    pair.api.call(Abort, ["a"])
    assert pair.api.finish("a")[2] == "abort"
    pair.store.send(Finalize("s"))
    pair.store.expect(Finalized)
    finish(pair, ["b", "c"])


def test_aborts_and_pauses_while_steps_are_on_their_way(pair):
    for name in ("x", "y"):
        pair.api.generate(name, [3], max_tokens=200)
        pair.api.until(lambda name=name: pair.api.tokens(name) > 3)
        pair.api.call(Abort, [name])
        pair.api.finish(name)
    assert isinstance(pair.api.call(Pause, "keep"), Done)
    assert isinstance(pair.api.call(Resume), Done)
    finish(pair)


def test_clear_shuts_on_both_and_a_reload_brings_back(pair):
    assert isinstance(pair.api.call(Pause, "keep"), Done)
    assert isinstance(pair.api.call(Clear), Done)
    assert isinstance(pair.api.call(Reload), Done)
    assert isinstance(pair.api.call(Resume), Done)
    finish(pair)
    assert pair.journal == [["shut", "up"]] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launch_that_fails_on_one_rank_is_not_waited_for_by_the_other(monkeypatch, rank):
    """It ends the replica, as a step that failed on one rank does; until then no word is missing."""
    left = threading.Event()
    monkeypatch.setattr("worker.event_loop._leave", left.set)
    monkeypatch.setattr("worker.event_loop._ALONE_S", 0.5)
    made = Pair(tp=2, fake={"step_s": 0.002}, heartbeat_s=0.5)
    made.serve()
    made.engines[rank].fails.append(0)  # the next whose first position is not 0
    made.api.generate("a", [1, 2, 3], max_tokens=20)
    assert made.api.finish("a")[2] == "error"
    made.api.generate("b", [1, 2, 3], max_tokens=5)
    assert made.api.finish("b")[2] == "length"
    assert made.journal[0] == ["prove"]
    made.stop()
    assert made.other_error is None


@pytest.fixture
def copied(monkeypatch):
    """What each of two ranks that have memory of their own is told to copy ahead, by rank."""
    found = {0: [], 1: []}
    kept = {
        "copy_ahead": lambda self, key, memory, spans: found[self.number].append((key, spans)),
        "stage": lambda self, live, views, regions: self.prepare(views),
        "read": lambda self, handle, name: NotImplemented,
    }
    for name, method in kept.items():
        monkeypatch.setattr(Device, name, method, raising=False)
    return found


def test_both_copy_a_version_while_it_arrives_and_steps_go_on(copied, pair):
    """What is heard until the next order may be one message, or several."""
    expected = []
    for version in (1, 2):
        live = pair.store.write(version, version % 2)
        key = (live.slot, live.write_epoch)
        for spans in ([(0, 64)], [(64, 64), (256, 64)]):
            pair.store.send(InPlace(*key, spans))
            expected += [(key, span) for span in spans]
        pair.store.push(f"s{version}", live, "keep")
    finish(pair)
    told = {rank: [(key, span) for key, spans in parts for span in spans] for rank, parts in copied.items()}
    assert told == {0: expected, 1: expected}


def test_both_copy_what_arrives_while_nothing_is_asked_for(copied, pair):
    finish(pair)
    live = pair.store.write(1, 1)
    pair.store.send(InPlace(live.slot, live.write_epoch, [(0, 64)]))
    pair.api.until(lambda: copied[0] and copied[1])
    assert copied[0] == copied[1] == [((live.slot, live.write_epoch), [(0, 64)])]


def test_what_arrives_right_behind_the_end_of_a_commit_is_copied(copied, pair):
    _flipped(pair)
    two = pair.store.write(2, 0)
    pair.store.send(Finalize("s"))
    pair.store.send(InPlace(two.slot, two.write_epoch, [(0, 64)]))
    pair.store.expect(Finalized)
    pair.api.until(lambda: copied[0] and copied[1])
    assert copied[0] == copied[1] == [((two.slot, two.write_epoch), [(0, 64)])]

"""How ranks agree on errors: two loops in two threads over signals that only pass messages."""

import threading

import pytest

from worker.adapter_views import AdapterViews
from worker.event_loop import EventLoop
from worker.orders import Actions, GroupDead, Order, Phase, Report, Signal, judge


class ThreadSignals:
    """Both ranks' calls meet at a barrier, as collectives do."""

    def __init__(self, rank, shared):
        self.rank, self.size, self._shared = rank, 2, shared

    def meet(self, value):
        self._shared["cells"][self.rank] = value
        self._shared["barrier"].wait()
        values = list(self._shared["cells"])
        self._shared["barrier"].wait()
        return values

    def agree(self, order):
        return self.meet(order)[0]

    def share(self, batch):
        return self.meet(batch)[0]

    def vote(self, mine):
        return [tuple(v) for v in self.meet(tuple(mine))]

    def gather(self, data):
        return self.meet(data)


class ScriptedLeader:
    """Gives the orders of a script, one a tick, with a vote in each but the first."""

    def __init__(self, orders):
        self.orders, self.settlements, self.failures = list(orders), [], []
        self.stepping = self
        self.deciding = self
        self.lifecycle = self

    def receive(self): ...
    def reply(self): ...
    def apply(self, event, reason): ...
    def stepped(self, logits, seconds): ...
    def raised(self): ...

    def decide(self):
        return self.orders.pop(0)

    def schedule(self):
        return Batch()

    def settled(self, order, verdict):
        self.settlements.append((order.phase, verdict))

    def failed(self, verdict):
        self.failures.append(verdict)


class Batch:
    former = False

    def pack(self):
        return [1]


class Engine:
    def __init__(self, fault=None):
        self.fault, self.rebuilt = fault, 0

    def forward(self, batch):
        if self.fault:
            raise RuntimeError(self.fault)
        return "logits"

    def release_kv(self):
        return 10

    def allocate_kv(self):
        self.rebuilt += 1


class Weights:
    """Fails where it is told to."""

    live = None

    def __init__(self, refuses=()):
        self.refuses, self.calls = refuses, []

    def __getattr__(self, name):
        def call(*_args, **_kwargs):
            self.calls.append(name)
            if name in self.refuses:
                raise ValueError(f"{name} of lm_head")
            return 0

        return call


class NoGroups:
    dead = False

    def shutdown(self):
        return []

    restart = shutdown

    def prove(self):
        if self.dead:
            raise GroupDead("the group of the matrices' sums is dead")


@pytest.fixture
def run(monkeypatch):
    """Two ranks through a script of orders; (leader, actions of both)."""
    monkeypatch.setattr("worker.event_loop.ForwardBatch", type("B", (), {"unpack": staticmethod(lambda flat: Batch())}))

    def play(orders, engines, weights):
        shared = {"cells": [None, None], "barrier": threading.Barrier(2, timeout=10)}
        leader = ScriptedLeader([*orders, Order(Signal.STOP, vote=True)])
        actions = [
            Actions(e, lambda path: None, NoGroups(), lambda: None, AdapterViews(None, 0, None)) for e in engines
        ]
        for own, held in zip(actions, weights, strict=True):
            own.weights = held
        loops = [EventLoop(ThreadSignals(r, shared), actions[r], None if r else leader) for r in range(2)]
        errors = []

        def target(loop):
            try:
                loop.run()
            except BaseException as error:
                errors.append(error)
                shared["barrier"].abort()

        play.leader = leader
        threads = [threading.Thread(target=target, args=(loop,)) for loop in loops]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
            assert not thread.is_alive()
        assert not errors, errors
        return leader, actions

    return play


def test_a_step_that_fails_on_one_rank_ends_it_on_both_and_names_the_rank(run):
    engines = [Engine(), Engine("out of memory")]
    leader, _ = run([Order(step=True)], engines, [Weights(), Weights()])
    assert [(v.rank, v.error) for v in leader.failures] == [(1, "RuntimeError: out of memory")]
    assert [engine.rebuilt for engine in engines] == [1, 1]


def test_a_step_that_failed_because_its_group_died_ends_the_replica_and_no_request(run, monkeypatch):
    monkeypatch.setattr(NoGroups, "dead", True)
    with pytest.raises(AssertionError, match="sums is dead"):
        run([Order(step=True), Order(step=True)], [Engine("timeout"), Engine("timeout")], [Weights(), Weights()])
    assert run.leader.failures == []


def test_a_step_whose_sums_were_ended_ends_the_rank_at_once_and_asks_nobody():
    engine = Engine()
    engine.forward = lambda batch: (_ for _ in ()).throw(GroupDead("the process of rank 1 is gone"))
    actions = Actions(engine, lambda path: None, NoGroups(), lambda: None, AdapterViews(None, 0, None))
    loop = EventLoop(ThreadSignals(1, {}), actions, None)
    with pytest.raises(GroupDead, match="rank 1 is gone"):
        loop.step(Batch())


@pytest.mark.parametrize(("overrun_s", "leaves_within_s"), [(60.0, 5.0), (-1.0, 0.5)])
def test_a_rank_whose_step_failed_waits_for_the_others_word_but_not_for_one_that_sleeps(
    monkeypatch, overrun_s, leaves_within_s
):
    monkeypatch.setattr("worker.event_loop._OVERRUN_S", overrun_s)
    actions = Actions(Engine("timeout"), lambda path: None, NoGroups(), lambda: None, AdapterViews(None, 0, None))
    loop = EventLoop(ThreadSignals(1, {}), actions, None)
    loop.step(Batch())
    loop._alone.cancel()
    assert loop._alone.interval == leaves_within_s


def test_every_turn_and_every_operation_of_a_step_is_motion():
    """Of a rank that is not the first too: its watchdog has only that."""
    moves: list[int] = []
    actions = Actions(Engine(), lambda path: None, NoGroups(), lambda: None, AdapterViews(None, 0, None))
    loop = EventLoop(ThreadSignals(1, {}), actions, None, lambda: moves.append(1))
    assert [actions.engine.asked() for _ in range(3)] == [False] * 3
    assert len(moves) == 3
    loop.agree = lambda: None
    loop.tick()
    assert len(moves) == 4


def test_a_flip_that_fails_on_one_rank_is_undone_on_both(run):
    weights = [Weights(), Weights(refuses=("flip",))]
    leader, _ = run([Order(Signal.UPDATE, Phase.FLIP, session="s")], [Engine(), Engine()], weights)
    assert [(phase, v.ok, v.rank, v.error) for phase, v in leader.settlements] == [
        (Phase.FLIP, False, 1, "ValueError: flip of lm_head")
    ]
    assert [w.calls for w in weights] == [["flip", "rollback"]] * 2


def test_what_both_ranks_did_is_reported_in_rank_order(run):
    orders = [Order(Signal.CLEAR, Phase.RELEASE, tags=("kv_cache",))]
    leader, actions = run(orders, [Engine(), Engine()], [Weights(), Weights()])
    ((_, verdict),) = leader.settlements
    assert (verdict.ok, verdict.data) == (True, [{"kv_cache": 10}, {"kv_cache": 10}])
    assert [a.released for a in actions] == [frozenset({"kv_cache"})] * 2


def test_no_verdict_while_a_rank_is_pending():
    assert judge(ThreadSignals(0, {}), [1, 0], Report()) is None


def test_a_dead_group_names_who_is_lost():
    assert GroupDead("rank 1 is gone", [1]).lost == (1,)

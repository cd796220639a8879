"""A rank's adapters: only what its slot proves to be is held, and what lies alike is planned once."""

import msgspec
import numpy as np
import pytest

from rollout_client.peft import AdapterConfig
from rollout_client.protocol import Part
from tests.fake_engine import FakeAdapters, views_hash
from weight_manager.adapters.plan import AdapterPlanner, adapter_layout
from weight_manager.arena import Arena
from weight_manager.dynamic_weight_manager import WeightsRefused
from weight_manager.layout import Manifest, Parameter, make_layout, rank_views, region_digests, version_digest
from weight_manager.messages import Live, LiveAdapter
from worker.adapter_views import AdapterViews

BASE = make_layout(
    Manifest("M", "float32", tuple(Parameter(f"model.layers.{i}.self_attn.q_proj.weight", (6, 4)) for i in range(3))), 1
)
MODULE = "model.layers.{}.self_attn.q_proj"


class Counting(FakeAdapters):
    """How often something was planned."""

    def __init__(self):
        super().__init__()
        self.planned = 0

    def plan(self, *args):
        self.planned += 1
        return super().plan(*args)


class Store:
    """An adapter's arena, and versions in it."""

    def __init__(self, folder, rank=2):
        parts = [
            Part(f"{MODULE.format(i)}.{half}", "float32", shape)
            for i in range(3)
            for half, shape in (("lora_A", (rank, 4)), ("lora_B", (6, rank)))
        ]
        self.shape = AdapterPlanner(BASE).shape(AdapterConfig(rank, 2.0), parts, 256)
        self.layout = adapter_layout(self.shape, BASE)
        self.arena = Arena.create(folder, "adapters", self.layout.slot_bytes, slots=3)

    def version(self, number, slot, **live):
        content = np.frombuffer(self.arena.slot(slot), np.float32)
        content[:] = np.random.default_rng(number).standard_normal(content.size)
        digest = version_digest(self.layout, region_digests(self.layout, self.arena.slot(slot)))
        said = {"run_id": "r", "version": number, "epoch": 10 + number, "slot": slot, "digest": digest} | live
        return LiveAdapter("a", Live(**said, write_epoch=self.arena.bump(slot)), str(self.arena.path), self.shape)

    def hash(self, slot):
        return views_hash({n: v for n, v in rank_views(self.layout, 0, self.arena.slot(slot)).items() if "lora" in n})


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path)
    yield made
    made.arena.close()


def test_versions_that_lie_alike_are_planned_once_and_held_each_with_its_bytes(store):
    table = Counting()
    views = AdapterViews(BASE, 0, table)
    for number in range(1, 4):
        views.prepare(store.version(number, number % 3))
    assert table.held == {10 + number: store.hash(number % 3) for number in range(1, 4)}
    assert table.planned == 1
    for number in range(1, 4):
        views.forget(10 + number)
        views.forget(10 + number)
    assert not table.held
    views.prepare(store.version(4, 0))  # nothing of the name was left
    assert table.planned == 2


def test_bytes_that_are_not_the_version_are_refused(store):
    views = AdapterViews(BASE, 0, FakeAdapters())
    good = store.version(1, 0)
    store.arena.slot(0)[store.layout.regions[-1].offset] ^= 1
    with pytest.raises(WeightsRefused, match="slot 0 does not hold version 1 of a"):
        views.prepare(good)
    assert not views.overwritten()


def test_a_slot_that_was_given_away_is_refused_or_fences(store):
    table = FakeAdapters()
    views = AdapterViews(BASE, 0, table)
    late = store.version(1, 0)
    store.arena.bump(0)
    with pytest.raises(WeightsRefused, match="given away"):
        views.prepare(late)
    assert not table.held
    views.prepare(store.version(2, 1))
    assert not views.overwritten()
    store.arena.bump(1)
    assert views.overwritten() == {12}


def test_another_shape_of_the_name_is_planned_anew(store, tmp_path):
    table = Counting()
    views = AdapterViews(BASE, 0, table)
    views.prepare(store.version(1, 0))
    wider = Store(tmp_path, rank=3)
    try:
        views.prepare(wider.version(2, 0))
        assert table.planned == 2
        assert table.held[12] == wider.hash(0)
        assert table.held[11] == store.hash(0)
    finally:
        wider.arena.close()


def test_only_what_is_planned_and_small_is_prepared_in_the_loop(store, monkeypatch):
    views = AdapterViews(BASE, 0, FakeAdapters())
    first, second = store.version(1, 0), store.version(2, 1)
    assert not views.is_quick(first)
    views.prepare(first)
    assert views.is_quick(second)
    assert not views.is_quick(msgspec.structs.replace(second, name="b"))
    wider = msgspec.structs.replace(second.shape, modules=second.shape.modules[:1])
    assert not views.is_quick(msgspec.structs.replace(second, shape=wider))
    monkeypatch.setattr("worker.adapter_views.QUICK_BYTES", store.layout.slot_bytes - 1)
    assert not views.is_quick(second)

"""A rank's adapters: only what its slot proves to be is held, and what lies alike is planned once."""

import os

import msgspec
import numpy as np
import pytest

from rollout_client.peft import AdapterConfig
from rollout_client.protocol import Part
from tests.fake_engine import CopyingAdapters, FakeAdapters, views_hash
from weight_manager.adapters.plan import AdapterPlanner, adapter_layout
from weight_manager.arena import Arena, ArenaReader
from weight_manager.dynamic_weight_manager import WeightsRefused
from weight_manager.layout import Manifest, Parameter, make_layout, rank_views, region_digests, version_digest
from weight_manager.messages import InPlace, Live, LiveAdapter
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

    def given_away(self, number, slot):
        """A version whose slot is already another push's."""
        version = self.version(number, slot)
        self.arena.bump(slot)
        return version

    def in_place(self, version, first=0, stop=None):
        """Of these regions, that they are there."""
        live = version.live
        return InPlace(live.slot, live.write_epoch, self.layout.ranges[first:stop], "a", str(self.arena.path))

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


class Getting(Counting):
    """An engine that may get memory between steps alone. got: bytes of the arrays that it was got for."""

    def __init__(self, *, gets=True):
        super().__init__()
        self.gets, self.got = gets, []

    def get(self, plan, nbytes):
        if plan and nbytes == self.full:
            raise ValueError("no room")
        self.got.append(nbytes)

    full = 0


def test_memory_is_got_before_a_version_is_prepared_and_what_is_wrong_is_said_then(store):
    table = Getting()
    views, size = AdapterViews(BASE, 0, table), store.layout.slot_bytes
    one, two = store.version(1, 0), store.version(2, 1)
    for version in (one, two):
        assert not views.is_quick(version) or version is two
        views.get_memory(version)
        views.prepare(version)
    assert table.got == [size, size]
    assert table.planned == 1
    views.get_memory(two)
    assert table.got == [size, size], "it is held"
    table.full = size
    views.get_memory(store.version(3, 2))
    bad = msgspec.structs.replace(two, name="b", shape=msgspec.structs.replace(two.shape, dtype="bfloat16"))
    bad = msgspec.structs.replace(bad, live=msgspec.structs.replace(two.live, epoch=20))
    views.get_memory(bad)
    with pytest.raises(WeightsRefused, match="slot 1 does not hold version 2 of b"):
        views.prepare(bad)


def test_an_engine_that_gets_memory_beside_steps_is_not_asked_to_plan_between_them(store):
    table = Getting(gets=False)
    views = AdapterViews(BASE, 0, table)
    views.get_memory(store.version(1, 0))
    assert (table.got, table.planned) == ([], 0)


either_kind = pytest.mark.parametrize("kind", [FakeAdapters, CopyingAdapters])


@either_kind
def test_bytes_that_are_not_the_version_are_refused(store, kind):
    views = AdapterViews(BASE, 0, kind())
    good = store.version(1, 0)
    store.arena.slot(0)[store.layout.regions[-1].offset] ^= 1
    with pytest.raises(WeightsRefused, match="slot 0 does not hold version 1 of a"):
        views.prepare(good)
    assert not views.overwritten()


@either_kind
def test_a_slot_that_was_given_away_is_refused_or_fences(store, kind):
    table = kind()
    views = AdapterViews(BASE, 0, table)
    late = store.version(1, 0)
    store.arena.bump(0)
    with pytest.raises(WeightsRefused, match="given away"):
        views.prepare(late)
    assert not views.overwritten(), "no step is void for it"
    views.forget(late.live.epoch)  # as the loop does, between steps
    assert not table.held
    views.prepare(store.version(2, 1))
    assert not views.overwritten()
    store.arena.bump(1)
    assert views.overwritten() == {12}


def test_steps_are_checked_while_a_thread_prepares_another_version(store, monkeypatch):
    views = AdapterViews(BASE, 0, FakeAdapters())
    views.prepare(store.version(1, 0))
    more = iter([store.version(2, 1), store.version(3, 2)])
    look = ArenaReader.write_epoch

    def meanwhile(reader, slot):
        found = look(reader, slot)
        with monkeypatch.context() as once:
            once.setattr(ArenaReader, "write_epoch", look)
            if (version := next(more, None)) is not None:
                views.prepare(version)  # as its thread may, between two looks of the loop's
        return found

    monkeypatch.setattr(ArenaReader, "write_epoch", meanwhile)
    assert not views.overwritten()
    assert views._held.keys() >= {11, 12}


@either_kind
def test_nothing_is_kept_of_what_was_refused(store, kind):
    views = AdapterViews(BASE, 0, kind())
    spoiled = store.version(1, 0)
    store.arena.slot(0)[store.layout.regions[-1].offset] ^= 1
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        for wrong in (spoiled, store.version(2, 1, digest="0" * 16), store.given_away(3, 2)):
            with pytest.raises(WeightsRefused):
                views.prepare(msgspec.structs.replace(wrong, name=f"a{number}"))
    assert len(os.listdir("/proc/self/fd")) == before
    assert not views._fits
    good = store.version(4, 1)
    views.prepare(good)
    with pytest.raises(WeightsRefused):
        views.prepare(spoiled)
    assert views.is_quick(good), "of a name with a version nothing is lost"
    assert not views.overwritten()


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


@pytest.fixture
def copying(store):
    """Views of a table that copies, with version 1 in slot 0; version 2 is in slot 1."""
    views = AdapterViews(BASE, 0, CopyingAdapters())
    views.prepare(store.version(1, 0))
    return views, views._table, store.version(2, 1)


def test_what_arrived_is_copied_before_it_is_asked_for_and_once(store, copying):
    views, table, second = copying
    views.take_in(store.in_place(second, 0, 4))
    views.take_in(store.in_place(second, 3, 5))
    assert len(table.taken[-1].numbers) == 5
    assert table.held.keys() == {11}
    views.prepare(second)
    assert table.held[12] == store.hash(1)
    assert sorted(table.taken[-1].numbers) == list(range(6))
    assert len(table.taken) == 2


def test_what_is_held_is_what_was_proved_whatever_becomes_of_the_slot(store, copying):
    views, table, second = copying
    expected = store.hash(1)
    views.take_in(store.in_place(second))
    store.arena.slot(1)[store.layout.regions[2].offset] ^= 1
    views.prepare(second)
    assert table.held[12] == expected


def test_bytes_that_were_copied_too_early_are_copied_again(store, copying):
    views, table, second = copying
    slot, at = store.arena.slot(1), store.layout.regions[2].offset
    slot[at] ^= 1
    views.take_in(store.in_place(second))
    slot[at] ^= 1
    views.prepare(second)
    assert table.held[12] == store.hash(1)
    slot[at] ^= 1
    third = store.version(3, 2)
    store.arena.slot(2)[at] ^= 1
    views.take_in(store.in_place(third))
    with pytest.raises(WeightsRefused, match="slot 2 does not hold version 3 of a"):
        views.prepare(third)
    assert table.held.keys() == {11, 12}


def test_what_was_copied_for_a_push_that_came_to_nothing_is_not_the_next_ones(store, copying):
    views, table, second = copying
    views.take_in(store.in_place(second))
    again = store.version(2, 1)  # of the same slot
    views.take_in(store.in_place(second, 0, 3))  # late
    views.take_in(store.in_place(again, 0, 2))
    assert len(table.taken[-1].numbers) == 6 + 2
    views.prepare(again)
    assert table.held[12] == store.hash(1)
    assert len(table.taken) == 2, "its memory is used again"


def test_a_hint_that_fits_nothing_is_of_no_consequence(store, copying, tmp_path, monkeypatch):
    views, table, second = copying
    known = store.in_place(second)
    views.take_in(msgspec.structs.replace(known, adapter="b"))
    views.take_in(msgspec.structs.replace(known, arena_path=str(tmp_path / "none")))
    views.take_in(msgspec.structs.replace(known, spans=[(64, 8), (1 << 40, 64)]))
    assert not table.taken[-1].numbers
    monkeypatch.setattr("worker.adapter_views.QUICK_BYTES", store.layout.slot_bytes - 1)
    views.take_in(known)
    assert not table.taken[-1].numbers
    views.prepare(second)
    assert table.held[12] == store.hash(1)


def test_a_version_whose_memory_is_to_be_made_first_is_left_to_a_thread(store, copying):
    """Making it may take longer than a step; nothing is copied between steps either."""
    views, table, second = copying
    table.room = False
    views.take_in(store.in_place(second))
    assert len(table.taken) == 1
    assert not views.is_quick(second)
    table.room = True
    assert views.is_quick(second)
    views.take_in(store.in_place(second, 0, 4))
    table.room = False
    assert views.is_quick(second), "it has its memory"
    views.take_in(store.in_place(second, 3))
    views.prepare(second)
    assert table.held[12] == store.hash(1)
    assert len(table.taken) == 2


def test_nothing_of_a_name_is_kept_when_its_last_version_goes(store, copying):
    views, table, second = copying
    views.take_in(store.in_place(second))
    views.forget(11)
    views.take_in(store.in_place(second))
    views.prepare(second)
    assert table.held == {12: store.hash(1)}
    assert len(table.taken) == 3


def test_every_rank_proves_all_of_a_version_and_copies_its_own(tmp_path):
    modules = [f"model.layers.0.self_attn.{n}_proj" for n in "qo"]
    weights = (Parameter(f"{modules[0]}.weight", (6, 4), split=0), Parameter(f"{modules[1]}.weight", (6, 4), split=1))
    base = make_layout(Manifest("M", "float32", weights), 2)
    halves = (("lora_A", (2, 4)), ("lora_B", (6, 2)))
    parts = [Part(f"{module}.{half}", "float32", shape) for module in modules for half, shape in halves]
    shape = AdapterPlanner(base).shape(AdapterConfig(2, 2.0), parts, 256)
    layout = adapter_layout(shape, base)
    with Arena.create(tmp_path, "adapters", layout.slot_bytes, slots=3) as arena:
        for slot in range(2):
            np.frombuffer(arena.slot(slot), np.float32)[:] = np.random.default_rng(slot).standard_normal(
                layout.slot_bytes // 4
            )
        digests = [version_digest(layout, region_digests(layout, arena.slot(slot))) for slot in range(2)]
        lives = [Live("r", n, 11 + n, n, digests[n], arena.bump(n)) for n in range(2)]
        first, second = (LiveAdapter("a", live, str(arena.path), shape) for live in lives)
        table = CopyingAdapters()
        views = AdapterViews(base, 1, table)
        views.prepare(first)
        views.take_in(InPlace(1, second.live.write_epoch, layout.ranges, "a", str(arena.path)))
        others = next(r for r in layout.regions if r.rank == 0)
        views.prepare(second)
        own = {n: v for n, v in rank_views(layout, 1, arena.slot(1)).items() if n in table.taken[-1].extents}
        assert table.held[12] == views_hash(own)
        views.forget(12)
        arena.slot(1)[others.offset] ^= 1
        with pytest.raises(WeightsRefused, match="does not hold"):
            views.prepare(second)


def test_an_epoch_that_names_other_bytes_is_not_taken_for_what_is_held(store):
    """A store that began without its history counts from the start."""
    views = AdapterViews(BASE, 0, FakeAdapters())
    one, two = store.version(1, 0), store.version(2, 1, epoch=11)
    views.prepare(one)
    views.prepare(one)  # again: nothing is to be done
    with pytest.raises(WeightsRefused, match="epoch 11"):
        views.prepare(two)
    views.forget(11)
    views.prepare(two)

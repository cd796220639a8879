import numpy as np
import pytest
import xxhash

from rollout_client.errors import ArenaError
from weight_manager import dynamic_weight_manager
from weight_manager.arena import Arena
from weight_manager.dynamic_weight_manager import DynamicWeightManager, WeightsRefused
from weight_manager.layout import Manifest, Parameter, make_layout, region_digests, region_views, version_digest
from weight_manager.messages import Live

MANIFEST = Manifest(
    "M",
    "float32",
    (
        Parameter("gate", (4, 3), split=0, fused="gate_up"),
        Parameter("up", (4, 3), split=0, fused="gate_up"),
        Parameter("down", (3, 4), split=1),
        Parameter("embed", (6, 3), aliases=("head",)),
    ),
)
LAYOUT = make_layout(MANIFEST, 2)


class Engine:
    """Records what it is asked; `computes` is the sum of everything it is bound to, read when asked."""

    def __init__(self):
        self.bound = None
        self.log = []
        self.fails = None

    def prepare(self, views):
        self.log.append("prepare")
        if self.fails:
            raise ValueError(self.fails)
        return dict(views)

    def bind(self, prepared):
        self.log.append("bind" if prepared else "bind none")
        self.bound = prepared

    @property
    def computes(self):
        return None if self.bound is None else float(self.bound["embed"][0, 0])


@pytest.fixture
def arena(tmp_path):
    with Arena.create(tmp_path, "unit", LAYOUT.slot_bytes) as made:
        yield made


@pytest.fixture
def put(arena):
    """Write a version, every element `version`, into a slot as a session would; returns its Live."""

    def write(version, slot):
        epoch = arena.bump(slot)
        for view in region_views(LAYOUT, arena.slot(slot)):
            view[...] = version
        digest = version_digest(LAYOUT, region_digests(LAYOUT, arena.slot(slot)))
        return Live("run", version, version, slot, digest, epoch)

    return write


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def manager(arena, engine):
    return DynamicWeightManager(arena.path, LAYOUT, 1, engine)


def take(manager, live):
    """As a rank does that has just mapped the arena."""
    manager.prepare(live, verify=True)
    manager.flip()
    manager.finalize()


def test_nothing_is_held_at_first(manager, engine):
    assert manager.live is None
    assert manager.verify() == {}
    assert not manager.fenced()
    assert engine.log == []


def test_a_commit_flips_and_lets_the_old_version_go(manager, engine, put):
    first, second = put(1, 0), put(2, 1)
    take(manager, first)
    manager.prepare(second)
    assert (manager.live, engine.computes) == (first, 1)
    manager.flip()
    assert (manager.live, engine.computes) == (second, 2)
    manager.finalize()
    manager.rollback()
    assert (manager.live, engine.computes) == (second, 2)
    assert engine.log == ["prepare", "bind", "prepare", "bind"]


@pytest.mark.parametrize("flipped", [False, True])
def test_rollback_serves_the_old_version_as_it_was(manager, engine, put, flipped):
    first = put(1, 0)
    take(manager, first)
    manager.prepare(put(2, 1))
    if flipped:
        manager.flip()
    for _ in range(2):
        manager.rollback()
        assert (manager.live, engine.computes) == (first, 1)
    with pytest.raises(WeightsRefused, match="nothing is prepared"):
        manager.flip()
    manager.prepare(put(3, 1))
    manager.flip()
    assert engine.computes == 3


def test_rollback_to_nothing(manager, engine, put):
    manager.prepare(put(1, 0))
    manager.flip()
    manager.rollback()
    assert manager.live is None
    assert engine.bound is None


def test_an_engine_that_refuses_changes_nothing(manager, engine, put):
    first = put(1, 0)
    take(manager, first)
    engine.fails = "embed: NaN"
    with pytest.raises(WeightsRefused, match="embed: NaN"):
        manager.prepare(put(2, 1))
    assert (manager.live, engine.computes) == (first, 1)


def test_views_are_this_ranks_and_read_only(manager, engine, put):
    take(manager, put(1, 0))
    shapes = {name: view.shape for name, view in engine.bound.items()}
    assert shapes == {"gate": (2, 3), "up": (2, 3), "gate_up": (4, 3), "down": (3, 2), "embed": (6, 3)}
    with pytest.raises(ValueError, match="read-only"):
        engine.bound["embed"][0] = 0


def test_the_bytes_are_checked_against_the_digest_where_that_is_asked_for(manager, put, arena):
    live = put(1, 0)
    arena.slot(0)[LAYOUT.regions[-1].offset] ^= 1
    with pytest.raises(WeightsRefused, match="slot 0 does not hold version 1"):
        take(manager, live)
    assert manager.live is None


def test_a_slot_given_away_meanwhile_is_refused(manager, engine, put, arena):
    live = put(1, 0)
    arena.bump(0)
    for verify in (True, False):
        with pytest.raises(WeightsRefused, match="given away"):
            manager.prepare(live, verify=verify)
    assert engine.bound is None


def test_a_rank_that_slept_through_a_commit_knows(manager, put, arena):
    take(manager, put(1, 0))
    put(2, 1)
    assert not manager.fenced()
    arena.bump(0)
    assert manager.fenced()
    take(manager, put(3, 0))
    assert not manager.fenced()


def test_clear_and_reload(manager, engine, put, arena):
    take(manager, put(1, 0))
    held = sum(engine.bound[name].nbytes for name in ("gate", "up", "down", "embed"))
    assert manager.clear_parameters() == held
    assert manager.clear_parameters() == 0
    assert (manager.live, engine.bound, manager.verify()) == (None, None, {})
    second, again = put(2, 1), DynamicWeightManager(arena.path, LAYOUT, 1, engine)
    take(again, second)
    assert (again.live, engine.computes) == (second, 2)


def mapped(path):
    with open("/proc/self/maps") as maps:
        return sum(str(path) in line for line in maps)


def test_clear_lets_every_mapping_go(manager, engine, put, arena):
    before = mapped(arena.path)
    take(manager, put(1, 0))
    manager.prepare(put(2, 1))
    manager.flip()
    manager.clear_parameters()
    assert mapped(arena.path) == before - 3  # header and two slots


def test_verify_names_what_differs(manager, put, arena):
    take(manager, put(1, 0))
    before = manager.verify()
    assert set(before) == {"gate", "up", "down", "embed"}
    assert before["embed"] == xxhash.xxh3_64_hexdigest(np.ones(18, np.float32).tobytes())
    (mine,) = (r for r in LAYOUT.regions if (r.name, r.rank) == ("down", 1))
    arena.slot(0)[mine.offset] ^= 1
    assert {name for name, digest in manager.verify().items() if digest != before[name]} == {"down"}


class Device(Engine):
    """Its memory is its own."""

    def stage(self, live, views, regions):
        if self.fails:
            raise ValueError(self.fails)
        self.log.append(f"stage {live.version}")
        return {name: view.copy() for name, view in views.items()}

    def read(self, handle, name):
        return handle[name].view(np.uint8).reshape(-1)


def test_an_engine_with_memory_of_its_own_proves_and_is_asked_for_what_it_holds(arena, put):
    engine = Device()
    manager = DynamicWeightManager(arena.path, LAYOUT, 1, engine)
    take(manager, put(1, 0))
    assert engine.log == ["stage 1", "bind"]
    before = manager.verify()
    assert before["embed"] == xxhash.xxh3_64_hexdigest(np.ones(18, np.float32).tobytes())
    arena.slot(0)[:] = bytes(LAYOUT.slot_bytes)
    assert manager.verify() == before
    engine.bound["embed"][0, 0] = 9
    assert {name for name, digest in manager.verify().items() if digest != before[name]} == {"embed"}
    engine.fails = "the device does not hold version 2"
    with pytest.raises(WeightsRefused, match="does not hold version 2"):
        manager.prepare(put(2, 1))


@pytest.mark.parametrize("tp", [1, 2])
def test_at_a_start_the_whole_arena_is_proved_if_not_by_a_device_that_has_all_of_it(tmp_path, tp):
    layout = make_layout(MANIFEST, tp)
    engine = Device()
    with Arena.create(tmp_path, "unit", layout.slot_bytes) as arena:
        manager = DynamicWeightManager(arena.path, layout, 0, engine)
        live = Live("run", 1, 1, 0, "another digest", arena.bump(0))
        if tp == 1:
            manager.prepare(live)
            manager.prepare(live, verify=True)
            assert engine.log == ["stage 1", "stage 1"]
        else:
            with pytest.raises(WeightsRefused, match="slot 0 does not hold version 1"):
                manager.prepare(live, verify=True)
            assert engine.log == []


def test_aliases_are_one_region_after_any_number_of_changes(manager, engine, put, arena):
    for version in range(1, 6):
        manager.prepare(put(version, version % 2))
        manager.flip()
        manager.finalize()
        if version == 3:
            manager.clear_parameters()
            manager = DynamicWeightManager(arena.path, LAYOUT, 1, engine)
            take(manager, put(3, 1))
        assert "head" not in engine.bound
        assert engine.computes == version


def test_an_arena_of_another_layout_is_refused(tmp_path, engine):
    with (
        Arena.create(tmp_path, "other", 2 * LAYOUT.slot_bytes) as other,
        pytest.raises(ArenaError, match="this layout needs"),
    ):
        DynamicWeightManager(other.path, LAYOUT, 0, engine)


def computed_with_former(manager, engine):
    with manager.bound_to_former():
        return engine.computes


def test_the_version_before_can_be_computed_with_until_its_slot_is_given_away(manager, engine, put, arena):
    first, second = put(1, 0), put(2, 1)
    take(manager, first)
    assert manager.former is None
    manager.prepare(second)
    manager.flip()
    assert manager.former is None, "the commit may be undone"
    manager.finalize()
    manager.finalize()
    assert manager.former == first
    assert computed_with_former(manager, engine) == 1
    assert (manager.live, engine.computes) == (second, 2)
    arena.bump(0)
    assert manager.former is None
    third = put(3, 0)
    manager.prepare(third)
    manager.flip()
    manager.finalize()
    assert manager.former == second


def test_what_a_step_of_it_raises_leaves_the_live_version_bound(manager, engine, put):
    take(manager, put(1, 0))
    take(manager, put(2, 1))
    with pytest.raises(KeyError), manager.bound_to_former():
        raise KeyError
    assert engine.computes == 2


def test_a_commit_that_is_undone_leaves_it_as_it_was(manager, engine, put, arena):
    """As back to the previous version: its slot is flipped to, and not given away before."""
    first, second = put(1, 0), put(2, 1)
    take(manager, first)
    take(manager, second)
    manager.prepare(first)
    manager.flip()
    manager.rollback()
    assert (manager.live, manager.former) == (second, first)
    take(manager, first)
    assert (manager.live, manager.former) == (first, second)


def test_a_rank_that_holds_nothing_holds_nothing_from_before(manager, engine, put):
    take(manager, put(1, 0))
    take(manager, put(2, 1))
    manager.clear_parameters()
    assert manager.former is None


def test_ranks_that_share_a_version_are_given_its_regions_digests_which_are_the_versions(arena, put, monkeypatch):
    given = []

    class Shares(Device):
        def stage(self, live, views, regions):
            given.append(list(regions))
            return super().stage(live, views, regions)

    manager = DynamicWeightManager(arena.path, LAYOUT, 1, Shares())
    one, two = put(1, 0), put(2, 1)
    digests = region_digests(LAYOUT, arena.slot(1))
    take(manager, one)  # without the store's: hashed here
    hashed = []
    monkeypatch.setattr(dynamic_weight_manager, "region_digests", lambda *_: hashed.append(1))
    with pytest.raises(WeightsRefused, match="digest differs"):
        manager.prepare(two, given[0])
    manager.prepare(two, digests)
    assert given == [region_digests(LAYOUT, arena.slot(0)), digests]
    assert not hashed, "no byte of the arena is read to prove what the store has proved"


class OwnMemory(Engine):
    """The next push is copied into its memory of a version."""

    def stage(self, live, views, regions):
        return self.prepare(views)

    def read(self, handle, name):
        return handle[name]


class Copying(Engine):
    """What it prepares is as large as the views."""

    copies = True


@pytest.mark.parametrize("engine", [OwnMemory(), Copying()])
def test_nothing_is_kept_where_it_would_cost_memory(arena, put, engine):
    manager = DynamicWeightManager(arena.path, LAYOUT, 1, engine)
    take(manager, put(1, 0))
    take(manager, put(2, 1))
    assert manager.former is None


class DeviceAhead(Device):
    """It copies what it hears of."""

    def __init__(self):
        super().__init__()
        self.ahead = []

    def copy_ahead(self, key, memory, spans):
        self.ahead.append((key, memory.nbytes, spans))


def test_a_version_that_still_arrives_is_offered_to_an_engine_with_memory_of_its_own(arena, put):
    engine = DeviceAhead()
    manager = DynamicWeightManager(arena.path, LAYOUT, 1, engine)

    def offered(slot, write_epoch):
        engine.ahead.clear()
        manager.copy_ahead(slot, write_epoch, [(0, 64)])
        return engine.ahead

    assert not offered(1, arena.write_epoch(1)), "nothing is served yet"
    take(manager, put(1, 0))
    assert offered(1, arena.write_epoch(1)) == [((1, arena.write_epoch(1)), LAYOUT.slot_bytes, [(0, 64)])]
    assert not offered(1, arena.write_epoch(1) + 1), "the slot is another push's by now"
    assert not offered(2, arena.write_epoch(2)), "the spare slot is not mapped here"
    manager.prepare(put(2, 1))
    assert not offered(1, arena.write_epoch(1)), "one is prepared"
    manager.flip()
    assert not offered(0, arena.write_epoch(0)), "a rollback would go back to what is in the other slot"
    manager.finalize()
    assert offered(0, arena.write_epoch(0))


def test_an_engine_that_computes_from_the_arena_is_offered_nothing(manager, put):
    take(manager, put(1, 0))
    manager.copy_ahead(1, manager._reader.write_epoch(1), [(0, 64)])  # no more than that: nothing is raised


def test_views_of_a_slot_are_made_once_and_go_with_its_mapping(manager, engine, put):
    take(manager, put(1, 0))
    first = engine.bound
    take(manager, put(2, 1))
    take(manager, put(3, 0))
    assert engine.bound["embed"] is first["embed"]
    assert engine.computes == 3
    manager.clear_parameters()
    assert not manager._views

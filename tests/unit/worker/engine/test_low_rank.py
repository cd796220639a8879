"""What adapters add to a product, by itself: any shape and rank, in one order of sums whoever else is in the step."""

import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import xxhash

from rollout_client.aligned_map import HUGE
from tests.engine_cases import to_bits
from weight_manager.layout import Extent
from worker.cpu import native
from worker.engine.base import ForwardBatch
from worker.models.compiled_program import gating
from worker.models.low_rank import NativeLowRank, PlainLowRank, rows_of
from worker.models.many_product import ADD, GATED, SET, ManyProduct
from worker.models.onednn_weights import NamedSlot
from worker.models.packed_adapter import Factors, Site, hasher

SITES = (
    Site("qkv.weight", ("q", "k", "v"), 37, (70, 16, 33)),
    Site("out.weight", ("o",), 160, (300,)),
)


def wide(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def batch_of(adapters, lengths=None):
    """A step of sequences of these lengths (1 each); nothing else of it is looked at."""
    none = np.zeros(0, np.int32)
    lengths = np.array(lengths or [1] * len(adapters), np.int32)
    return ForwardBatch(
        none,
        none,
        none,
        lengths,
        none,
        none.reshape(0, 0),
        none,
        none.reshape(0, 2),
        adapters=np.array(adapters, np.int32),
    )


def made(kind, *, narrow=False):
    if kind == "plain":
        return PlainLowRank(SITES)
    try:
        return NativeLowRank(native.load(), SITES, narrow=narrow)
    except OSError as error:
        pytest.skip(f"no compiled kernel here: {error}")


class Change(NamedTuple):
    """What an adapter adds to a linear."""

    a: np.ndarray
    b: np.ndarray
    scale: float


def random_change(rng, site, part, rank, *, narrow=False):
    a = rng.standard_normal((rank, site.inputs)).astype(np.float32)
    b = rng.standard_normal((site.rows[part], rank)).astype(np.float32)
    a, b = (to_bits(a), to_bits(b)) if narrow else (a, b)
    return Change(a, b, float(rng.uniform(0.5, 2)))


def hold(low_rank, epoch, changes, plan=None):
    """All A's and B's in one array, with what is no number between them; the plan."""
    spans, pieces, at = {}, [], 0
    for module, change in changes.items():
        gap = np.full(7, np.nan if change.a.dtype == np.float32 else 0x7FC0, change.a.dtype)
        spans[module] = Factors(
            Extent(at + 7, change.a.shape), Extent(at + 14 + change.a.size, change.b.shape), change.scale
        )
        pieces += [gap, change.a.reshape(-1), gap, change.b.reshape(-1)]
        at += 14 + change.a.size + change.b.size
    plan = plan or low_rank.plan(spans)
    low_rank.hold(epoch, plan, np.concatenate(pieces))
    return plan


def held(low_rank, rng, ranks, **kw):
    """Adapters 1, 2, ... of these ranks; the second changes nothing of `out` and of `k`."""
    all_changes = {}
    for epoch, rank in enumerate(ranks, 1):
        changes = {
            module: random_change(rng, site, part, min(256, rank + part), **kw)
            for site in SITES
            for part, module in enumerate(site.modules)
            if epoch != 2 or module not in ("o", "k")
        }
        hold(low_rank, epoch, changes)
        all_changes[epoch] = changes
    return all_changes


def added(low_rank, site, x, batch, *, token_major=False):
    """[rows, T]: what a step adds to zeros, with x and the result in either layout."""
    columns = x.shape[1]
    tokens = 1 if columns == 1 else -(-columns // 16) * 16  # as programs pad them
    x = np.pad(x, ((0, 0), (0, tokens - columns)), constant_values=np.nan if x.dtype == np.float32 else 0x7FC0)
    y = (
        np.zeros((tokens, sum(site.rows)), np.float32).T
        if token_major
        else np.zeros((sum(site.rows), tokens), np.float32)
    )
    low_rank.begin(batch)
    low_rank.step(site.name, np.ascontiguousarray(x.T).T if token_major else np.ascontiguousarray(x), y)()
    assert not y[:, columns:].any()
    return y[:, :columns]


def expected(site, x, epochs, changes):
    y = np.zeros((sum(site.rows), x.shape[1]))
    for t, epoch in enumerate(epochs):
        row = 0
        for module, rows in zip(site.modules, site.rows, strict=True):
            if epoch and module in changes[epoch]:
                f = changes[epoch][module]
                a, b = (wide(m) if m.dtype == np.uint16 else m for m in (f.a, f.b))
                y[row : row + rows, t] = f.scale * (b.astype(np.float64) @ (a.astype(np.float64) @ x[:, t]))
            row += rows
    return y


def test_tokens_are_sorted_by_adapter_and_cut_into_runs():
    rows = rows_of(batch_of([9, 0, 3, 9], lengths=[2, 3, 100, 1]))
    assert rows.epochs == (3, 9)
    assert rows.order.tolist() == [*range(5, 105), 0, 1, 105]
    assert rows.runs.tolist() == [[0, 0, 64], [0, 64, 36], [1, 100, 3]]


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", ["native", "plain"])
@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_any_shape_and_rank(kind, site, narrow, token_major):
    rng = np.random.default_rng(0)
    low_rank = made(kind)
    changes = held(low_rank, rng, [1, 5, 16, 256], narrow=narrow)
    lengths, adapters = [1, 7, 90, 1, 3, 1, 20], [1, 0, 4, 2, 3, 4, 1]
    epochs = np.repeat(adapters, lengths)
    x = rng.standard_normal((site.inputs, len(epochs))).astype(np.float32)
    got = added(low_rank, site, x, batch_of(adapters, lengths), token_major=token_major)
    want = expected(site, x, epochs, changes)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    assert not got[:, epochs == 0].any()


@pytest.mark.parametrize(("kind", "narrow"), [("native", False), ("native", True), ("plain", False)])
@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_what_is_added_to_a_token_does_not_show_who_else_is_there(kind, narrow, site):
    """Also where there are more columns than are worked on together, and an adapter's tokens lie far apart."""
    rng = np.random.default_rng(1)
    low_rank = made(kind, narrow=narrow)
    held(low_rank, rng, [16, 3, 4])
    x = rng.standard_normal((site.inputs, 150)).astype(np.float32)
    x = to_bits(x) if narrow else x
    epochs = np.concatenate([rng.integers(0, 4, 55), np.repeat([1, 2, 3], 15), rng.integers(0, 4, 50)]).tolist()
    among = added(low_rank, site, x, batch_of(epochs))
    for count in (1, 2, 3, 5, 16, 33, 64, 65, 130):
        some = rng.permutation(150)[:count]
        of_them = [epochs[t] for t in some]
        if any(of_them):
            found = added(low_rank, site, x[:, some], batch_of(of_them), token_major=count % 2 == 1)
            assert np.array_equal(found, among[:, some]), count


def test_a_token_that_is_no_number_spoils_no_other():
    rng = np.random.default_rng(2)
    low_rank = made("native")
    held(low_rank, rng, [16])
    x = rng.standard_normal((37, 5)).astype(np.float32)
    clean = added(low_rank, SITES[0], x, batch_of([1] * 5))
    x[:, 2] = np.nan
    spoiled = added(low_rank, SITES[0], x, batch_of([1] * 5))
    assert np.isnan(spoiled[:, 2]).all()
    others = [0, 1, 3, 4]
    assert np.array_equal(spoiled[:, others], clean[:, others])


def test_an_adapter_that_is_no_number_spoils_no_other():
    rng = np.random.default_rng(3)
    low_rank = made("native")
    changes = held(low_rank, rng, [4, 4, 4])
    bad = {module: f._replace(b=np.full_like(f.b, np.inf)) for module, f in changes[3].items()}
    low_rank.drop(3)
    hold(low_rank, 3, bad)
    x = rng.standard_normal((160, 3)).astype(np.float32)
    y = added(low_rank, SITES[1], x, batch_of([1, 3, 0]))
    np.testing.assert_allclose(
        y, np.where([True, False, True], expected(SITES[1], x, [1, 0, 0], changes), y), rtol=1e-4, atol=1e-3
    )
    assert not np.isfinite(y[:, 1]).any()


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", ["native", "plain"])
def test_versions_that_lie_alike_share_a_plan_and_the_memory_of_those_let_go(kind, narrow):
    rng = np.random.default_rng(5)
    low_rank, changes, plan = made(kind), {}, None
    x = rng.standard_normal((160, 3)).astype(np.float32)
    for epoch in range(1, 6):
        changes[epoch] = {"o": random_change(rng, SITES[1], 0, 21, narrow=narrow)._replace(scale=0.7)}
        plan = hold(low_rank, epoch, changes[epoch], plan)
        if epoch > 2:
            low_rank.drop(epoch - 2)
        if kind == "native":
            assert plan.has_room(narrow=narrow) == (epoch > 2)
            assert not plan.has_room(narrow=not narrow)
        for held_now in {max(1, epoch - 1), epoch}:
            want = expected(SITES[1], x, [held_now, 0, held_now], changes)
            got = added(low_rank, SITES[1], x, batch_of([held_now, 0, held_now]))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_float32_activations_are_read_as_the_bases_bfloat16():
    """A step of few tokens keeps them in float32, others in bfloat16: it must not show."""
    rng = np.random.default_rng(4)
    low_rank = made("native", narrow=True)
    held(low_rank, rng, [16])
    x = rng.standard_normal((37, 4)).astype(np.float32)
    few = added(low_rank, SITES[0], x, batch_of([1] * 4))
    many = added(low_rank, SITES[0], to_bits(x), batch_of([1] * 4))
    assert np.array_equal(few, many)


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("base", [False, True])
def test_a_copy_is_bfloat16_where_the_base_or_the_adapter_is(base, sent):
    """Half the bytes to read in a step; a float32 adapter over a float32 base stays as exact as it came."""
    rng = np.random.default_rng(6)
    low_rank = made("native", narrow=base)
    changes = {"o": random_change(rng, SITES[1], 0, 24, narrow=sent)}
    hold(low_rank, 1, changes)
    x = wide(to_bits(rng.standard_normal((160, 3)).astype(np.float32)))
    if base and not sent:
        changes = {"o": changes["o"]._replace(a=to_bits(changes["o"].a), b=to_bits(changes["o"].b))}
    want = expected(SITES[1], x, [1, 1, 1], {1: changes})
    np.testing.assert_allclose(added(low_rank, SITES[1], x, batch_of([1, 1, 1])), want, rtol=1e-5, atol=1e-4)
    assert low_rank._held[1].memory.itemsize == (2 if base or sent else 4)


@pytest.mark.parametrize("narrow", [False, True])
def test_a_copy_lies_in_huge_pages_of_its_own(narrow):
    """From the first byte to the last: a step that reads small pages takes as long to look them up."""
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this kernel has no huge pages")
    rng = np.random.default_rng(9)
    low_rank = NativeLowRank(made("native")._native, (Site("o", ("o",), 4000, (3000,)),), narrow=narrow)
    changes = {"o": Change(*(rng.standard_normal(s).astype(np.float32) for s in ((200, 4000), (3000, 200))), 1.0)}
    hold(low_rank, 1, changes)
    memory = low_rank._held[1].memory
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    assert start % HUGE == 0
    whole = -(-end // HUGE) * HUGE
    ours = [flags for first, last, flags in mappings() if first <= start and last >= whole]
    assert ours
    assert "hg" in ours[0]


def mappings():
    """(first byte, byte after the last, flags) of each mapping of this process."""
    first = last = 0
    with open("/proc/self/smaps") as smaps:
        for words in map(str.split, smaps):
            if not words[0].endswith(":"):
                first, last = (int(place, 16) for place in words[0].split("-"))
            elif words[0] == "VmFlags:":
                yield first, last, words[1:]


@pytest.mark.parametrize("inputs", [16, 576, 1040, 3000])
@pytest.mark.parametrize("ranks", [(1, 1, 1), (8, 8, 8), (64, 0, 3), (0, 0, 17), (16, 16, 16), (255, 256, 2)])
def test_parts_of_any_rank_side_by_side(inputs, ranks):
    """Also where a part is not changed at all, and with as many slices of the inputs as it takes."""
    rng = np.random.default_rng(7)
    site = Site("qkv.weight", ("q", "k", "v"), inputs, (65, 64, 130))
    low_rank = NativeLowRank(made("native")._native, (site,), narrow=False)
    changes = {
        epoch: {
            module: random_change(rng, site, part, rank)
            for part, (module, rank) in enumerate(zip(site.modules, order, strict=True))
            if rank
        }
        for epoch, order in enumerate((ranks, ranks[::-1]), 1)
    }
    for epoch, of_it in changes.items():
        hold(low_rank, epoch, of_it)
    epochs = [1, 2, 0, 2, 1, 1, 2]
    x = rng.standard_normal((inputs, len(epochs))).astype(np.float32)
    got, want = added(low_rank, site, x, batch_of(epochs)), expected(site, x, epochs, changes)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    for t, epoch in enumerate(epochs):
        if epoch:
            assert np.array_equal(added(low_rank, site, x[:, [t]], batch_of([epoch]))[:, 0], got[:, t])


@pytest.mark.parametrize("rank", [1, 16, 21, 256])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("sharing", [8, 9, 13, 16, 47, 64])
def test_tokens_that_share_an_adapter_have_the_bits_of_each_alone(sharing, narrow, rank):
    """Many of one adapter among 16 columns are computed a token in each lane, a few an output in each."""
    rng = np.random.default_rng(8)
    low_rank = made("native", narrow=narrow)
    changes = {
        epoch: {m: random_change(rng, site, part, rank) for site in SITES for part, m in enumerate(site.modules)}
        for epoch in (1, 2)
    }
    for epoch, of_it in changes.items():
        hold(low_rank, epoch, of_it)
    epochs = [*rng.integers(0, 3, 3).tolist(), *[1] * (sharing - 3), *rng.integers(0, 3, 64 - sharing).tolist()]
    for site in SITES:
        x = rng.standard_normal((site.inputs, 64)).astype(np.float32)
        x = to_bits(x) if narrow else x
        among = added(low_rank, site, x, batch_of(epochs))
        for t, epoch in enumerate(epochs):
            if epoch:
                alone = added(low_rank, site, x[:, [t]], batch_of([epoch]))
                assert np.array_equal(alone[:, 0], among[:, t]), (site.name, t)
            else:
                assert not among[:, t].any()


def slot(array):
    """Where a weight lies, as a program knows it."""
    made = NamedSlot("w", array.shape, array.dtype, 0, None)
    made.address = array.ctypes.data
    return made


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(("mode", "parts"), [(SET, (100, 48, 65)), (ADD, (1600,)), (GATED, (120, 120))])
@pytest.mark.parametrize("tokens", [16, 32, 48, 64])
def test_what_a_product_adds_on_its_way_has_the_bits_of_adding_it_afterwards(tokens, mode, parts, token_major, narrow):
    """Adapters of one and of many tokens, one that leaves a part as it is; claims end in the midst of each part."""
    rng, columns, names = np.random.default_rng(tokens), 1040, ("q", "k", "v")[: len(parts)]
    sites = Site("w", names, columns, parts), Site("next", ("o",), 48, (48,))
    shared = made("native")._native
    if not shared.number("many_narrow" if narrow else "many_wide"):
        pytest.skip("this processor lacks the instructions: adapters are added afterwards")
    low_rank = NativeLowRank(shared, sites, narrow=narrow)
    for epoch, rank in enumerate((16, 40, 5), 1):
        changes = {m: random_change(rng, sites[0], part, rank + part) for part, m in enumerate(names)}
        changes["o"] = random_change(rng, sites[1], 0, rank)
        if epoch == 2:
            del changes[names[-1]]
        hold(low_rank, epoch, changes)
    weight, biases, x, before = (
        rng.standard_normal(shape, np.float32)
        for shape in ((sum(parts), columns), (sum(parts),), (tokens, columns), (sum(parts), tokens))
    )
    weight, x = (to_bits(weight), to_bits(x)) if narrow else (weight, x)
    x, bias = (x.T if token_major else np.ascontiguousarray(x.T)), slot(biases)

    def product(mode, y, adapted=None):
        words = shared, mode, slot(weight), bias if mode == GATED else None, 1024, x, y
        ManyProduct(*words, lambda rows: np.full((rows, tokens), np.nan, np.float32), adapted)()

    def gated():
        return np.zeros((sum(parts) // 2, tokens), np.uint16 if narrow else np.float32)

    def on_its_way():
        y = gated() if mode == GATED else before.copy()
        adapted = low_rank.adapted("w", x, y)
        adapted.before(low_rank.adapted("next", np.zeros((48, tokens), x.dtype), before))
        for _ in range(2):
            low_rank._between[:] = np.nan  # what a counter that is not cleared would leave
            product(mode, y, adapted)
        return y

    def afterwards():
        y = before.copy()
        for _ in range(2):
            product(SET if mode == GATED else mode, y)
            low_rank.step("w", x, y)()
        if mode != GATED:
            return y
        into = gated()
        gating(shared, y, into, lambda: bias.address)()
        return into

    for adapters in (rng.integers(0, 4, tokens), np.ones(tokens, int), (np.arange(tokens) == 3) * 2):
        low_rank.begin(batch_of(adapters.tolist()))
        np.testing.assert_array_equal(on_its_way(), afterwards(), str(adapters))


def test_a_step_is_prepared_anew_when_its_rows_or_adapters_are_others():
    """Steps with the rows of the one before are not: it costs what a step of few tokens would notice."""
    rng = np.random.default_rng(9)
    low_rank = made("native")
    changes = held(low_rank, rng, [4, 3, 2])
    x = rng.standard_normal((160, 3)).astype(np.float32)

    def check(adapters, lengths=None):
        got = added(low_rank, SITES[1], x, batch_of(adapters, lengths))
        want = expected(SITES[1], x, np.repeat(adapters, lengths or [1] * len(adapters)), changes)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)

    for lengths in (None, None, [1, 2], [2, 1]):
        check([1, 3] if lengths else [1, 0, 3], lengths)
    check([3, 1, 1])
    with pytest.raises(KeyError):
        low_rank.begin(batch_of([1, 9, 3]))
    check([3, 1, 1])
    low_rank.drop(3)
    with pytest.raises(KeyError):
        low_rank.begin(batch_of([3, 1, 1]))
    changes[3] = {"o": random_change(rng, SITES[1], 0, 7)}
    hold(low_rank, 3, changes[3])
    check([3, 1, 1])


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_version_that_was_copied_piece_by_piece_is_the_one_that_is_held_at_once(narrow, source):
    if not hasher():
        pytest.skip("nothing hashes here")
    rng, low_rank = np.random.default_rng(5), made("native", narrow=narrow)
    changes = {m: random_change(rng, SITES[0], i, 5 + i, narrow=source == "bfloat16") for i, m in enumerate("qkv")}
    plan = hold(low_rank, 1, changes)
    pieces = [matrix for change in changes.values() for matrix in (change.a, change.b)]
    flat = np.zeros(max(e.start + np.prod(e.shape) for e in plan.pieces), pieces[0].dtype)
    for extent, piece in zip(plan.pieces, pieces, strict=True):
        extent.of(flat)[...] = piece
    taking = low_rank.taking(plan, flat.dtype)
    for numbers in ([3, 0], [1, 2, 5, 4], [2], []):
        expected = [xxhash.xxh3_64_intdigest(pieces[n].tobytes()) for n in numbers]
        assert taking.take(flat, np.array(numbers, np.int64)).tolist() == expected
    low_rank.keep(2, taking)
    x = rng.standard_normal((37, 3)).astype(np.float32)
    if narrow:
        x = wide(to_bits(x))
    one, other = (added(low_rank, SITES[0], x, batch_of([epoch] * 3)) for epoch in (1, 2))
    np.testing.assert_array_equal(one, other)
    assert one.any()


def test_what_is_hashed_are_the_bytes_that_are_packed_whoever_writes_meanwhile():
    """A of one linear alone lies as its transpose."""
    if not hasher():
        pytest.skip("nothing hashes here")
    rank, inputs = 16, 3000
    sites = (Site("o.weight", ("o",), inputs, (64,)),)
    low_rank = type(made("native"))(native.load(), sites, narrow=False)
    plan = low_rank.plan({"o": Factors(Extent(0, (rank, inputs)), Extent(rank * inputs, (64, rank)), 1.0)})
    flat, over = np.zeros(rank * inputs + 64 * rank, np.float32), threading.Event()

    def write():
        number = 0
        while not over.is_set():
            number += 1
            flat[:] = number

    writer = threading.Thread(target=write)
    writer.start()
    torn = 0
    try:
        until = time.monotonic() + 30.0
        while torn < 20 and time.monotonic() < until:
            taking = low_rank.taking(plan, flat.dtype)
            (digest, _) = taking.take(flat, np.arange(2)).tolist()
            packed = taking._memory[: rank * inputs].reshape(inputs, rank).T
            assert xxhash.xxh3_64_intdigest(np.ascontiguousarray(packed).tobytes()) == digest
            torn += len(np.unique(packed)) > 1
    finally:
        over.set()
        writer.join()
    assert torn, "nobody wrote in the middle of a copy"

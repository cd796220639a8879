"""Block tables: admission, growth, copy-on-write, and what is offered for reuse."""

import pytest

from worker.kv_cache import KvCache, KvState
from worker.versions import Version

ONE, TWO = Version(1, 1, "1"), Version(2, 2, "2")
OTHER = Version(1, 1, "other")
"""Of a store that began without its history: the number and the epoch come again."""


@pytest.fixture
def cache() -> KvCache:
    cache = KvCache(8, 4, prefix_caching=True)
    cache.enter(ONE)
    return cache


def _computed(cache: KvCache, tokens: list[int], *, salt: str = "") -> KvState:
    kv = KvState(salt)
    cache.admit(kv, len(tokens), cache.reusable(kv, tokens)[0])
    assert cache.reserve(kv, len(tokens) - kv.computed)
    cache.settle()
    cache.advance(kv, tokens, len(tokens) - kv.computed)
    return kv


def test_reserve_takes_all_or_nothing(cache: KvCache) -> None:
    kv = KvState()
    cache.admit(kv, 4, [])
    kv.computed = 4
    assert not cache.reserve(kv, 29)
    assert (len(kv.table), cache.pool.available) == (1, 7)
    assert cache.reserve(kv, 28)
    assert (len(kv.table), cache.pool.available) == (8, 0)


def test_full_blocks_are_found_but_never_the_last_token(cache: KvCache) -> None:
    tokens = list(range(8))
    first = _computed(cache, tokens)
    again = KvState()
    found, lacking = cache.reusable(again, tokens)
    assert found == first.table[:1]  # the second block holds the last token
    assert lacking is None
    assert cache.reusable(KvState(), [*tokens, 8])[0] == first.table
    assert cache.reusable(KvState("salt"), [*tokens, 8])[0] == []


@pytest.mark.parametrize("other", [TWO, OTHER])
def test_a_version_hides_what_another_computed(cache: KvCache, other: Version) -> None:
    tokens = list(range(9))
    kv = _computed(cache, tokens)
    cache.enter(other)
    assert cache.reusable(KvState(), tokens)[0] == []
    tokens += [9, 10, 11]
    assert cache.reserve(kv, 3)
    cache.advance(kv, tokens, 3)  # its third block mixes weights
    assert len(cache.prefix) == 0
    cache.release(kv)
    assert cache.pool.available == 8


@pytest.mark.parametrize("other", [TWO, OTHER])
def test_versions_differ_even_if_names_were_kept(cache: KvCache, other: Version) -> None:
    tokens = list(range(9))
    _computed(cache, tokens)
    cache.base = other  # without `enter`, which would clear as well
    assert cache.reusable(KvState(), tokens)[0] == []


def test_kv_begun_under_other_weights_is_not_offered(cache: KvCache) -> None:
    tokens = list(range(8))
    kv = KvState()
    cache.admit(kv, 8, [])
    assert cache.reserve(kv, 2)
    cache.advance(kv, tokens, 2)
    cache.enter(TWO)
    assert cache.names_coming(kv, tokens) == []
    assert cache.reserve(kv, 6)
    cache.advance(kv, tokens, 6)
    assert len(cache.prefix) == 0


def test_writers_of_a_shared_block_copy_it_but_the_last(cache: KvCache) -> None:
    parent = _computed(cache, list(range(6)))
    children = [cache.fork(parent), cache.fork(parent)]
    shared = parent.table[1]
    for kv in (parent, *children):
        assert cache.reserve(kv, 1)
    assert [(copy.source, copy.kv) for copy in cache.copies] == [(shared, parent), (shared, children[0])]
    assert children[1].table[1] == shared
    assert len({kv.table[1] for kv in (parent, *children)}) == 3
    assert {kv.table[0] for kv in (parent, *children)} == {parent.table[0]}
    cache.settle()
    assert not cache.copies
    assert cache.pool.count(shared) == 1


def test_a_source_is_not_given_away_before_the_copy_is_made(cache: KvCache) -> None:
    parent = _computed(cache, list(range(6)))
    child = cache.fork(parent)
    shared = parent.table[1]
    assert cache.reserve(parent, 1)
    cache.release(child)
    given = [cache.pool.allocate() for _ in range(cache.pool.available)]
    assert shared not in given


def test_undo_points_back_at_the_source(cache: KvCache) -> None:
    parent = _computed(cache, list(range(6)))
    child = cache.fork(parent)
    before = list(parent.table)
    free = cache.pool.available
    assert cache.reserve(parent, 1)
    cache.undo()
    assert (parent.table, child.table, cache.pool.available) == (before, before, free)
    assert not cache.copies


def test_fits_counts_idle_reused_blocks_as_taken(cache: KvCache) -> None:
    tokens = list(range(29))
    kv = _computed(cache, tokens)
    cache.release(kv)
    found, _ = cache.reusable(KvState(), tokens)
    assert len(found) == 7
    assert cache.fits(29, found, spare=0)
    assert not cache.fits(29, found, spare=1)
    assert not cache.fits(33, found, spare=0)


def test_the_end_of_a_chain_is_reused_before_its_start(cache: KvCache) -> None:
    tokens = list(range(9))
    cache.release(_computed(cache, tokens))
    for _ in range(7):
        cache.pool.allocate()
    assert len(cache.reusable(KvState(), tokens)[0]) == 1


def test_without_prefix_caching_nothing_is_offered() -> None:
    cache = KvCache(8, 4, prefix_caching=False)
    cache.enter(ONE)
    _computed(cache, list(range(9)))
    assert len(cache.prefix) == 0
    assert cache.reusable(KvState(), list(range(9))) == ([], None)

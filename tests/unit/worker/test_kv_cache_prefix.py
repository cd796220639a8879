"""Names of blocks, and what is found by them."""

from worker.kv_cache import BlockPool, PrefixCache, Weights, next_hash, root_hash
from worker.versions import NO_VERSION, Version


def test_a_name_depends_on_weights_salt_and_every_token_before() -> None:
    def name(
        epoch: int, salt: str, *blocks: list[int], adapter: int = 0, digest: str = "d", of_adapter: str = "d"
    ) -> bytes:
        by = Version(7, adapter, of_adapter) if adapter else NO_VERSION
        chain = root_hash(Weights(Version(7, epoch, digest), by), salt)
        for block in blocks:
            chain = next_hash(chain, block)
        return chain

    names = [
        name(1, "", [1, 2], [3, 4]),
        name(2, "", [1, 2], [3, 4]),
        name(1, "x", [1, 2], [3, 4]),
        name(1, "", [1, 5], [3, 4]),
        name(1, "", [1, 2], [3, 5]),
        name(1, "", [3, 4], [1, 2]),
        name(1, "", [1, 2]),
        name(11, "", [1, 2], [3, 4]),
        name(1, "1", [1, 2], [3, 4]),
        name(1, "", [1, 2], [3, 4], adapter=1),
        name(1, "", [1, 2], [3, 4], adapter=11),
        name(1, "", [1, 2], [3, 4], digest="e"),
        name(1, "", [1, 2], [3, 4], adapter=1, of_adapter="e"),
    ]
    assert len(set(names)) == len(names)
    assert name(1, "", [1, 2], [3, 4]) == names[0]


def test_matches_the_longest_start_only() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    blocks = [pool.allocate() for _ in range(3)]
    for name, block in zip([b"a", b"b", b"c"], blocks, strict=True):
        cache.insert(name, block)
    assert cache.match([b"a", b"b", b"x", b"c"]) == blocks[:2]
    assert cache.match([b"x", b"a"]) == []


def test_the_first_block_of_a_name_stays_and_a_block_has_one_name() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool)
    first, second = pool.allocate(), pool.allocate()
    cache.insert(b"a", first)
    cache.insert(b"a", second)
    cache.insert(b"b", first)
    assert cache.match([b"a"]) == [first]
    assert b"b" not in cache


def test_a_reused_block_loses_its_name() -> None:
    pool = BlockPool(1)
    cache = PrefixCache(pool)
    block = pool.allocate()
    cache.insert(b"a", block)
    pool.release(block)
    assert cache.match([b"a"]) == [block]
    assert pool.allocate() == block
    assert len(cache) == 0


def test_clear_forgets_held_and_idle_blocks() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool)
    held, idle = pool.allocate(), pool.allocate()
    cache.insert(b"a", held)
    cache.insert(b"b", idle)
    pool.release(idle)
    cache.clear()
    assert len(cache) == 0
    assert pool.available == 1
    pool.release(held)
    assert {pool.allocate(), pool.allocate()} == {held, idle}

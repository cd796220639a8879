"""Block numbers: held, retained, free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.kv_cache import BlockPool


def test_gives_every_block_once_then_raises() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert (pool.available, pool.used) == (0, 3)
    with pytest.raises(IndexError, match="no KV block"):
        pool.allocate()


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.acquire(block)
    pool.release(block)
    assert pool.available == 0
    pool.release(block)
    assert pool.available == 1
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(block)


def test_retained_blocks_are_reused_last_and_oldest_first() -> None:
    reused: list[int] = []
    pool = BlockPool(3)
    pool.on_reuse(reused.append)
    first, second, plain = (pool.allocate() for _ in range(3))
    for block in (first, second):
        pool.retain(block)
    for block in (first, second, plain):
        pool.release(block)
    assert [pool.allocate() for _ in range(3)] == [plain, first, second]
    assert reused == [first, second]


def test_a_retained_block_can_be_held_again_or_given_up() -> None:
    pool = BlockPool(2)
    kept, dropped = pool.allocate(), pool.allocate()
    for block in (kept, dropped):
        pool.retain(block)
        pool.release(block)
    pool.acquire(kept)
    assert pool.available == 1
    pool.unretain(dropped)
    pool.on_reuse(lambda block: pytest.fail(f"{block} was not retained any more"))
    assert pool.allocate() == dropped


@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "acquire", "release", "retain", "unretain"]), st.integers(0, 9)))
)
def test_counts_always_add_up(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(4)
    held: list[int] = []
    for action, pick in actions:
        if action == "allocate":
            if pool.available:
                block = pool.allocate()
                assert block not in held
                held.append(block)
        elif held:
            block = held[pick % len(held)]
            if action == "acquire":
                pool.acquire(block)
                held.append(block)
            elif action == "release":
                pool.release(block)
                held.remove(block)
            elif action == "retain":
                pool.retain(block)
            else:
                pool.unretain(block)
        assert all(pool.count(block) == held.count(block) for block in range(4))
        assert pool.used == len(set(held))
        assert pool.available == 4 - len(set(held))

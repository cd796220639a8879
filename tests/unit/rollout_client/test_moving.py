import pytest

from rollout_client.moving import TOGETHER_BYTES, Moved, together


def work(number):
    return lambda: [Moved(number, 0, 1)]


def batches(*sizes):
    """The copies that each thread moves at a time."""
    return [[moved.copy for moved in one()] for one in together((work(i), size) for i, size in enumerate(sizes))]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1], [[0]]),
        ([TOGETHER_BYTES, TOGETHER_BYTES], [[0], [1]]),
        ([TOGETHER_BYTES // 2] * 5, [[0, 1], [2, 3], [4]]),
        ([1, TOGETHER_BYTES, 1, 1], [[0, 1], [2, 3]]),
    ],
)
def test_small_copies_go_together_and_none_is_lost(sizes, expected):
    assert batches(*sizes) == expected


def test_nothing_is_begun_before_its_turn():
    begun = []

    def noting():
        for number in range(3):
            begun.append(number)
            yield work(number), TOGETHER_BYTES

    works = together(noting())
    next(works)
    assert begun == [0]

import numpy as np
import pytest

from rollout_client.digest import digest_of
from rollout_client.page_sums import BLOCK, LARGE, PAGE, both_digests, digest_of_sums, page_sums, pages


def random_bytes(size):
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", [1, 2, 7, 8, PAGE - 2, PAGE, PAGE + 2, 3 * PAGE, 5 * PAGE + 1000])
def test_a_page_is_the_sum_of_its_words(size):
    raw = random_bytes(size)
    padded = raw.tobytes().ljust(pages(size) * PAGE, b"\0")
    expected = []
    for start in range(0, len(padded), PAGE):
        words = (int.from_bytes(padded[i : i + 8], "little") for i in range(start, start + PAGE, 8))
        total = sum(words) % 2**64
        expected.append(total - 2**64 if total >= 2**63 else total)
    assert page_sums(raw).tolist() == expected


@pytest.mark.parametrize("size", [2, PAGE, BLOCK, BLOCK + 2 * PAGE + 10, LARGE + 6])
def test_both_digests_read_once_are_those_read_apart(size):
    raw = random_bytes(size)
    assert both_digests(raw) == (digest_of(raw.data), digest_of_sums(page_sums(raw)))


def test_any_shape_and_dtype_is_its_bytes_in_c_order():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert both_digests(array) == both_digests(np.frombuffer(array.tobytes(), np.uint8))


def test_pages_that_are_missing_or_in_each_others_place_show():
    raw = random_bytes(4 * PAGE)
    missing, swapped, one_bit = raw.copy(), raw.copy(), raw.copy()
    missing[PAGE : 2 * PAGE] = 0
    swapped[:PAGE], swapped[PAGE : 2 * PAGE] = raw[PAGE : 2 * PAGE], raw[:PAGE]
    one_bit[3 * PAGE + 17] ^= 4
    digests = {digest_of_sums(page_sums(each)) for each in (raw, missing, swapped, one_bit)}
    assert len(digests) == 4

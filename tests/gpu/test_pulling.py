"""The kernel that copies from a trainer's memory: pieces on any boundary of an element, and nothing beside them."""

import numpy as np
import pytest

from worker.gpu.driver import Driver
from worker.gpu.trainer_memory import _PIECE, Puller

GUARD = 0xA5
SIZES = (2, 4, 6, 14, 16, 18, 30, 32, 254, 4096, 4098, 65_534, _PIECE - 2, _PIECE)
SHIFTS = (0, 2, 4, 6, 8, 14)


@pytest.fixture(scope="module")
def puller(driver: Driver) -> Puller:
    return Puller(driver)


@pytest.mark.parametrize("to", SHIFTS)
@pytest.mark.parametrize("at", SHIFTS)
def test_every_byte_of_every_piece_and_no_other(driver, puller, at, to):
    """at, to: bytes that what is copied, and where it goes, lie behind a boundary of 16 bytes. The source ends with its
    last piece: a read beyond it is one that a sanitizer sees.
    """
    room, stream = _PIECE + 16, driver.stream()
    rows = [(at + n * room, to + n * room, size) for n, size in enumerate(SIZES)]
    source = np.random.default_rng(at).integers(0, 256, rows[-1][0] + SIZES[-1], np.uint8)
    expected = np.full(to + room * len(SIZES), GUARD, np.uint8)
    for begin, where, size in rows:
        expected[where : where + size] = source[begin : begin + size]
    there, slot = driver.allocate(source.nbytes, "a source"), driver.allocate(expected.nbytes, "a target")
    driver.to_device(there, source, stream)
    driver.fill(slot, expected.nbytes, GUARD, stream)
    puller.start(np.array([(there + begin, where, size) for begin, where, size in rows], np.uint64), slot, stream)
    found = np.empty_like(expected)
    driver.to_host(found, slot, stream)
    driver.wait(stream)
    np.testing.assert_array_equal(found, expected)


def test_a_table_that_grows_while_pieces_become_more(driver, puller):
    stream, count = driver.stream(), 3000
    source = np.random.default_rng(0).integers(0, 1 << 16, count, np.uint16)
    from_here, slot = driver.allocate(2 * count, "a source"), driver.allocate(2 * count, "a target")
    driver.to_device(from_here, source, stream)
    found = np.empty(count, np.uint16)
    for few in (1, 7, 1000, count):
        driver.fill(slot, 2 * count, 0, stream)
        where = np.arange(few, dtype=np.uint64) * np.uint64(2)
        pieces = np.stack([where + np.uint64(from_here), where, np.full(few, 2, np.uint64)], 1)
        puller.start(pieces, slot, stream)
        driver.to_host(found, slot, stream)
        driver.wait(stream)
        np.testing.assert_array_equal(found[:few], source[:few])
        assert not found[few:].any()

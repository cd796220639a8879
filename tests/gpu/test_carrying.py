"""What the host has for a step, carried to the device by a kernel."""

import numpy as np
import pytest

from worker.gpu.carrying import Carrier, Courier


@pytest.mark.parametrize("words", [1, 255, 256, 257, 8192, 300_001])
def test_the_words_arrive_and_no_others(driver, words):
    stream, carry = driver.stream(), Carrier(driver)
    source = driver.pinned(words + 1, np.uint32)
    source[:] = np.arange(words + 1)
    there = driver.allocate(4 * words + 4, "test")
    driver.fill(there, 4 * words + 4, 0xFF, stream)
    carry(there, source, stream, 4 * words)
    found = np.empty(words + 1, np.uint32)
    driver.to_host(found, there, stream)
    driver.wait(stream)
    assert found[:words].tolist() == list(range(words))
    assert found[words] == 0xFFFFFFFF


def test_each_launch_reads_what_was_there_when_it_ran(driver):
    """No value of before comes from a cache, and none of after: a buffer is written again once its event is over."""
    stream, carry, event = driver.stream(), Carrier(driver), driver.event()
    source, there = driver.pinned(4096, np.int32), driver.allocate(4 * 4096, "test")
    found = driver.pinned(4096, np.int32)
    for turn in range(200):
        source[:] = turn
        carry(there, source, stream, source.nbytes)
        driver.record(event, stream)
        driver.to_host(found, there, stream)
        driver.wait(event, event=True)
        source[:] = -1
        driver.wait(stream)
        assert (found == turn).all(), turn


def test_it_does_not_wait_behind_a_versions_copy(driver):
    """A step's numbers are there while hundreds of megabytes are still on their way, whichever stream has them."""
    carry, event = Carrier(driver), driver.event()
    large, small = driver.pinned(512 << 20, np.uint8), driver.pinned(2048, np.int32)
    there, here = driver.allocate(large.nbytes, "test"), driver.allocate(small.nbytes, "test")
    streams = [driver.stream(urgent=number % 2 == 0) for number in range(6)]
    for behind in streams:
        for mine in streams:
            if mine is behind:
                continue
            through = driver.event()
            driver.to_device(there, large, behind)
            driver.record(through, behind)
            carry(here, small, mine, small.nbytes)
            driver.record(event, mine)
            driver.wait(event, event=True)
            assert not driver.happened(through)
            driver.wait(behind)


@pytest.mark.parametrize("late", [False, True], ids=["idle", "behind a copy of a version"])
def test_what_a_courier_brings_is_there_for_what_its_stream_is_given_next(driver, late):
    """However far behind that stream is: a buffer is filled and carried again only once the last reader is through."""
    stream, turns, words = driver.stream(urgent=True), 300, 4096
    courier = Courier(driver, Carrier(driver), stream, driver.stream(urgent=True), words, "test")
    found, kept = driver.pinned((turns, words), np.int32), driver.allocate(4 * turns * words, "test")
    if late:
        large = driver.pinned(512 << 20, np.uint8)
        driver.to_device(driver.allocate(large.nbytes, "test"), large, stream)
    for turn in range(turns):
        array, there = courier.begin()
        array[:] = turn
        courier.send(words - turn)
        for _ in range(1 + turn % 3):  # read for a while
            driver.copy(kept + 4 * turn * words, there, 4 * words, stream)
    driver.to_host(found, kept, stream)
    driver.wait(stream)
    for turn in range(turns):
        assert (found[turn, : words - turn] == turn).all(), turn

"""Sums by our own kernel over ranks, each a process: on GPUs of their own where there are as many, else some of them on
the same one, whose kernels then come in turn while each waits for the others'."""

import os
import statistics
import time

import numpy as np
import pytest

from benchmarks.gpu.ranks import meeting
from worker.gpu.driver import Driver
from worker.gpu.peers import ROOM, PeerSums

pytestmark = [pytest.mark.timeout(240)]
COUNTS = (1, 8, 255, 1024, 40_000, ROOM, 3)
TURNS = int(os.environ.get("PEER_TURNS", "4"))
"""Of each count, alone and in a graph."""


def summed(rank, end, size):
    """In a process of its own. Reports what was not the sum, by count; with the bits of every rank."""

    def gather(mine):
        end.send(mine)
        return end.recv()

    driver = Driver(rank)
    peers, stream = PeerSums(driver, rank, size, gather), driver.stream()
    place, wrong = driver.allocate(4 * max(COUNTS), "numbers"), []
    for turn in range(TURNS):
        for count in COUNTS:
            numbers = [
                np.random.default_rng([turn, count, other]).standard_normal(count, np.float32) for other in range(size)
            ]
            expected = numbers[0].copy()
            for one in numbers[1:]:
                expected += one
            found = np.empty(count, np.float32)

            def launch(count=count):
                peers.sum(place, count, stream)

            for graph in (None, driver.captured(stream, launch)):
                driver.to_device(place, numbers[rank], stream)
                driver.wait(stream)
                if graph is None:
                    launch()
                else:
                    driver.launch(graph, stream)
                driver.to_host(found, place, stream)
                driver.wait(stream)
                if any(said != expected.tobytes() for said in gather(found.tobytes())):
                    wrong.append((turn, count, graph is not None))
    end.send({"wrong": wrong})


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_have_the_sum_with_the_same_bits(driver, size):
    assert meeting(size, summed, size) == {"wrong": []}


LATE_S, MORE_MS = 0.01, 15


def waited(rank, end):
    """In a process of its own. Reports how many milliseconds rank 0's sums took, for which rank 1 came late."""

    def gather(mine):
        end.send(mine)
        return end.recv()

    driver = Driver(rank)
    peers, stream = PeerSums(driver, rank, 2, gather), driver.stream()
    place, took = driver.allocate(4 * ROOM, "numbers"), []
    driver.fill(place, 4 * ROOM, 0, stream)
    for _ in range(6):
        driver.wait(stream)
        gather(b"")
        if rank:
            time.sleep(LATE_S)
        began = time.monotonic()
        peers.sum(place, ROOM, stream)
        driver.wait(stream)
        took.append(1000 * (time.monotonic() - began))
    end.send({"took": took[1:]})


def test_a_sum_ends_when_a_rank_that_was_late_has_come(driver):
    """Who waits looks at the host now and then, and is not held up by it."""
    assert statistics.median(meeting(2, waited)["took"]) < 1000 * LATE_S + MORE_MS

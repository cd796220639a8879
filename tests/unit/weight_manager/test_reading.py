import os
import select
import time

import numpy as np
import pytest
import xxhash

from rollout_client.native import compiler
from rollout_client.native.compiler import compiled
from weight_manager.background import Background
from weight_manager.reading import SOURCES, Opening, Reading

SIZES = (1, 2, 100, 241, 4096, 100_000, 3 << 20, 16 << 20)


@pytest.fixture(scope="module")
def memory():
    return memoryview(np.random.default_rng(0).integers(0, 256, 33 << 20, dtype=np.uint8))


def runs_of(group):
    return [(group * 64 + size, size) for size in SIZES]


def expected(memory, runs):
    return [xxhash.xxh3_64_intdigest(memory[start : start + size]) for start, size in runs]


def until(background, there):
    while not there():
        assert select.select([background], [], [], 10.0)[0]
        background.deliver()


@pytest.fixture(params=["compiled", "python"])
def background(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(compiler, "_compiler", refuse)
        monkeypatch.setattr("weight_manager.reading.compiled", refuse)
    made = Background(3, "verify", reads=True)
    made._opening.thread.join(60)
    assert (made._opening.reading is not None) == (request.param == "compiled")
    yield made
    made.close()


def refuse(*_):
    raise OSError("no compiler")


def test_digests_of_many_groups_come_back_in_their_order(background, memory):
    groups = [runs_of(group) for group in range(20)]
    found = []
    for number, runs in enumerate(groups):
        background.digests(memory, runs, lambda digests, number=number: found.append((number, digests)), pytest.fail)
    until(background, lambda: len(found) == len(groups))
    assert dict(found) == {number: expected(memory, runs) for number, runs in enumerate(groups)}


def test_digests_beside_other_work(background, memory):
    found, other = [], []
    background.digests(memory, runs_of(0), found.append, pytest.fail)
    background.submit(lambda: 7, other.append, pytest.fail)
    until(background, lambda: found and other)
    assert (found, other) == ([expected(memory, runs_of(0))], [7])


def test_closing_does_not_wait_for_what_has_not_begun(background, memory):
    found = []
    for _ in range(500):
        background.digests(memory, [(0, 16 << 20)], found.append, pytest.fail)
    background.deliver()
    assert len(found) < 500  # the fixture closes


def test_a_pool_that_closes_while_it_is_compiled_is_never_opened(monkeypatch):
    gate = os.eventfd(0)
    library = compiled("reading", SOURCES)

    def slow(*_):
        os.eventfd_read(gate)
        return library

    monkeypatch.setattr("weight_manager.reading.compiled", slow)
    opening = Opening(2, gate)
    opening.close()
    os.eventfd_write(gate, 1)
    opening.thread.join(10)
    assert opening.reading is None
    os.close(gate)


def test_threads_take_a_core_each(memory):
    event = os.eventfd(0)
    before = set(os.listdir("/proc/self/task"))
    reading = Reading(compiled("reading", SOURCES), 2, event)
    found = []
    reading.submit(memory, [(0, 1000)], found.append)
    os.eventfd_read(event)
    reading.collect()
    tasks = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
    assert len(tasks) == 2
    end = time.monotonic() + 30
    while any(len(os.sched_getaffinity(task)) > 1 for task in tasks):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len({frozenset(os.sched_getaffinity(task)) for task in tasks}) == min(2, len(os.sched_getaffinity(0)))
    reading.close()
    assert found == [expected(memory, [(0, 1000)])]
    os.close(event)


def test_nothing_outside_the_memory_is_read(memory):
    event = os.eventfd(0)
    reading = Reading(compiled("reading", SOURCES), 1, event)
    with pytest.raises(AssertionError):
        reading.submit(memory, [(0, 8), (len(memory) - 8, 9)], pytest.fail)
    reading.close()
    os.close(event)

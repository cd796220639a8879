"""ZMQ's threads are woken at once where Linux can do that; everywhere else all goes on as it did."""

import threading
from pathlib import Path

import pytest
import zmq

from rollout_client import prompt_threads
from rollout_client.prompt_threads import SLICE_NS, possible, prompt_context, slice_ns


@pytest.fixture
def promptly():
    if not possible():
        pytest.skip("this Linux gives all threads slices of one length")


@pytest.fixture
def impossible(monkeypatch):
    """A Linux that takes what it is told and does nothing: 6.11 and older."""
    monkeypatch.setattr(prompt_threads, "_syscall", lambda number, *_: 0)
    possible.cache_clear()
    yield
    possible.cache_clear()


def threads():
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def of_others():
    """The slice of a thread that is begun now."""
    found = []
    thread = threading.Thread(target=lambda: found.append(slice_ns()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_of_a_context_have_short_slices_and_nobody_else(promptly):
    before, mine = threads(), slice_ns()
    assert mine > SLICE_NS
    context = prompt_context()
    begun = threads() - before
    assert [slice_ns(thread) for thread in begun] == [SLICE_NS] * len(begun)
    assert len(begun) == 2, "ZMQ's reaper and one that sends and receives"
    assert (slice_ns(), of_others()) == (mine, mine)
    context.term()


def test_without_it_a_context_is_as_any(impossible):
    before = threads()
    context = prompt_context()
    assert not possible()
    assert {slice_ns(thread) for thread in threads() - before} == {0}
    with context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        one.bind("inproc://here")
        two.connect("inproc://here")
        one.send(b"x")
        assert two.recv() == b"x"
    context.term()

"""When the store hears of what a GPU copies. torch is a stand-in: streams do nothing before they are told to."""

import contextlib

import numpy as np
import pytest

from rollout_client import cuda_copy
from rollout_client.cuda_copy import _Batch, _Place
from rollout_client.protocol import Copy

PART = 1024


class Event:
    def __init__(self, stream, at):
        self._stream, self._at = stream, at

    def query(self):
        return self._stream.done >= self._at

    def synchronize(self):
        while not self.query():
            self._stream.run()


class Stream:
    cuda_stream = 7

    def __init__(self):
        self.queued, self.done = [], 0

    def record_event(self):
        return Event(self, len(self.queued))

    def run(self):
        """What was queued next."""
        to, source, nbytes = self.queued[self.done]
        SLOT[to : to + nbytes] = TENSORS[source : source + nbytes]
        self.done += 1


class Cuda:
    def stream(self, stream):
        return contextlib.nullcontext()


class Torch:
    bfloat16 = "bfloat16"
    cuda = Cuda()


class Tensor:
    """On the device: `nbytes` from `start` on of TENSORS."""

    dtype = "bfloat16"

    def __init__(self, start, nbytes):
        self._start, self._nbytes = start, nbytes

    def data_ptr(self):
        return self._start

    def numel(self):
        return self._nbytes // 2

    def is_contiguous(self):
        return True


class Source:
    def __init__(self, tensor):
        self.on_gpu = tensor


class Digester:
    sums = False

    def start(self, tensors, stream):
        self._count = len(tensors)
        return self

    def digests(self):
        return list(range(self._count))


class Store:
    def __init__(self):
        self.arrived_, self.written_ = [], []

    def moved(self, nbytes): ...
    def flush(self): ...
    def turn(self): ...

    def arrived(self, copy, offset, nbytes):
        assert (SLOT[PLACE[copy] + offset :][:nbytes] == TENSORS[PLACE[copy] + offset :][:nbytes]).all(), "is not there"
        self.arrived_.append((copy, offset, nbytes))

    def written(self, copy, digest, nbytes, *, sums):
        self.written_.append((copy, nbytes))


TENSORS = np.random.default_rng(0).integers(1, 256, 5000, np.uint8)
SLOT = np.zeros(5000, np.uint8)
PLACE = {0: 0, 1: 4 * PART}
"""Of both tensors, on the device and in the slot."""


@pytest.fixture
def batch(monkeypatch):
    SLOT[:] = 0
    monkeypatch.setattr(cuda_copy, "PART_BYTES", PART)
    stream = Stream()
    place = _Place.__new__(_Place)
    place.stream, place._bytes, place._queue, place._start = stream, SLOT.nbytes, 7, 0

    def dma(to, source, nbytes, queue):
        stream.queued.append((to, source, nbytes))
        return 0

    place._dma = dma
    jobs = [
        (Source(Tensor(PLACE[n], size)), [(n, Copy(n, (size // 2,), 0, (1,), PLACE[n] // 2, (1,), "bfloat16"))])
        for n, size in ((0, 3 * PART + 100), (1, 600))
    ]
    return _Batch(Torch, place, Stream(), Digester(), jobs), stream


def test_parts_of_a_large_tensor_are_told_of_as_they_arrive(batch):
    made, stream, store = *batch, Store()
    made.tell(store)
    assert store.arrived_ == []
    stream.run()
    made.tell(store)
    made.tell(store)
    assert store.arrived_ == [(0, 0, PART)]
    stream.run()
    stream.run()
    made.tell(store)
    assert store.arrived_ == [(0, 0, PART), (0, PART, PART), (0, 2 * PART, PART)]
    assert not made.done()
    assert store.written_ == []


def test_whoever_waits_for_a_batch_tells_of_its_parts_meanwhile(batch):
    made, _, store = *batch, Store()
    made.wait(store)
    assert store.arrived_ == [(0, 0, PART), (0, PART, PART), (0, 2 * PART, PART), (0, 3 * PART, 100)]
    made.report(store)
    assert store.written_ == [(0, 3 * PART + 100), (1, 600)]
    assert (SLOT[: 3 * PART + 100] == TENSORS[: 3 * PART + 100]).all()
    assert (SLOT[4 * PART : 4 * PART + 600] == TENSORS[4 * PART : 4 * PART + 600]).all()

"""In which order a GPU copies and hashes, and when the store hears of it. torch is a stand-in: what streams are given
happens when somebody waits for it."""

import contextlib

import numpy as np
import pytest

from rollout_client import cuda_batch, cuda_copy, cuda_pieces
from rollout_client.cuda_copy import CudaCopier
from rollout_client.cuda_slots import Place
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

    def __init__(self, memory=None):
        self.memory, self.queued, self.done = memory, [], 0

    def wait_stream(self, other): ...
    def wait_event(self, event): ...

    def record_event(self):
        return Event(self, len(self.queued))

    def run(self):
        """What was queued next."""
        to, source, nbytes = self.queued[self.done]
        self.memory[to : to + nbytes] = TENSORS[source : source + nbytes]
        self.done += 1

    def synchronize(self):
        self.record_event().synchronize()


class Torch:
    bfloat16 = "bfloat16"

    class cuda:  # noqa: N801
        @staticmethod
        def stream(stream):
            return contextlib.nullcontext()

        @staticmethod
        def current_stream(device):
            return None

        @staticmethod
        def device(number):
            return contextlib.nullcontext()

    @staticmethod
    def no_grad():
        return contextlib.nullcontext()


class Tensor:
    """On the device: `nbytes` from `start` on of TENSORS."""

    dtype, device = "bfloat16", 0

    def __init__(self, start, nbytes):
        self.start, self.nbytes = start, nbytes

    def data_ptr(self):
        return self.start

    def numel(self):
        return self.nbytes // 2

    def is_contiguous(self):
        return True


class Source:
    def __init__(self, tensor):
        self.on_gpu, self.nbytes, self.part = tensor, tensor.nbytes, object()


class Digester:
    """A tensor's digest is where it begins."""

    sums = False

    def __init__(self):
        self.launches = []

    def start(self, tensors, stream):
        self.launches.append([tensor.start for tensor in tensors])
        return Digesting(self.launches[-1])

    def start_at(self, spans, stream):
        self.launches.append([start for start, _ in spans])
        return Digesting(self.launches[-1])


class Digesting:
    def __init__(self, starts):
        self._starts = starts

    def digests(self, start, stop):
        return self._starts[start:stop]


class Store:
    """Hears of bytes when they are there."""

    def __init__(self, stream, digester):
        self._digester = digester
        self._slot, self._queued, self.heard = stream.memory, lambda: len(stream.queued), []
        self.on_their_way = []  # copies that were, whenever one was told of
        self.launches = []  # of hashes that had been started, whenever a part was told of
        self.taken = False
        self.when_taken = []  # that, whenever a tensor was whole

    def go_ahead(self, digests):
        """Asked to make the version live."""

    def pause_for_live(self, seconds): ...

    def moved(self, nbytes): ...
    def flush(self): ...
    def turn(self): ...

    def arrived(self, copy, offset, nbytes):
        self._require(PLACES[copy] + offset, nbytes)
        self.launches.append(len(self._digester.launches))
        self.heard.append(("part", copy, offset, nbytes))

    def all_written(self, digests, nbytes, *, sums):
        for copy, digest in digests:
            size = SIZES[copy]
            self._require(PLACES[copy], size)
            assert digest == PLACES[copy]
            self.on_their_way.append(self._queued() - len(self.on_their_way))
            self.heard.append(("whole", copy, size))
            self.when_taken.append(self.taken)
            nbytes -= size
        assert nbytes == 0

    def _require(self, start, nbytes):
        assert (self._slot[start : start + nbytes] == TENSORS[start : start + nbytes]).all(), "is not there"


def copier_of(streams, digester, dma):
    """Of a device whose slots are registered. dma: in the place of cuMemcpyDtoHAsync."""
    copier = CudaCopier.__new__(CudaCopier)
    copier._torch, copier._streams, copier._digesters = Torch, {0: streams}, {0: digester}
    copier._offers, copier._before, copier._foreseen = {}, None, None
    copier._driver = type("Driver", (), {"cuMemcpyDtoHAsync_v2": staticmethod(dma)})()

    @contextlib.contextmanager
    def place(slot, memory, writable, device, stream, first):
        yield Place(memory, copier._driver, stream)

    copier._slots = type("Slots", (), {"place": staticmethod(place)})()
    return copier


TENSORS = np.random.default_rng(0).integers(1, 256, 64 * PART, np.uint8)
PLACES, SIZES = {}, {}
"""Of each tensor, on the device and in the slot."""


@pytest.fixture
def pushed(monkeypatch):
    """Push tensors of these places and sizes; what the store heard, the copies in their order, the hash launches."""
    sizes = ("BATCH_BYTES", PART), ("LAST_BYTES", 64), ("TAIL_BYTES", 0), ("LARGE_BYTES", PART)
    for name, value in sizes:
        monkeypatch.setattr(cuda_pieces, name, value)
    for module in cuda_pieces, cuda_batch:
        monkeypatch.setattr(module, "PART_BYTES", PART)
    monkeypatch.setattr(cuda_copy, "AHEAD", 2)

    def push(spans, together=1 << 30, most=None, *, swift=False, ranks=None, ahead=False):
        """most: of copies that may be on their way, whose tensors are all cast; None = none is. swift: a copy is over
        when the next one is queued. ranks: that copy, too. ahead: the version may go live from their memory.
        """
        if most is not None:
            monkeypatch.setattr(cuda_copy, "MADE_BYTES", most * PART)
            for module in cuda_pieces, cuda_batch, cuda_copy:
                monkeypatch.setattr(module, "in_place", lambda torch, whole, copy: None)
            for module in cuda_batch, cuda_copy:
                monkeypatch.setattr(module, "made", lambda torch, whole, copy: whole)
        for module in cuda_pieces, cuda_copy:
            monkeypatch.setattr(module, "TOGETHER_BYTES", together)
        slot = bytearray(TENSORS.nbytes)
        streams = Stream(np.frombuffer(slot, np.uint8)), Stream(), Stream()
        digester = Digester()
        push.queued = lambda: len(streams[0].queued)
        store = push.store = Store(streams[0], digester)
        base = streams[0].memory.ctypes.data

        def dma(to, source, nbytes, queue):
            streams[0].queued.append((to - base, source, nbytes))
            while swift and streams[0].done < len(streams[0].queued) - 1:
                streams[0].run()
            return 0

        copier = copier_of(streams, digester, dma)
        monkeypatch.setattr(cuda_copy, "Offers", lambda driver: ranks)
        if ranks is not None:
            ranks.queued = push.queued
        PLACES.clear()
        jobs = []
        for number, (start, size) in enumerate(spans):
            PLACES[number], SIZES[number] = start, size
            copies = [(number, Copy(number, (size // 2,), 0, (1,), start // 2, (1,), "bfloat16"))]
            jobs.append((Source(Tensor(start, size)), copies))
        jobs = [jobs[part] for part, _ in cuda_pieces.in_order([(n, copies) for n, (_, copies) in enumerate(jobs)])]
        shown = ([], 0) if ranks is None else (["socket"], 7)
        copier.stage(0, memoryview(slot), contextlib.nullcontext, jobs, store, shown, ahead=ahead)
        assert sum(kind == "whole" for kind, *_ in store.heard) == len(spans)
        assert most is None or max(store.on_their_way) <= most + 1
        push.launches = store.launches
        return store.heard, streams[0].queued, digester.launches

    return push


def test_parts_of_a_large_tensor_are_told_of_before_it_is_whole(pushed):
    heard, _, _ = pushed([(0, 3 * PART + 100), (4 * PART, 600)])
    sizes = [PART, PART, PART, 100]
    assert heard[:4] == [("part", 0, n * PART, size) for n, size in enumerate(sizes)]
    assert heard[4:] == [("whole", 0, 3 * PART + 100), ("whole", 1, 600)]


def test_what_has_arrived_is_told_of_before_the_next_batch_is_started(pushed):
    """A rank that copies it goes on as long as the push: it begins as soon as it can."""
    heard, _, _ = pushed([(0, 4 * PART), (4 * PART, 600)], swift=True)
    assert heard[:3] == [("part", 0, n * PART, PART) for n in range(3)]


def test_tensors_go_as_they_lie_in_the_slot_but_for_large_ones_which_go_first(pushed):
    spans = [(8 * PART, 512), (5 * PART, 2 * PART), (512, 512), (0, 512), (2 * PART, 2 * PART)]
    _, copies, _ = pushed(spans)
    assert [to for to, *_ in copies] == [PART * n for n in (2, 3, 5, 6)] + [0, 512, 8 * PART]
    assert [to for to, *_ in copies] == [source for _, source, _ in copies]


@pytest.mark.parametrize(("together", "launches"), [(1 << 30, 1), (12 * PART, 3), (1, 30)])
def test_many_batches_are_hashed_in_one_launch(pushed, together, launches):
    """Each launch takes a turn on the GPU from a rank that computes there."""
    spans = [(n * PART, PART) for n in range(30)]
    _, _, hashed = pushed(spans, together)
    assert sorted(start for launch in hashed for start in launch) == [start for start, _ in spans]
    assert len(hashed) == launches


def test_the_first_copies_are_on_their_way_before_anything_is_hashed_and_all_is_hashed_then(pushed, monkeypatch):
    """Where a rank computes, digests take longer than the copies; they were asked for once the last copy was."""
    on_their_way, start = [], Digester.start_at

    def noted(self, spans, stream):
        on_their_way.append(pushed.queued())
        return start(self, spans, stream)

    monkeypatch.setattr(Digester, "start_at", noted)
    pushed(SPANS)
    assert on_their_way == [1]
    on_their_way.clear()
    pushed(SPANS, 12 * PART)
    assert on_their_way == [1, 1, 1]


def test_what_has_to_be_made_is_hashed_before_all_of_it_is_on_its_way(pushed, monkeypatch):
    """The store begins to check when it has the first digests."""
    on_their_way, start = [], Digester.start

    def noted(self, tensors, stream):
        on_their_way.append(pushed.queued())
        return start(self, tensors, stream)

    monkeypatch.setattr(Digester, "start", noted)
    pushed(SPANS, most=60)
    assert on_their_way == [2, 30]


def test_tensors_that_have_to_be_made_are_not_all_made_at_once(pushed):
    """They cost a trainer device memory."""
    _, _, hashed = pushed([(n * PART, PART) for n in range(30)], most=8)
    assert len(hashed) == 8


class Ranks:
    """Two ranks, of which so many copy what they are told of, and say so when they have been looked at so often."""

    def __init__(self, takes, looks=1):
        self.takes, self.looks, self.parts = takes, looks, []
        self.waits = 0  # parts that were waited for
        self.begun = []  # copies to the host that were on their way when they were asked

    def begin(self, paths, slot, write_epoch): ...
    def end(self): ...
    def close(self): ...

    def take(self, runs, *, last, through):
        self.through = through
        self.begun.append(self.queued())
        assert self.waits == len(self.parts), "what was made for the part before is there until it is copied"
        self.parts.append((runs, last))

    def taken(self):
        self.waits = len(self.parts)
        return self.takes

    def copied_from(self):
        assert self.parts, "asked before"
        self.looks -= 1
        return self.whole and self.looks <= 0

    @property
    def whole(self):
        return self.takes == 2


SPANS = [(n * PART, PART) for n in range(30)]
RUNS = [(start, start, nbytes) for start, nbytes in SPANS]


@pytest.mark.parametrize(("takes", "looks", "ends"), [(2, 1, {True}), (2, 8, {False, True}), (1, 1, {False})])
def test_the_store_is_told_once_all_ranks_have_said_that_they_copy(pushed, takes, looks, ends):
    """It need not tell them what is in the slot then."""
    pushed(SPANS, ranks=Ranks(takes, looks), swift=True)
    told = pushed.store.when_taken
    assert told == sorted(told)
    assert {told[0], told[-1]} == ends


def test_ranks_copy_while_the_host_s_copies_are_under_way(pushed):
    ranks = Ranks(2)
    _, copies, hashed = pushed(SPANS, ranks=ranks)
    assert ranks.parts == [(RUNS, True)]
    assert ranks.begun == [1], "the first copies to the host do not wait for ranks to be told"
    assert (ranks.waits, ranks.through) == (1, False)
    assert len(copies) == 30
    assert sorted(start for launch in hashed for start in launch) == [start for start, _ in SPANS]


def test_what_has_to_be_made_for_a_push_is_made_in_parts_that_ranks_copy_one_by_one(pushed):
    ranks = Ranks(2)
    _, copies, hashed = pushed(SPANS, most=8, ranks=ranks)
    assert [run for runs, _ in ranks.parts for run in runs] == RUNS
    assert [last for _, last in ranks.parts] == [False, False, False, True]
    assert (ranks.waits, ranks.through) == (4, True)
    assert sorted(start for launch in hashed for start in launch) == [start for start, _ in SPANS], "once"
    assert len(copies) == 30


class Told(dict):
    """A store that keeps the digest of each copy, and hears whether the version may go live from ranks' memory."""

    taken = False

    def go_ahead(self, digests):
        self.ahead = dict(digests)

    def pause_for_live(self, seconds): ...
    def moved(self, nbytes): ...
    def flush(self): ...
    def turn(self): ...

    def all_written(self, digests, nbytes, *, sums):
        self.update(digests)


@pytest.fixture(params=["device", "cuda_ipc", "shm"])
def again(request, monkeypatch):
    """Push tensors of these places, one push after the other; what was looked up anew, and the hash launches."""
    digester, looked, look = Digester(), [], cuda_pieces.in_place
    monkeypatch.setattr(cuda_pieces, "in_place", lambda *args: (looked.append(args), look(*args))[1])
    streams = Stream(np.zeros(16 * PART, np.uint8)), Stream(), Stream()
    copier = copier_of(streams, digester, lambda *_: 0)
    copies = [[(n, Copy(n, (PART // 2,), 0, (1,), n * PART // 2, (1,), "bfloat16"))] for n in range(8)]

    def push(places, *, foresees=False, of_another=False):
        ranks, told = Ranks(2), Told()
        ranks.queued = int
        monkeypatch.setattr(copier, "_offers", {0: ranks})
        jobs = [(Source(Tensor(place, PART)), mine) for place, mine in zip(places, copies, strict=True)]
        if foresees:
            copier.foresee(jobs)
        if of_another:
            jobs[0][0].part = object()
        shown = ([], 0) if request.param == "shm" else (["socket"], 1)
        memory = memoryview(bytearray(16 * PART))
        copier.stage(0, memory, contextlib.nullcontext, jobs, told, shown, ahead=request.param == "device")
        runs = [([(n * PART, place, PART) for n, place in enumerate(places)], True)]
        assert ranks.parts == ([] if request.param == "shm" else runs)
        assert told == dict(enumerate(places)), "digests of where they lie now"
        assert request.param != "device" or told.ahead == told
        return len(looked), len(digester.launches)

    return push


def test_what_lies_where_it_lay_is_not_looked_up_again(again):
    places = [n * PART for n in range(8)]
    assert again(places) == (8, 1)
    assert again(places) == (8, 2)
    assert again([*places[:-1], 9 * PART]) == (16, 3)


def test_what_lies_where_it_lay_is_hashed_while_the_store_looks_for_a_place(again):
    places = [n * PART for n in range(8)]
    assert again(places, foresees=True) == (8, 1), "nothing is known of it yet"
    assert again(places, foresees=True) == (8, 2)
    assert again(places, foresees=True, of_another=True) == (8, 4), "digests of another push are not this one's"
    assert again([*places[:-1], 9 * PART], foresees=True) == (16, 5)


def test_what_was_begun_of_a_push_that_came_to_nothing_is_waited_for():
    """Its tensors may be freed then, and a kernel that reads what is not mapped any more loses the device."""
    summing = Stream(np.zeros(PART, np.uint8))
    copier = copier_of((Stream(), summing, Stream()), Digester(), lambda *_: 0)
    summing.queued += [(0, 0, PART // 2), (PART // 2, 0, PART // 2)]
    hashed = [cuda_copy._Hashed(n, n + 1, None, Event(summing, n + 1)) for n in range(2)]
    copier._foreseen = cuda_copy._Foreseen(object(), None, hashed)
    copier.settle()
    assert summing.done == 2
    assert copier._foreseen is None
    copier.settle()


@pytest.mark.parametrize("takes", [2, 1], ids=["all ranks take it", "one does not"])
@pytest.mark.parametrize("most", [None, 8], ids=["as it is", "cast"])
def test_ranks_copy_first_where_a_version_may_go_live_from_them(pushed, takes, most, monkeypatch):
    ranks, asked = Ranks(takes), []
    monkeypatch.setattr(Store, "go_ahead", lambda self, digests: asked.append(dict(digests)))
    _, copies, hashed = pushed(SPANS, most=most, ranks=ranks, ahead=True)
    assert [run for runs, _ in ranks.parts for run in runs] == RUNS
    assert ranks.waits == len(ranks.parts) == (1 if most is None else 4)
    assert len(copies) == 30
    assert sorted(start for launch in hashed for start in launch) == [start for start, _ in SPANS]
    assert asked == ([{number: start for number, (start, _) in enumerate(SPANS)}] if takes == 2 else [])


def test_batches_become_small_towards_the_end(pushed):
    """What is left to be checked, and copied by ranks, once all has arrived is the last one."""
    jobs = [(Source(Tensor(64 * n, 64)), []) for n in range(256)]
    batches = list(cuda_pieces.batches(jobs))
    sizes = [64 * len(batch) for batch in batches]
    assert [job for batch in batches for job in batch] == jobs
    left = [sum(sizes[at:]) for at in range(len(sizes))]
    assert sizes[:12] == [PART] * 12
    assert all(size <= max(rest // 4 + 63, 64) for size, rest in zip(sizes[12:], left[12:], strict=True))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 64


class Shown:
    """Offers of one GPU."""

    def __init__(self):
        self.closed = 0

    def begin(self, paths, slot, write_epoch): ...
    def end(self): ...
    def taken(self):
        return 1

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("of", [(1,), (0, 1), ()], ids=["another GPU", "several", "none"])
def test_what_ranks_have_mapped_of_a_gpu_is_let_go_once_a_push_comes_from_elsewhere(monkeypatch, of):
    """The weights have been moved: what they lay in is free on the first GPU only when no rank has it mapped."""
    copier, first, second = copier_of(None, None, None), Shown(), Shown()
    copier._offers = {0: first, 1: second}
    monkeypatch.setattr(CudaCopier, "_stage_from", lambda *_, **__: 0)

    def push(devices):
        jobs = [(Source(Tensor(0, PART)), []) for _ in devices]
        for (source, _), device in zip(jobs, devices, strict=True):
            source.on_gpu.device = device
        copier.stage(0, memoryview(b""), contextlib.nullcontext, jobs, None, (["socket"], 1))

    push((0,))
    assert first.closed == 0
    second.closed = 0
    push(of)
    assert first.closed == 1
    assert second.closed == (of != (1,))


@pytest.mark.parametrize("sizes", [[8, 3, 3, 8, 3, 3, 8], [8, 8, 8]], ids=["some small ones", "none"])
def test_some_small_tensors_are_last_and_all_others_lie_in_one_piece(monkeypatch, sizes):
    """A thread hashes one for eight times as long as it takes to arrive: what is checked last is small."""
    monkeypatch.setattr(cuda_pieces, "TAIL_BYTES", 9 * PART)
    monkeypatch.setattr(cuda_pieces, "TAIL_SIZES", (2 * PART, 4 * PART))
    starts = [sum(sizes[:n]) * PART for n in range(len(sizes))]
    parts = [
        (n, [(n, Copy(n, (size * PART // 2,), 0, (1,), start // 2, (1,), "bfloat16"))])
        for n, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    found = [sizes[part] for part, _ in cuda_pieces.in_order(parts)]
    assert found == ([8, 3, 8, 8, 3, 3, 3] if 3 in sizes else sizes)
    assert [part for part, _ in cuda_pieces.in_order(parts)][-3:] == ([2, 4, 5] if 3 in sizes else [0, 1, 2])

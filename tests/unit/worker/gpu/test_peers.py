"""Sums by ranks that write into each other's memory: kernels/peers.cu by g++, a thread for each rank, whose threads and
blocks come one after the other. Memory is a process's, and its order is the processor's: what a GPU's is like, its own
test at every start shows (`require_sums`)."""

import ctypes
import subprocess
import threading
import time

import numpy as np
import pytest

from tests import recording_cuda
from worker.gpu.compiler import kernels
from worker.gpu.driver import CudaError, Driver
from worker.gpu.peers import PeerSums

ROOM, REFRESHED = 1 << 9, 64
HOST = """
#include <cstring>
#include <sched.h>
#define ON_A_HOST
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __global__
#define __launch_bounds__(...)
struct Place { unsigned x, y, z; };
static thread_local Place threadIdx, blockIdx, gridDim, blockDim;
static void __syncthreads() {}
static void follow() {}
static unsigned atomicAdd(unsigned *at, unsigned by) { return __atomic_fetch_add(at, by, __ATOMIC_SEQ_CST); }
static unsigned atomicExch(unsigned *at, unsigned to) { return __atomic_exchange_n(at, to, __ATOMIC_SEQ_CST); }
static float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static void tell(unsigned long long *cell, unsigned turn, float v) {
  unsigned bits;
  memcpy(&bits, &v, 4);
  __atomic_store_n(cell, (unsigned long long)turn << 32 | bits, __ATOMIC_RELAXED);
}
static unsigned long long told(const unsigned long long *cell) {
  static thread_local int tries = 0;
  if (++tries % 8 == 0) sched_yield();
  return __atomic_load_n(cell, __ATOMIC_RELAXED);
}
"""
LAUNCH = """
extern "C" void launch(float *x, u64 *const *rooms, u32 *turns, const int *ended, int ranks, int rank, int count,
                       int grid, int block) {
  gridDim = {(unsigned)grid, 1, 1};
  blockDim = {(unsigned)block, 1, 1};
  for (unsigned b = 0; b < (unsigned)grid; b++)
    for (unsigned t = 0; t < (unsigned)block; t++) {
      blockIdx = {b, 0, 0};
      threadIdx = {t, 0, 0};
      sum_ranks(x, rooms, turns, ended, ranks, rank, count);
    }
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "peers.cpp").write_text(HOST + kernels("peers") + LAUNCH)
    made = folder / "peers.so"
    command = ["g++", "-O1", "-shared", "-fPIC", f"-DROOM={ROOM}", str(folder / "peers.cpp"), "-o", str(made)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made)).launch


class Ranks:
    """So many, each with its room, and a thread while they sum."""

    def __init__(self, kernel, size, last_turn=0):
        self._kernel, self.size = kernel, size
        # A turn that never was, or comes: nobody finds it by itself.
        self.rooms = [
            np.full(2 * size * ROOM, (last_turn + (1 << 31)) % (1 << 32) << 32, np.uint64) for _ in range(size)
        ]
        self._addresses = np.array([room.ctypes.data for room in self.rooms], np.uint64)
        self.turns = [np.array([last_turn, 0, 0, 0], np.uint32) for _ in range(size)]
        self.ended = np.zeros(1, np.int32)

    def sum(self, rank, x, grid, block=8):
        pointers = (ctypes.c_void_p(a.ctypes.data) for a in (x, self._addresses, self.turns[rank], self.ended))
        self._kernel(*pointers, self.size, rank, len(x), grid, block)

    def each(self, act):
        """Every rank in a thread of its own; how long one may take is pytest's to say."""
        threads = [threading.Thread(target=act, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def in_order(numbers):
    total = np.zeros_like(numbers[0])
    for one in numbers:
        total = total + one
    return total


@pytest.mark.parametrize("last_turn", [0, 2**32 - 100], ids=["from the first turn", "over the last number of a turn"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_the_sum_with_the_same_bits_turn_after_turn(kernel, size, last_turn):
    """Of any count, by any number of blocks, while ranks are at different speeds."""
    r, rng = Ranks(kernel, size, last_turn), np.random.default_rng(size)
    counts = [1, ROOM, 2, ROOM, *rng.integers(1, ROOM + 1, 146).tolist()]
    grids = rng.integers(1, 5, len(counts)).tolist()
    numbers = [[rng.standard_normal(count, np.float32) for _ in range(size)] for count in counts]
    found = [[] for _ in range(size)]

    def run(rank):
        own = np.random.default_rng(rank)
        for grid, one in zip(grids, numbers, strict=True):
            x = one[rank].copy()
            if own.random() < 0.05:
                time.sleep(0.002)
            r.sum(rank, x, grid)
            found[rank].append(x)

    r.each(run)
    for rank in range(size):
        for turn, (one, got) in enumerate(zip(numbers, found[rank], strict=True)):
            np.testing.assert_array_equal(got, in_order(one), f"rank {rank}, turn {turn}")
    assert {int(turns[0]) for turns in r.turns} == {(last_turn + len(counts)) % 2**32}


def test_no_cell_keeps_a_turn_until_it_comes_again(kernel):
    """Small sums for a long time leave most of the room unused."""
    r, turns = Ranks(kernel, 2), 2 * ROOM // REFRESHED + 2

    def run(rank):
        for _ in range(turns):
            r.sum(rank, np.ones(3, np.float32), 1, REFRESHED)

    r.each(run)
    for rank, room in enumerate(r.rooms):
        of_other = room.reshape(2, 2, ROOM)[:, 1 - rank]
        assert (of_other >> np.uint64(32) <= turns).all()


def test_who_waits_for_a_rank_that_does_not_come_ends_when_it_is_told(kernel):
    r, ended = Ranks(kernel, 3), []

    def run(rank):
        if rank < 2:
            r.sum(rank, np.ones(100, np.float32), 2)
            ended.append(rank)
        else:
            time.sleep(0.5)
            assert not ended
            r.ended[0] = 1

    r.each(run)
    assert sorted(ended) == [0, 1]
    assert [list(turns[2:]) for turns in r.turns[:2]] == [[1, 0], [1, 0]]
    r.ended[0] = 0  # nobody asks the host again
    for rank in range(2):
        r.sum(rank, np.ones(100, np.float32), 2)


@pytest.fixture
def recording(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return recording_cuda.install(monkeypatch, recording_cuda.Recording())


def test_a_launch_has_no_more_blocks_than_a_device_has_places(recording):
    peers = PeerSums(Driver(), 0, 2, lambda mine: [mine, mine])
    recording.calls.clear()
    for count in (8, 1024, 1 << 18):
        peers.sum(1 << 34, count, None)
    launched = recording.of("kernel")
    assert [(name, grid, threads) for _, name, grid, threads, *_ in launched] == [
        ("sum_ranks", (1,), 256),
        ("sum_ranks", (4,), 256),
        ("sum_ranks", (128,), 256),
    ]
    assert [call[5][4:] for call in launched] == [(2, 0, 8), (2, 0, 1024), (2, 0, 1 << 18)]


@pytest.mark.parametrize("fails", ["cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", None], ids=["own", "other's", "there"])
def test_where_one_rank_cannot_reach_anothers_memory_none_sums_so(recording, monkeypatch, fails):
    """fails: a call of this rank's; none: the other rank says that it failed."""
    said = []
    if fails:
        answer = recording._answer
        monkeypatch.setattr(recording, "_answer", lambda name, *rest: 1 if name == fails else answer(name, *rest))

    def gather(mine):
        said.append(mine)
        last = len(said) == 2
        return [mine, (b"" if fails else b"no way from there") if last else b"a handle"]

    with pytest.raises(CudaError, match=fails or "no way from there"):
        PeerSums(Driver(), 0, 2, gather)
    assert len(said) == 2, "all ranks hear of it"

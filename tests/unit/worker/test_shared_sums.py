"""Sums in shared memory, of processes that come late, stand still, die, or want something else."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from worker import shared_sums
from worker.models.collectives import _tree

HEAD = """
import contextlib, json, os, signal, sys, time
import numpy as np
from worker import shared_sums
from worker.models.collectives import require_same

def tell(what): print(json.dumps(what), flush=True)

def gather(data):
    tell(data.hex())
    return [bytes.fromhex(said) for said in json.loads(sys.stdin.readline())]

def raised(call, *words):
    began = time.monotonic()
    try: call(*words)
    except RuntimeError as error: return [str(error), time.monotonic() - began]

rank, pids = json.loads(sys.stdin.readline())
exec(json.loads(sys.stdin.readline()))  # before they meet
before = len(os.listdir("/proc/self/fd"))
sums = shared_sums.meet(rank, pids, gather)
for line in sys.stdin:
    exec(json.loads(line))
"""


@pytest.fixture(autouse=True, scope="module")
def compiled():
    try:
        shared_sums.library()
    except OSError as error:
        pytest.skip(f"no compiled sums here: {error}")


class Ranks:
    """size processes that have met, or tried to. before: what each runs before it does."""

    def __init__(self, size, before=""):
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", HEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, text=True
            )
            for _ in range(size)
        ]
        pids = [process.pid for process in self.processes]
        for rank in range(size):
            self._write(rank, [rank, pids])
            self._write(rank, before)
        for _ in range(2):
            said = self.told()
            for rank in range(size):
                self._write(rank, said)

    def run(self, code, *ranks):
        for rank in ranks or range(len(self.processes)):
            self._write(rank, code)

    def told(self, *ranks):
        return [json.loads(self.processes[r].stdout.readline()) for r in ranks or range(len(self.processes))]

    def results(self, code):
        self.run(code)
        return self.told()

    def close(self):
        for process in self.processes:
            process.kill()
            process.communicate(timeout=10)

    def _write(self, rank, what):
        self.processes[rank].stdin.write(json.dumps(what) + "\n")
        self.processes[rank].stdin.flush()


@pytest.fixture
def ranks():
    made = []

    def make(size, before=""):
        made.append(Ranks(size, before))
        return made[-1]

    yield make
    for one in made:
        one.close()


SIZES = [1, 3, 511, 512, 513, 2304, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3 * (1 << 16) + 7]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_has_the_same_sum_in_a_tree_whoever_is_late(ranks, size):
    """Of one part and of several, one sum after the other, with ranks that come at other times to each."""
    results = ranks(size).results(f"""
import hashlib
own, late, digests = np.random.default_rng(rank), np.random.default_rng(100 + rank), []
for turn in range(60):
    count = int(np.random.default_rng(1000 + turn).choice({SIZES}))
    array = own.standard_normal(count).astype(np.float32)
    run = sums.in_place(array, in_a_tree=False)
    if late.random() < 0.1:
        time.sleep(late.random() * 2e-3)
    run()
    digests.append(hashlib.sha256(array.tobytes()).hexdigest())
tell(digests)
""")
    owns, expected = [np.random.default_rng(rank) for rank in range(size)], []
    for turn in range(60):
        count = int(np.random.default_rng(1000 + turn).choice(SIZES))
        parts = [own.standard_normal(count).astype(np.float32) for own in owns]
        expected.append(hashlib.sha256(_tree(parts).tobytes()).hexdigest())
    assert results == [expected] * size


def test_rows_of_all_ranks_lie_side_by_side(ranks):
    """Some of more bytes than a part, some of which a part ends within; and 64-bit values."""
    results = ranks(3).results("""
good = []
for rows, columns in [(1, 1), (1, 5), (4, 100), (3, 70_001), (700, 333), (0, 4)]:
    of = lambda r: np.random.default_rng(r).standard_normal((rows, columns)).astype(np.float32)
    good.append(sums.gathered(of(rank)).tobytes() == np.concatenate([of(r) for r in range(3)], axis=1).tobytes())
require_same(2**64 - 3, sums)
tell([all(good), raised(require_same, 2**63 + rank // 2, sums)[0]])
""")
    said = f"weights differ: {2**63:016x}, {2**63:016x}, {2**63 + 1:016x}"
    for good, text in results:
        assert good
        assert said in text


def test_rounds_are_counted_on_past_32_bits(ranks):
    """After weeks of steps."""
    three = ranks(3)
    three.results("""
sums._place.round = 2**32 - 4
at = 64 * (1 + rank)
sums._memory[at : at + 4] = (2**32 - 4).to_bytes(4, sys.byteorder)
tell(0)
""")
    results = three.results("""
found = []
for turn in range(8):
    time.sleep(0.01 * (turn % 3 == rank))
    x = np.full(3, turn, np.float32)
    sums.in_place(x, in_a_tree=True)()
    found.append(x.tolist())
tell([found, sums._place.round])
""")
    assert results == [[[[3.0 * turn] * 3 for turn in range(8)], 4]] * 3


def test_a_python_that_was_built_for_an_old_c_library_is_no_hindrance(ranks):
    assert ranks(2, "del os.memfd_create").results("sums.prove(); tell(1)") == [1, 1]


def test_who_waits_takes_no_processor_time_and_keeps_nothing_open(ranks):
    results = ranks(2).results("""
cpu, x = time.process_time(), np.ones(5, np.float32)
time.sleep(2 * rank)
sums.in_place(x, in_a_tree=True)()
cpu = time.process_time() - cpu
tell([x.tolist(), cpu, len(os.listdir("/proc/self/fd")) - before])
""")
    for total, seconds, opened in results:
        assert total == [2.0] * 5
        assert seconds < 0.04
        assert opened == 2  # a pidfd, and what is mapped


WAITING = """
found = raised(sums.in_place(np.ones(100, np.float32), in_a_tree=True))
tell([*found, raised(sums.prove)[0]])
"""


def test_a_killed_rank_ends_the_others_wait_at_once(ranks):
    three = ranks(3)
    three.run(WAITING, 0, 2)
    time.sleep(0.5)
    three.processes[1].kill()
    for text, waited, after in three.told(0, 2):
        assert text in ("rank 1 is gone", "a rank has given up on a sum")
        assert waited < 3
        assert after == "a rank has given up on a sum"


def test_what_a_rank_laid_down_before_it_died_counts(ranks):
    two = ranks(2)
    two.run("sums.in_place(np.ones(3, np.float32), in_a_tree=True)(); os._exit(0)", 1)
    two.run("x = np.ones(3, np.float32); sums.in_place(x, in_a_tree=True)(); tell(x.tolist())", 0)
    assert two.told(0) == [[2.0] * 3]
    two.processes[1].wait(10)
    two.run(WAITING, 0)
    assert two.told(0)[0][0] == "rank 1 is gone"


def test_a_rank_that_stands_still_is_given_up_and_all_that_come_hear_of_it(ranks):
    """Those that wait for it, and itself when it goes on: nobody adds up what others have left."""
    three = ranks(3, "shared_sums.SharedSums.__init__.__defaults__ = (1.0,)")
    os.kill(three.processes[1].pid, signal.SIGSTOP)
    three.run(WAITING)
    for text, waited, after in three.told(0, 2):
        assert text in ("rank 1 did not come to a sum within 1 s", "a rank has given up on a sum")
        assert 0.5 < waited < 5
        assert after == "a rank has given up on a sum"
    os.kill(three.processes[1].pid, signal.SIGCONT)
    text, waited, after = three.told(1)[0]
    assert text == after == "a rank has given up on a sum"
    assert waited < 0.5


@pytest.mark.parametrize(
    "other",
    [
        "sums.in_place(np.ones(101, np.float32), in_a_tree=True)",
        "lambda: sums.gathered(np.ones((1, 100), np.float32))",
        "sums.prove",
    ],
)
def test_ranks_at_different_sums_are_told_so(ranks, other):
    """In place of a sum of what does not belong together."""
    two = ranks(2)
    two.run(WAITING, 0)
    two.run(f"tell(raised({other}))", 1)
    texts = [said[0] for said in two.told()]
    assert any("is at another sum" in text for text in texts)
    assert all("is at another sum" in text or "has given up" in text for text in texts)


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("if rank: os.environ['CC'] = '/proc/none'", "rank 1: "),
        ("shared_sums.os.posix_fallocate = lambda *_: os.close(-1)", "rank 0: [Errno 9]"),
        ("if rank == 1: pids[0] = os.getpid()", "rank 1: "),
        ("if rank == 0: pids[2] = 1 << 30", "rank 0: "),
    ],
)
def test_all_go_without_where_one_cannot(ranks, before, says):
    """No compiler; no memory; other processes under /proc; a process that is gone."""
    listen = "said = []; shared_sums.log.warning = lambda text, *words: said.append(text % words)\n"
    results = ranks(3, listen + before).results("tell([sums is None, said, len(os.listdir('/proc/self/fd')) - before])")
    for without, said, opened in results:
        assert without
        assert len(said) == 1
        assert "over gloo" in said[0]
        assert says in said[0]
        assert opened == 0


def test_a_compiler_that_fails_is_asked_once(ranks):
    """Maybe after minutes: the second time would be while the other ranks wait in a collective."""
    before = "asked = []; shared_sums.compiled = lambda *_: asked.append(1) or os.close(-1); shared_sums.get_ready()"
    assert ranks(2, before).results("tell([sums is None, len(asked)])") == [[True, 1]] * 2

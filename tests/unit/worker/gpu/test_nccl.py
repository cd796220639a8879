"""The contract of a replica's NCCL group. NCCL is a stand-in: ranks are threads that meet at barriers, and a sum waits
for all of them or for ever, as NCCL's do."""

import os
import signal
import subprocess
import threading
import time

import pytest

from worker.gpu.driver import CudaError
from worker.gpu.nccl import FLOAT32, NcclGroups
from worker.orders import GroupDead


class Meeting:
    """What ranks share: communicators by id, and how many there are."""

    def __init__(self, size):
        self.size, self.ids, self.alive = size, 0, 0
        self.barriers = {}


class Nccl:
    """One rank's library. `Driver.wait` stands for the kernel."""

    def __init__(self, meeting):
        self.meeting, self.ncclGetErrorString = meeting, type("F", (), {"__call__": lambda s, c: b"unhandled"})()
        self.journal, self.code, self.aborted, self.queued = [], {}, threading.Event(), False
        self.asynchronous = 0

    def _said(self, name):
        self.journal.append(name)
        return self.code.pop(name, 0)

    def ncclGetUniqueId(self, out):  # noqa: N802
        self.meeting.ids += 1
        out._obj.bytes[0] = self.meeting.ids
        return self._said("id")

    def ncclCommInitRank(self, comm, size, drawn, rank):  # noqa: N802
        code = self._said("init")
        if code:
            return code
        barrier = self.meeting.barriers.setdefault(drawn.bytes[0], threading.Barrier(size))
        barrier.wait()  # for ever
        self.meeting.alive += 1
        comm._obj.value = drawn.bytes[0]
        self.barrier = barrier
        return 0

    def ncclCommFinalize(self, comm):  # noqa: N802
        return self._said("finalize")

    def ncclCommDestroy(self, comm):  # noqa: N802
        self.meeting.alive -= 1
        return self._said("destroy")

    def ncclCommAbort(self, comm):  # noqa: N802
        self.barrier.abort()
        self.aborted.set()
        return self._said("abort")

    def ncclCommGetAsyncError(self, comm, state):  # noqa: N802
        state._obj.value = self.asynchronous
        return 0

    def ncclAllReduce(self, *_):  # noqa: N802
        self.queued = True
        return self._said("sum")


class Driver:
    def __init__(self, nccl):
        self.nccl = nccl

    def enter(self): ...
    def stream(self): ...
    def event(self): ...
    def record(self, *_): ...
    def fill(self, *_): ...

    def happened(self, event):
        return not self.nccl.queued

    def allocate(self, nbytes, what):
        return 4096

    def wait(self, stream):
        if self.nccl.queued:
            try:
                self.nccl.barrier.wait()
            except threading.BrokenBarrierError:
                self.nccl.aborted.wait(5)
            self.nccl.queued = False


class Ranks:
    def __init__(self, size, deadline_s=5.0):
        self.size, self.deadline_s = size, deadline_s
        self.meeting = Meeting(size)
        self.nccls = [Nccl(self.meeting) for _ in range(size)]
        self.processes = [subprocess.Popen(["sleep", "60"]) for _ in range(size)]
        self.box, self.turn = b"", threading.Barrier(size)
        self.groups = [None] * size

    def start(self, *ranks):
        return self.each(self._make, *ranks)

    def each(self, act, *ranks):
        """On every rank at once: what it returned or raised."""
        results = {}

        def run(rank):
            try:
                results[rank] = act(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in ranks or range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        return [results[rank] for rank in sorted(results)]

    def while_killed(self, victim, act, *ranks):
        """The same, with the process of another rank killed meanwhile; and the seconds that it took."""
        threading.Timer(0.2, self.processes[victim].send_signal, [signal.SIGKILL]).start()
        before = time.monotonic()
        return self.each(act, *ranks), time.monotonic() - before

    def sum(self, rank):
        group = self.groups[rank]
        with group.under_way():
            group.all_reduce(4096, 8, FLOAT32, None)
            Driver(self.nccls[rank]).wait(None)

    def launch(self, rank):
        """As a step does: the host is told when it waits."""
        group = self.groups[rank]
        group.all_reduce(4096, 8, FLOAT32, None)
        group.launched(None)
        Driver(self.nccls[rank]).wait(None)
        group.check()

    def _make(self, rank):
        def exchange(mine):
            if rank == 0:
                self.box = mine
            self.turn.wait(5)
            return self.box

        nccl = self.nccls[rank]
        pids = [process.pid for process in self.processes]
        options = {"exchange": exchange, "pids": pids, "deadline_s": self.deadline_s, "library": nccl}
        self.groups[rank] = NcclGroups(Driver(nccl), rank, self.size, **options)

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def ranks():
    made = []

    def make(*args, **kwargs):
        made.append(Ranks(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_fifty_times_shut_and_restarted_and_each_half_may_be_repeated(ranks):
    r = ranks(2)
    assert r.start() == [None, None]
    for _ in range(50):
        assert r.each(lambda n: r.groups[n].shutdown()) == [["tp"], ["tp"]]
        assert r.meeting.alive == 0
        assert r.each(lambda n: r.groups[n].shutdown()) == [[], []]
        assert r.each(lambda n: r.groups[n].restart()) == [["tp"], ["tp"]]
        assert r.each(lambda n: r.groups[n].restart()) == [[], []]
        assert r.each(r.sum) == [None, None]
    assert r.meeting.ids == 51  # a new id each time
    assert r.each(lambda n: r.groups[n].prove()) == [None, None]


def test_a_sum_while_shut_is_an_error_and_not_a_hang(ranks):
    r = ranks(2)
    r.start()
    r.each(lambda n: r.groups[n].shutdown())
    assert all("is shut" in str(error) for error in r.each(r.sum))


def test_a_rank_killed_inside_a_sum_ends_it_at_once_for_the_others(ranks):
    r = ranks(3, deadline_s=60)
    r.start()
    found, seconds = r.while_killed(2, r.sum, 0, 1)
    assert seconds < 3
    assert [str(error) for error in found] == ["the process of rank 2 is gone"] * 2
    assert all(isinstance(error, GroupDead) for error in r.each(lambda n: r.groups[n].prove(), 0, 1))
    assert all(isinstance(error, GroupDead) for error in r.each(lambda n: r.groups[n].restart(), 0, 1))
    assert r.groups[0].shutdown() == []


def test_a_rank_that_stands_still_inside_a_sum_ends_it_by_the_deadline(ranks):
    r = ranks(2, deadline_s=0.5)
    r.start()
    (error,) = r.each(r.sum, 0)
    assert isinstance(error, GroupDead)
    assert "more than 0.5 s" in str(error)
    assert r.nccls[0].journal[-1] == "abort"


def test_launched_sums_are_looked_after_until_they_are_through(ranks):
    r = ranks(2, deadline_s=2.0)
    r.start()
    assert r.each(r.launch) == [None, None]
    time.sleep(2.5)
    assert r.each(r.launch) == [None, None]  # those of before were through
    (error,) = r.each(r.launch, 0)
    assert isinstance(error, GroupDead)
    assert "more than 2 s" in str(error)
    with pytest.raises(GroupDead):  # no step follows it
        r.groups[0].launched(None)


def test_a_rank_killed_inside_a_launched_sum_ends_it_at_once(ranks):
    r = ranks(2, deadline_s=60)
    r.start()
    (error,), seconds = r.while_killed(1, r.launch, 0)
    assert seconds < 10
    assert str(error) == "the process of rank 1 is gone"


def test_where_it_is_quiet_no_sum_is_under_way_and_none_begins(ranks):
    r = ranks(2, deadline_s=60)
    r.start()
    first, said = r.groups[0], []
    entered, leave, launched = threading.Event(), threading.Event(), threading.Event()

    def be_quiet():
        with first.quiet():
            said.append(r.nccls[0].queued)
            entered.set()
            leave.wait(30)

    def launch_more():
        with first.under_way(), first.under_way():
            launched.set()

    summing = threading.Thread(target=r.launch, args=(0,), daemon=True)
    summing.start()
    while not first._since:
        time.sleep(0.01)
    threading.Thread(target=be_quiet, daemon=True).start()
    assert not entered.wait(0.3), "rank 1 is waited for"
    r.launch(1)
    assert entered.wait(30)
    assert said == [False]
    more = threading.Thread(target=launch_more, daemon=True)
    more.start()
    assert not launched.wait(0.3)
    leave.set()
    assert launched.wait(30)
    summing.join(30)


def test_who_waits_for_quiet_does_not_wait_for_a_rank_that_was_killed(ranks):
    r = ranks(2, deadline_s=60)
    r.start()

    def be_quiet(rank):
        r.groups[0].all_reduce(4096, 8, FLOAT32, None)
        r.groups[0].launched(None)
        with r.groups[0].quiet():
            pytest.fail("a sum is under way")

    (error,), seconds = r.while_killed(1, be_quiet, 0)
    assert isinstance(error, GroupDead)
    assert seconds < 10


def test_what_else_sums_is_ended_with_them_also_when_that_is_said_too_late(ranks):
    """Between its making and this a rank may have died: its kernel would wait for that rank for ever."""
    r, ended = ranks(2, deadline_s=60), []
    r.start()
    r.groups[0].also_end(lambda: ended.append("before"))
    (error,), _ = r.while_killed(1, r.launch, 0)
    assert isinstance(error, GroupDead)
    r.groups[0].also_end(lambda: ended.append("after"))
    assert ended == ["before", "after"]


def test_what_nccl_finds_wrong_by_itself_ends_the_sums(ranks):
    r = ranks(2, deadline_s=60)
    r.start()
    r.nccls[0].asynchronous = 7  # in progress: not wrong
    time.sleep(0.2)
    threading.Timer(0.2, setattr, [r.nccls[0], "asynchronous", 6]).start()
    (error,) = r.each(r.launch, 0)
    assert isinstance(error, GroupDead)
    assert str(error) == "NCCL: unhandled"


def test_a_group_that_is_not_summing_is_left_alone_however_long(ranks):
    r = ranks(2, deadline_s=0.2)
    r.start()
    time.sleep(0.5)
    assert r.each(r.sum) == [None, None]


def test_a_rank_that_does_not_come_back_is_not_waited_for(ranks):
    r = ranks(2, deadline_s=0.5)
    r.start()
    r.each(lambda n: r.groups[n].shutdown())
    r.turn = threading.Barrier(1)
    (error,) = r.each(lambda n: r.groups[n].restart(), 0)
    assert isinstance(error, GroupDead)
    assert "not all ranks came" in str(error)


def test_what_nccl_says_is_told_and_the_call_may_be_repeated(ranks):
    r = ranks(2)
    r.start()
    r.nccls[1].code["finalize"] = 3
    ok, error = r.each(lambda n: r.groups[n].shutdown())
    assert ok == ["tp"]
    assert isinstance(error, CudaError)
    assert str(error) == "ncclCommFinalize: unhandled"
    assert r.groups[1].shutdown() == ["tp"]


def test_multicast_stays_off(ranks, monkeypatch):
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    ranks(1).start()
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"

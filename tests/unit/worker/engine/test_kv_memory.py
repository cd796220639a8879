"""The KV cache's memory: refused by name, or filled in beside what runs, and gone when it is let go."""

import mmap
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from rollout_client import aligned_map
from worker import memory
from worker.engine import paddle_engine
from worker.engine.base import Interrupted, never
from worker.engine.paddle_engine import KV_SHARE
from worker.memory import give_back_to_system
from worker.models import filled_memory, kv_memory
from worker.models.filled_memory import wait_until_filled
from worker.models.kv_memory import KvMemory

TOO_MUCH = """
import resource, numpy
from worker.models import kv_memory
from worker.models.kv_memory import KvMemory
kv_memory.memory_available = lambda: float("inf")
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
KvMemory(32, 1 << 16, 8, 16, 128, numpy.uint16)
"""


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """However busy this machine is."""
    monkeypatch.setattr(filled_memory, "_SHARE", 1.0)
    monkeypatch.setattr(filled_memory, "_BUSY_SHARE", 1.0)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_what_does_not_fit_is_said_with_its_size_and_what_to_change():
    """As under `ulimit -v`: the mapping itself is refused."""
    ended = subprocess.run([sys.executable, "-c", TOO_MUCH], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode
    assert ended.stderr.strip().splitlines()[-1] == (
        "MemoryError: no memory for 128.0 GiB of KV cache (Cannot allocate memory): lower worker.num_blocks"
    )


def test_more_than_there_is_is_refused_before_the_system_ends_somebody(monkeypatch):
    """All of it counts: keys, values and hidden states together."""
    whole = 2 * (4 << 20) + (16 << 10)
    monkeypatch.setattr(kv_memory, "memory_available", lambda: whole - 1)
    with pytest.raises(MemoryError, match=r"0.0 GiB of KV cache \(0.0 GiB are available\): lower worker.num_blocks"):
        KvMemory(4, 64, 4, 16, 64, np.float32, hidden=4)
    monkeypatch.setattr(kv_memory, "memory_available", lambda: whole)
    assert KvMemory(4, 64, 4, 16, 64, np.float32, hidden=4).nbytes == whole


V1, V2 = "/sys/fs/cgroup/memory/memory.", "/sys/fs/cgroup/memory."


@pytest.mark.parametrize(
    ("files", "available", "whole"),
    [
        ({}, 3 << 20, 9999 << 10),
        ({V2 + "max": "max\n", V2 + "current": "999999"}, 3 << 20, 9999 << 10),
        ({V2 + "max": str(2 << 20)}, 2 << 20, 2 << 20),
        ({V2 + "max": str(1 << 62)}, 3 << 20, 9999 << 10),
        (
            {V2 + "max": str(4 << 20), V2 + "current": str(3 << 20), V2 + "stat": f"anon 5\ninactive_file {1 << 20}\n"},
            2 << 20,
            4 << 20,
        ),
        (
            {
                V1 + "limit_in_bytes": str(4 << 20),
                V1 + "usage_in_bytes": str(3 << 20),
                V1 + "stat": "cache 7\ntotal_inactive_file 0\n",
            },
            1 << 20,
            4 << 20,
        ),
        (  # a checkpoint that was read twice is active, and given back as well when somebody needs memory
            {
                V2 + "max": str(4 << 20),
                V2 + "current": str(4 << 20),
                V2 + "stat": f"inactive_file {1 << 19}\nactive_file {1 << 20}\nshmem 9\n",
            },
            (1 << 19) + (1 << 20),
            4 << 20,
        ),
        (
            {
                V1 + "limit_in_bytes": str(4 << 20),
                V1 + "usage_in_bytes": str(4 << 20),
                V1 + "stat": f"active_file 5\ntotal_active_file {1 << 20}\ntotal_inactive_file 0\n",
            },
            1 << 20,
            4 << 20,
        ),
        ({V2 + "max": "100", V2 + "current": "200", V2 + "stat": "inactive_file 0"}, 0, 100),
    ],
)
def test_what_is_available_is_what_the_system_and_the_container_have_left(monkeypatch, files, available, whole):
    files = files | {"/proc/meminfo": "MemTotal: 9999 kB\nMemAvailable: 2048 kB\nSwapFree:  1024 kB\nHugePages: 0\n"}

    def read(path):
        try:
            return files[str(path)]
        except KeyError:
            raise FileNotFoundError(path) from None

    monkeypatch.setattr(memory.Path, "read_text", read)
    assert memory.memory_available() == available
    assert memory.memory_of_machine() == whole


def test_where_nothing_is_known_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(memory.Path, "read_text", lambda path: "")
    assert memory.memory_available() == float("inf")


@pytest.mark.parametrize("backend", ["native", "mkl", "paddle"], indirect=True)
def test_without_a_number_it_is_what_the_machine_has_room_for(checkpoint, backend, monkeypatch):
    def blocks(**fields):
        return checkpoint("qwen3").engine(
            **({"num_blocks": None, "block_size": 16, "max_model_len": 2048, "max_batch": 64} | fields)
        )

    wanted = blocks()
    assert wanted.spec.num_blocks == 64 * 1024 // 16
    wanted.allocate_kv()
    nbytes = wanted.release_kv()
    monkeypatch.setattr(paddle_engine, "memory_of_machine", lambda: nbytes / 2 / KV_SHARE)
    assert blocks().spec.num_blocks == 2048
    assert blocks(ranks_on_host=4).spec.num_blocks == 512
    assert blocks(num_blocks=4096).spec.num_blocks == 4096, "as it was asked for"
    monkeypatch.setattr(paddle_engine, "memory_of_machine", lambda: 0.0)
    assert blocks().spec.num_blocks == 64, "one sequence fits in any case, or its memory is refused in words"


class Between:
    """Stands in for `memory_available` and so runs before every piece that is filled in; at piece `at` it waits."""

    def __init__(self, at: int) -> None:
        self.pieces, self.at = 0, at
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> float:
        self.pieces += 1
        if self.pieces == self.at:
            self.reached.set()
            assert self.go_on.wait(30)
        return float("inf")


def test_it_is_filled_in_beside_what_runs(monkeypatch):
    between = Between(at=8)
    monkeypatch.setattr(filled_memory, "memory_available", between)
    before = resident()
    kv = KvMemory(4, 2048, 4, 16, 64, np.float32)
    assert between.reached.wait(30)
    assert resident() - before < kv.nbytes * 0.5, "it is there before all of it is filled in"
    assert not kv.keys.any()
    kv.values[:] = 1
    between.go_on.set()
    wait_until_filled(30)
    assert resident() - before > kv.nbytes * 0.9
    assert not kv.keys.any()
    assert kv.values.all(), "what was written meanwhile is kept"
    for name in ("keys", "values"):
        assert getattr(kv, name).nbytes == kv.nbytes // 2


def test_all_arrays_are_filled_in(monkeypatch):
    before = resident()
    kv = KvMemory(4, 2048, 4, 16, 64, np.float32, hidden=1024)
    wait_until_filled(30)
    assert kv.states is not None
    assert kv.states.nbytes == 128 << 20
    assert resident() - before > kv.nbytes * 0.9


def test_what_is_let_go_half_filled_in_leaves_the_process(monkeypatch):
    between = Between(at=40)
    monkeypatch.setattr(filled_memory, "memory_available", between)
    kv = KvMemory(4, 2048, 4, 16, 64, np.float32)
    assert between.reached.wait(30)
    before = resident()
    kv.free()
    between.go_on.set()
    wait_until_filled(30)
    assert before - resident() > 39 * (2 << 20) * 0.9
    assert between.pieces <= 42, "nothing is filled in after that"


def test_the_wait_for_it_is_bounded(monkeypatch):
    between = Between(at=1)
    monkeypatch.setattr(filled_memory, "memory_available", between)
    kv = KvMemory(1, 4, 1, 16, 16, np.float32)
    with pytest.raises(TimeoutError, match=r"still filled in after 0\.01 s"):
        wait_until_filled(0.01)
    between.go_on.set()
    wait_until_filled(30)
    assert kv.nbytes


def test_the_last_memory_of_a_machine_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(filled_memory, "memory_available", lambda: 200 << 20)
    before = resident()
    kv = KvMemory(4, 4096, 4, 16, 64, np.float32)
    wait_until_filled(30)
    assert resident() - before < kv.nbytes * 0.1
    assert "lower worker.num_blocks" in caplog.text
    kv.keys[:, 5] = 1
    assert kv.keys.sum() == kv.keys[:, 5].size


def test_an_old_kernel_fills_it_in_as_it_is_used(monkeypatch, caplog):
    monkeypatch.setattr(aligned_map, "_MADV_POPULATE_WRITE", 999)
    kv = KvMemory(1, 4, 1, 16, 16, np.float32)
    wait_until_filled(30)
    kv.keys[:] = 1
    assert kv.keys.sum() == kv.keys.size
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_why_it_is_not_filled_in_is_said(caplog):
    array = np.zeros(1)
    filling = filled_memory._Filling([array])
    filling._arrays = [(weakref.ref(array), 0, mmap.PAGESIZE)]  # nothing is ever mapped at 0
    filling.run()
    assert "filled in as it is used: [Errno 12] Cannot allocate memory" in caplog.text


def test_without_a_thread_it_is_filled_in_as_it_is_used(monkeypatch, caplog):
    """As with a limit on processes."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(filled_memory._Filling, "start", refuse)
    kv = KvMemory(1, 4, 1, 16, 16, np.float32)
    kv.keys[:] = 1
    assert kv.keys.sum() == kv.keys.size
    assert "as it is used: can't start new thread" in caplog.text


def test_what_is_still_to_be_filled_in_is_not_given_away_again(monkeypatch):
    between = Between(at=3)
    monkeypatch.setattr(filled_memory, "memory_available", between)
    monkeypatch.setattr(kv_memory, "memory_available", lambda: 40 << 20)
    first = KvMemory(4, 256, 4, 16, 64, np.float32)
    assert first.nbytes == 32 << 20
    assert between.reached.wait(30)
    assert filled_memory.to_come() == 28 << 20
    with pytest.raises(MemoryError, match=r"0\.0 GiB are available"):
        KvMemory(4, 256, 4, 16, 64, np.float32)
    first.free()
    assert KvMemory(4, 128, 4, 16, 64, np.float32).nbytes == 16 << 20, "at once, though the thread still waits"
    between.go_on.set()
    wait_until_filled(30)
    assert filled_memory.to_come() == 0


def test_a_size_beyond_all_numbers_is_refused_too(monkeypatch):
    monkeypatch.setattr(kv_memory, "memory_available", lambda: float("inf"))
    with pytest.raises(MemoryError, match=r"lower worker\.num_blocks"):
        KvMemory(1 << 20, 1 << 24, 8, 64, 128, np.float32)


@pytest.mark.parametrize(("spare", "pause"), [(1.0, 0.01), (0.2, 0.09)])
def test_it_takes_less_of_a_machine_that_has_other_work(monkeypatch, spare, pause):
    """spare: cores that have nothing to do."""
    monkeypatch.setattr(filled_memory, "_SHARE", 0.5)
    monkeypatch.setattr(filled_memory, "_BUSY_SHARE", 0.1)
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(round(seconds, 6))
        now[0] += 0.01 + seconds

    monkeypatch.setattr(filled_memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(filled_memory.time, "sleep", sleep)
    monkeypatch.setattr(filled_memory, "_idle_s", lambda: spare * now[0])
    pace = filled_memory._Pace()
    for _ in range(40):
        pace.rest(0.01)
    assert slept[0] == 0.01
    assert slept[-1] == pause


@pytest.mark.parametrize("backend", ["native", "mkl", "paddle"], indirect=True)
@pytest.mark.parametrize("end", ["done", "given up"])
def test_what_is_released_has_left_the_process(checkpoint, feeder, backend, end):
    """Whatever the last step's attention still knows of it."""
    engine = checkpoint("qwen3").engine(num_blocks=30_000)
    run = feeder(engine, [list(range(1, 12))])
    run.step({0: 5})
    if end == "given up" and backend != "paddle":
        engine.asked = lambda: True
        with pytest.raises(Interrupted):
            run.step({0: 1})
        engine.asked = never
    wait_until_filled(30)
    before = resident()
    freed = engine.release_kv()
    give_back_to_system()  # as a worker that is cleared does
    assert freed > 50 << 20
    assert before - resident() > freed * 0.9
    engine.allocate_kv()
    run.done[0] = 0
    run.step({0: 11})

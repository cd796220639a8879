"""The KV cache's memory: there at once, or refused by name; and the loop goes on while it is made."""

import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from worker import memory
from worker.engine import paddle_engine
from worker.engine.base import Interrupted, never
from worker.engine.paddle_engine import KV_SHARE
from worker.memory import give_back_to_system
from worker.models import kv_blocks
from worker.models.kv_blocks import KvBlocks

TOO_MUCH = """
import resource, numpy
from worker.models import kv_blocks
from worker.models.kv_blocks import KvBlocks
kv_blocks.memory_available = lambda: float("inf")
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
KvBlocks(32, 1 << 16, 8, 16, 128, numpy.uint16)
"""


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_what_does_not_fit_is_said_with_its_size_and_what_to_change():
    """As under `ulimit -v`: the mapping itself is refused."""
    ended = subprocess.run([sys.executable, "-c", TOO_MUCH], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode
    assert ended.stderr.strip().splitlines()[-1] == (
        "MemoryError: no memory for 64.0 GiB of KV cache (Cannot allocate memory): lower worker.num_blocks"
    )


def test_more_than_there_is_is_refused_before_the_system_ends_somebody(monkeypatch):
    """All of it counts: keys, values and hidden states together."""
    whole = 2 * (4 << 20) + (16 << 10)
    monkeypatch.setattr(kv_blocks, "memory_available", lambda: whole - 1)
    with pytest.raises(MemoryError, match=r"0.0 GiB of KV cache \(0.0 GiB are available\): lower worker.num_blocks"):
        KvBlocks(4, 64, 4, 16, 64, np.float32, hidden=4)
    monkeypatch.setattr(kv_blocks, "memory_available", lambda: whole)
    assert KvBlocks(4, 64, 4, 16, 64, np.float32, hidden=4).nbytes == whole


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 3 << 20), (str(2 << 20), 2 << 20), (str(1 << 62), 3 << 20), (None, 3 << 20)]
)
def test_what_is_available_is_the_systems_and_the_containers(monkeypatch, limit, expected):
    files = {"/proc/meminfo": "MemTotal: 9999 kB\nMemAvailable: 2048 kB\nSwapFree:  1024 kB\nHugePages_Total: 0\n"}
    if limit is not None:
        files["/sys/fs/cgroup/memory.max"] = limit + "\n"

    def read(path):
        try:
            return files[str(path)]
        except KeyError:
            raise FileNotFoundError(path) from None

    monkeypatch.setattr(memory.Path, "read_text", read)
    assert memory.memory_available() == expected
    assert memory.memory_of_machine() == min(9999 << 10, expected if limit == str(2 << 20) else 9999 << 10)


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


def test_all_of_it_is_there_and_other_threads_run_meanwhile(monkeypatch):
    monkeypatch.setattr(kv_blocks, "_POPULATED", 4 << 20)
    turns: list[float] = []
    stop = threading.Event()

    def turn():
        while not stop.is_set():
            turns.append(time.monotonic())
            time.sleep(0.0002)

    thread = threading.Thread(target=turn)
    thread.start()
    before = resident()
    began = time.monotonic()
    kv = KvBlocks(4, 4096, 4, 16, 64, np.float32)
    ended = time.monotonic()
    stop.set()
    thread.join()
    assert resident() - before > kv.nbytes * 0.9
    assert not kv.keys.any()
    assert sum(began < at < ended for at in turns) >= 8
    for name in ("keys", "values"):
        assert getattr(kv, name).nbytes == kv.nbytes // 2


def test_an_old_kernel_fills_it_in_as_it_is_used(monkeypatch):
    monkeypatch.setattr(kv_blocks, "MADV_POPULATE_WRITE", 999)
    kv = KvBlocks(1, 4, 1, 16, 16, np.float32)
    kv.keys[:] = 1
    assert kv.keys.sum() == kv.keys.size


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
    before = resident()
    freed = engine.release_kv()
    give_back_to_system()  # as a worker that is cleared does
    assert freed > 50 << 20
    assert before - resident() > freed * 0.9
    engine.allocate_kv()
    run.done[0] = 0
    run.step({0: 11})

"""The KV cache's memory: there at once, or refused by name; and the loop goes on while it is made."""

import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from worker.models import kv_blocks
from worker.models.kv_blocks import KvBlocks

TOO_MUCH = """
import resource, numpy
from worker.models.kv_blocks import KvBlocks
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

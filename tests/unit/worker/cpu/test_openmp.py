"""In a process of its own: the setting is the runtime's, and it is Paddle that brings one."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, os, sys
{before}
from worker.cpu import openmp
openmp.spin(7)
{after}
"""
SET = "print(openmp._runtime().kmp_get_blocktime())"


def printed(before, after, *, last=1, **env):
    script = SCRIPT.format(before=before, after=after)
    return subprocess.run(
        [sys.executable, "-c", script], env={**env, "PATH": ""}, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()[-last:]


def test_the_runtime_takes_it():
    assert printed("import paddle", SET) == ["7"]


SPINNING = """
import time
runtime = openmp._runtime()
runtime.kmp_set_blocktime(200)
runtime.GOMP_parallel(runtime.omp_get_level, None, 0, 0)
openmp.spin({milliseconds})
used = time.process_time()
time.sleep(0.15)
print(runtime.omp_get_max_threads(), time.process_time() - used > 0.02)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nobody waits for anybody")
def test_threads_that_spin_already_hear_of_it():
    """The first gap of a push would be theirs otherwise."""
    ended = [printed("import paddle", SPINNING.format(milliseconds=ms), OMP_NUM_THREADS="2", last=2) for ms in (200, 1)]
    assert ended == [["2", "True"], ["2", "False"]]


def test_the_users_own_value_wins():
    assert printed("import paddle", SET, KMP_BLOCKTIME="50") == ["50"]


def test_without_paddle_nothing_is_loaded():
    assert printed("", "print('paddle' in sys.modules)") == ["False"]

"""In a process of its own: the setting is the runtime's, and it is Paddle that brings one."""

import subprocess
import sys

SCRIPT = """
import ctypes, os, sys
{before}
from worker.cpu import openmp
openmp.spin(7)
{after}
"""
SET = "print(openmp._runtime().kmp_get_blocktime())"


def printed(before, after, **env):
    script = SCRIPT.format(before=before, after=after)
    return subprocess.run(
        [sys.executable, "-c", script], env={**env, "PATH": ""}, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()[-1:]


def test_the_runtime_takes_it():
    assert printed("import paddle", SET) == ["7"]


def test_the_users_own_value_wins():
    assert printed("import paddle", SET, KMP_BLOCKTIME="50") == ["50"]


def test_without_paddle_nothing_is_loaded():
    assert printed("", "print('paddle' in sys.modules)") == ["False"]

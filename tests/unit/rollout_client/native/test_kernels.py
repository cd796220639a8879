"""Loading the kernels, and what holds a hash."""

import subprocess
import sys

import pytest

from rollout_client.native.kernels import Hasher, prepare

FORKED = """
import os
from rollout_client.native import kernels
kernels.prepare()
if os.fork() == 0:
    os._exit(0 if kernels.prepare(120) else 3)
assert kernels.prepare(120)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("compiled", [False, True])
def test_a_process_that_is_forked_while_they_are_compiled_gets_them_too(tmp_path, monkeypatch, compiled):
    if prepare(120) is None:
        pytest.skip("no C compiler here")
    if not compiled:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


def test_no_memory_for_a_hash_is_said():
    freed = []
    with pytest.raises(MemoryError):
        Hasher({"createState": lambda: None, "64bits_reset": pytest.fail, "freeState": freed.append})
    assert freed == [None]

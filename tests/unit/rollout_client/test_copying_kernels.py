"""Loading the kernels, and what holds a hash."""

import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_client.copying import Hasher, prepare

FORKED = """
import os
from rollout_client import copying
copying.prepare()
if os.fork() == 0:
    os._exit(0 if copying.prepare(120) else 3)
assert copying.prepare(120)
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


CHUNKS = st.integers(30, 300).map(lambda n: n * 512)
"""Elements of two bytes, in whole kilobytes: where lanes are scrambled; below and above what is summed on the way."""


@given(CHUNKS, st.integers(-34, 34), st.integers(0, 40), st.integers(0, 40), st.integers(0, 1 << 32))
@settings(max_examples=300, deadline=None)
def test_what_is_moved_has_the_digest_of_the_wheel_wherever_it_lies(chunks, more, here, there, seed):
    kernels = prepare(120)
    if kernels is None:
        pytest.skip("no C compiler here")
    size = chunks + more
    held = np.random.default_rng(seed).integers(0, 1 << 16, size + 40, np.uint16)
    slot = np.full(size + 80, 0xA5A5, np.uint16)
    source, target = held[here : here + size], slot[there : there + size]
    (digest,) = kernels.move([(source, "bfloat16", target, "bfloat16")])
    assert digest == xxhash.xxh3_64_intdigest(source.tobytes())
    assert np.array_equal(source, target)
    assert (slot[:there] == 0xA5A5).all()
    assert (slot[there + size :] == 0xA5A5).all()


def test_no_memory_for_a_hash_is_said():
    freed = []
    with pytest.raises(MemoryError):
        Hasher({"createState": lambda: None, "64bits_reset": pytest.fail, "freeState": freed.append})
    assert freed == [None]

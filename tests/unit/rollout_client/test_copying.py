import ctypes
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_client import copying
from rollout_client.copying import move, slot_view, source_view
from rollout_client.protocol import Copy

pytestmark = pytest.mark.usefixtures("way")


def bf16_reference(x):
    """Round to nearest even through exact integer arithmetic, one value at a time."""
    out = []
    for bits in x.view(np.uint32).tolist():
        if (bits & 0x7FFFFFFF) > 0x7F800000:
            out.append(bits >> 16 | 0x40)
            continue
        low, high = bits & 0xFFFF, bits >> 16
        out.append(high + (low > 0x8000 or (low == 0x8000 and high & 1)))
    return np.array(out, np.uint16)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_float32_rounds_to_bfloat16_nearest_even_and_nan_stays_nan(bits):
    x = np.array(bits, np.uint32).view(np.float32)
    out = np.empty(x.size, np.uint16)
    digest = move(x, "float32", out, "bfloat16")
    np.testing.assert_array_equal(out, bf16_reference(x))
    assert digest == xxhash.xxh3_64_intdigest(out.tobytes())


def test_rounding_edges():
    x = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFFFFFFFF, 0x7F800001, 0x80000000], np.uint32).view(np.float32)
    out = np.empty(6, np.uint16)
    move(x, "float32", out, "bfloat16")
    assert [hex(v) for v in out] == ["0x3f80", "0x3f82", "0x7f80", "0xffff", "0x7fc0", "0x8000"]


def test_widening_is_exact_for_every_value():
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    out = np.empty(every.size, np.float32)
    move(every, "bfloat16", out, "float32")
    np.testing.assert_array_equal(out.view(np.uint32), every.astype(np.uint32) << 16)
    halves = every.view(np.float16)
    with np.errstate(invalid="ignore"):
        move(halves, "float16", out, "float32")
    np.testing.assert_array_equal(out, halves.astype(np.float32))


def test_float16_reaches_bfloat16_through_exact_float32():
    halves = np.array([1.0, 0.1, 65504, 6e-8, -0.0], np.float16)
    out = np.empty(5, np.uint16)
    move(halves, "float16", out, "bfloat16")
    np.testing.assert_array_equal(out, bf16_reference(halves.astype(np.float32)))


@contextmanager
def subnormal_numbers_are_zero() -> Iterator[None]:
    """As torch.set_flush_denormal(True) has it: the two bits of the thread's MXCSR, last word of glibc's fenv_t."""
    libm = ctypes.CDLL("libm.so.6")
    before, after = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    libm.fegetenv(before)
    libm.fegetenv(after)
    after[7] |= 0x8040
    libm.fesetenv(after)
    try:
        yield
    finally:
        libm.fesetenv(before)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the bits are x86's")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_halves_stay_what_they_are_where_subnormal_numbers_count_as_zero(dtype):
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    halves = every[np.isfinite(every)]
    expected, found = (np.empty(halves.size, np.float32 if dtype == "float32" else np.uint16) for _ in range(2))
    move(halves, "float16", expected, dtype)
    with subnormal_numbers_are_zero():
        assert np.float32(1e-40) * np.float32(1) == 0
        move(halves, "float16", found, dtype)
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


SMALL_STACK = """
import sys, threading
import numpy as np
from rollout_client.copying import move
from rollout_client import copying
from rollout_client.patches import hasher, patched
if sys.argv[1] == "compiled":
    assert copying.prepare(120)

def run():
    move(np.ones(1 << 20, np.float32), "float32", np.empty(1 << 20, np.uint16), "bfloat16")
    ones = np.ones(1 << 20, np.uint16)
    assert patched(np.empty_like(ones), ones, np.zeros(1, np.uint8), ones[:1], hasher())
    print("through")

threading.stack_size(64 << 10)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def test_threads_with_small_stacks_move_weights():
    """A trainer's threads have the size that it told Python to give them."""
    way = "numpy" if copying.ready() is None else "compiled"
    command = [sys.executable, "-c", SMALL_STACK, way]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "through\n"), ended.stderr


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_strided_copy_lands_where_a_plain_loop_puts_it(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    order = data.draw(st.permutations(range(len(shape))))
    source = np.arange(300, dtype=np.float32)
    strides, step = [0] * len(shape), data.draw(st.integers(1, 2))
    for axis in order:
        strides[axis], step = step, step * shape[axis]
    dst_strides = [int(np.prod(shape[i + 1 :])) + (i == 0) for i in range(len(shape))]
    copy = Copy(0, shape, 3, tuple(strides), 5, tuple(dst_strides), "float32")
    slot = bytearray(4 * 400)
    limit = data.draw(st.integers(1, 7))
    target = slot_view(memoryview(slot), copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying.blocks, "__defaults__", (limit,))
        digest = move(source_view(source, copy), "float32", target, "float32")
    expected = np.zeros(400, np.float32)
    moved = []
    for index in np.ndindex(*shape):
        value = source[3 + sum(i * s for i, s in zip(index, strides, strict=True))]
        expected[5 + sum(i * s for i, s in zip(index, dst_strides, strict=True))] = value
        moved.append(value)
    np.testing.assert_array_equal(np.frombuffer(slot, np.float32), expected)
    assert digest == xxhash.xxh3_64_intdigest(np.array(moved, np.float32).tobytes())


@pytest.mark.parametrize("size", [1, 7, 8, 9, 100])
def test_a_plain_copy_goes_block_by_block(monkeypatch, size):
    monkeypatch.setattr(copying, "BLOCK", 2)
    x = np.random.default_rng(0).standard_normal(size, dtype=np.float32).astype(np.float16)
    out = np.zeros(size + 1, np.float16)
    assert move(x, "float16", out[:size], "float16") == xxhash.xxh3_64_intdigest(x.tobytes())
    np.testing.assert_array_equal(out[:size], x)
    assert out[size] == 0


@pytest.mark.parametrize(
    "copy",
    [
        Copy(0, (4,), 7, (1,), 0, (1,), "float32"),
        Copy(0, (4,), 0, (4,), 0, (1,), "float32"),
        Copy(0, (4,), -1, (1,), 0, (1,), "float32"),
        Copy(0, (2, 2), 0, (1, -1), 0, (2, 1), "float32"),
        Copy(0, (0,), 0, (1,), 0, (1,), "float32"),
    ],
)
def test_a_copy_that_leaves_the_tensor_is_refused(copy):
    with pytest.raises(ValueError, match="leaves a buffer"):
        source_view(np.zeros(10, np.float32), copy)


def test_a_copy_that_leaves_the_slot_is_refused():
    with pytest.raises(ValueError, match="leaves a buffer of 100"):
        slot_view(memoryview(bytearray(400)), Copy(0, (4,), 0, (1,), 97, (1,), "float32"))


def test_a_cast_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="cannot cast float64 to float32"):
        move(np.zeros(4), "float64", np.zeros(4, np.float32), "float32")

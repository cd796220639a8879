"""The binding against numpy, on odd shapes, strides and both dtypes."""

import numpy as np
import pytest

from tests.products import MULTIPLIED, WHY_NOT_BFLOAT16
from worker.cpu import onednn
from worker.cpu.onednn import ADD, LINEAR, MUL, POW, SUB, SUM, SWISH, Slot, combine, eltwise


@pytest.fixture(scope="module")
def dnn():
    return onednn.load()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def narrow(x):
    """float32 -> (bfloat16 bits, the float32 values they stand for)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return bits, widen(bits)


def widen(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 7, 5), (3, 64, 17), (33, 96, 1), (17, 576, 64), (130, 31, 70)])
@pytest.mark.parametrize("dtype", MULTIPLIED)
def test_matmul(dnn, rng, m, k, n, dtype):
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32)
    expected = a.astype(np.float64) @ b.T
    if dtype == "bfloat16":
        (a, wide_a), (b, wide_b) = narrow(a), narrow(b)
        expected = wide_a.astype(np.float64) @ wide_b.T
    out = np.full((m, n), np.nan, np.float32)
    assert dnn.matmul(a, b.T, out)() == 0
    np.testing.assert_allclose(out, expected, atol=k * 1e-6)
    product = np.full((m, n), np.nan, np.float32)
    assert dnn.inner_product(a, b, product)() == 0
    np.testing.assert_allclose(product, expected, atol=k * 1e-6)


def test_post_operations_run_in_order(dnn, rng):
    a, b = rng.standard_normal((6, 8), np.float32), rng.standard_normal((8, 5), np.float32)
    bias, factor = rng.standard_normal((6, 1), np.float32), rng.standard_normal((6, 5), np.float32)
    out = rng.standard_normal((6, 5), np.float32)
    x = out + a @ b + bias
    expected = x / (1 + np.exp(-x)) * factor
    dnn.matmul(a, b, out, [SUM, combine(ADD, bias), eltwise(SWISH), combine(MUL, factor)])()
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_a_scale_from_a_mean_of_squares(dnn, rng):
    x = rng.standard_normal((3, 16, 7), np.float32)
    squares, scale = np.empty_like(x), np.empty((3, 1, 7), np.float32)
    dnn.binary(MUL, x, x, squares)()
    mean = np.full((1, 1, 16), 1 / 16, np.float32)
    dnn.matmul(mean, squares, scale, [eltwise(LINEAR, 1.0, 1e-3), eltwise(POW, 1.0, -0.5)])()
    np.testing.assert_allclose(scale, ((x * x).mean(1, keepdims=True) + 1e-3) ** -0.5, rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 7, 16, 33])
def test_binary_broadcasts_and_casts(dnn, rng, tokens):
    x, w = rng.standard_normal((1, 24, tokens), np.float32), rng.standard_normal((1, 24, 1), np.float32)
    scale = rng.standard_normal((1, 1, tokens), np.float32)
    out, bits = np.empty_like(x), np.empty(x.shape, np.uint16)
    for dst in (out,) if WHY_NOT_BFLOAT16 else (out, bits):
        assert dnn.binary(MUL, x, w, dst, [combine(MUL, scale)])() == 0
    np.testing.assert_allclose(out, x * w * scale, rtol=1e-6)
    if not WHY_NOT_BFLOAT16:
        np.testing.assert_array_equal(bits, narrow(out)[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 16, 40])
def test_binary_in_place_on_strided_halves(dnn, rng, interleaved, tokens):
    x = rng.standard_normal((3, 8, tokens), np.float32)
    a, b = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :4], x[:, 4:])
    cos = rng.standard_normal((1, 4, tokens), np.float32)
    other = rng.standard_normal((3, 4, tokens), np.float32)
    expected, untouched = a * cos - other, b.copy()
    dnn.binary(MUL, a, cos, a, [combine(SUB, other)])()
    np.testing.assert_allclose(a, expected, atol=1e-6)
    np.testing.assert_array_equal(b, untouched)


@pytest.mark.parametrize("shape", [(5, 7), (96, 64), (1, 33)])
def test_copy_transposes_and_casts(dnn, rng, shape):
    x = rng.standard_normal(shape, np.float32)
    turned, bits, back = np.empty(shape[::-1], np.float32), np.empty(shape[::-1], np.uint16), np.empty_like(x)
    dnn.copy(x.T, turned)()
    np.testing.assert_array_equal(turned, x.T)
    dnn.copy(x.T, bits)()
    np.testing.assert_array_equal(bits, narrow(x.T)[0])
    dnn.copy(bits.T, back)()
    np.testing.assert_array_equal(back, widen(bits.T.copy()))


def test_softmax_of_rows_with_hidden_columns(dnn, rng):
    x = rng.standard_normal((9, 40), np.float32)
    x[:, 30:] = -1e30
    out = np.empty_like(x)
    dnn.softmax(x, out)()
    shares = np.exp(x[:, :30] - x[:, :30].max(1, keepdims=True))
    np.testing.assert_allclose(out[:, :30], shares / shares.sum(1, keepdims=True), rtol=2e-6)
    assert not out[:, 30:].any()


def test_a_slot_is_read_where_it_is_pointed(dnn, rng):
    weights = rng.standard_normal((2, 4, 6), np.float32)
    x, out = rng.standard_normal((6, 3), np.float32), np.empty((4, 3), np.float32)
    slot = Slot((4, 6), np.float32)
    call = dnn.matmul(slot, x, out)
    for w in (weights[0], weights[1], weights[0]):
        dnn.point(slot, w.ctypes.data)
        call()
        np.testing.assert_allclose(out, w @ x, atol=1e-5)


def test_refusals_say_which_function(dnn):
    x = np.zeros((4, 4), np.float32)
    with pytest.raises(onednn.OneDnnError, match="matmul_primitive_desc_create: invalid arguments"):
        dnn.matmul(x, np.zeros((3, 4), np.float32), x)
    with pytest.raises(onednn.OneDnnError, match="unimplemented"):
        dnn.matmul(x, np.zeros((4, 4), np.uint16), x)

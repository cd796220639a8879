"""Products of 16 to 64 tokens: each token's numbers are those of the product of few tokens, to the bit."""

import numpy as np
import pytest

from tests.reference.checkpoint import Checkpoint
from worker.models import few_product
from worker.models.few_product import FewProduct
from worker.models.many_product import ADD, GATED, GATED_GELU, MOST, SET, TURNED, ManyProduct, is_fast
from worker.models.onednn_backend import compiled_kernels
from worker.models.onednn_weights import NamedSlot

GUARD = 64
"""Numbers on both sides of what is written."""
SHAPES = [(48, 16), (50, 80), (576, 1536), (1600, 176), (1537, 64)]
"""Rows that fill no claim, of both sizes of claims; inputs of several parts, and of no whole cache line."""


@pytest.fixture
def native(dtype):
    found, why = compiled_kernels(64)
    assert found is not None, why
    if not found.number("many_narrow" if dtype == "bfloat16" else "many_wide"):
        pytest.skip("this processor lacks the instructions: oneDNN's products are used")
    return found


def numbers(rng, shape, *, narrow):
    made = rng.standard_normal(shape, np.float32)
    return (made.view(np.uint32) >> 16).astype(np.uint16) if narrow else made


def slot(array, strides=None):
    """Where a weight lies, as a program knows it."""
    made = NamedSlot("w", array.shape, array.dtype, 0, strides)
    made.address = array.ctypes.data
    return made


def by_few(native, mode, weight, bias, part, src, before):
    """The same, token by token through the kernel for few."""
    rows = len(weight) // 2 if mode in (GATED, GATED_GELU) else len(weight)
    made = np.zeros((rows, src.shape[1]), np.float32) if before is None else before.copy()
    for token in range(src.shape[1]):
        x, y = np.ascontiguousarray(src[:, token : token + 1]), np.ascontiguousarray(made[:, token : token + 1])
        narrow = weight.dtype == np.uint16
        product = FewProduct(native, mode, weight.shape[1], part, x, y, narrow=narrow)
        product.run(1, weight.ctypes.data, bias.ctypes.data if bias is not None else 0)
        made[:, token] = y[:, 0]
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("mode", [SET, ADD, GATED, GATED_GELU, TURNED])
@pytest.mark.parametrize("tokens", [16, 32, 48, 64])
def test_a_token_has_the_bits_it_has_among_few(native, dtype, tokens, mode, token_major):
    narrow = dtype == "bfloat16"
    rng = np.random.default_rng(tokens)
    for rows, columns in SHAPES:
        biased = bool(rng.integers(2))
        weight = numbers(rng, ((2 if mode in (GATED, GATED_GELU) else 1) * rows, columns), narrow=narrow)
        bias = rng.standard_normal(len(weight), np.float32) if biased else None
        src = numbers(rng, (tokens, columns), narrow=narrow).T
        src = src if token_major else np.ascontiguousarray(src)
        before = rng.standard_normal((rows, tokens), np.float32) if mode == ADD else None
        dtype_made = np.dtype(np.uint16 if narrow and mode in (GATED, GATED_GELU) else np.float32)
        memory = np.full(rows * tokens + 2 * GUARD, 7, dtype_made)
        shape = (tokens, rows) if mode == TURNED else (rows, tokens)
        dst = memory[GUARD:-GUARD].reshape(shape)
        if before is not None:
            dst[:] = before
        part = columns if columns < 1024 else 1024
        words = slot(weight), None if bias is None else slot(bias), part, src, dst
        ManyProduct(native, mode, *words, lambda rows: np.full((rows, tokens), np.nan, np.float32))()
        expected = by_few(native, SET if mode == TURNED else mode, weight, bias, part, src, before)
        made = dst.T if mode == TURNED else dst
        if made.dtype == np.uint16:  # rounded where it is stored
            bits = expected.view(np.uint32)
            expected = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        np.testing.assert_array_equal(made, expected, f"{rows} x {columns}, bias {biased}")
        assert (memory[:GUARD] == 7).all()
        assert (memory[-GUARD:] == 7).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_of_a_weights_inputs_is_read_where_it_lies(native, dtype):
    narrow = dtype == "bfloat16"
    rng = np.random.default_rng(0)
    whole, src = numbers(rng, (96, 160), narrow=narrow), numbers(rng, (64, 32), narrow=narrow)
    part = np.ascontiguousarray(whole[:, 32:96])
    made = []
    for weight in (slot(part), slot(whole[:, 32:96], (160, 1))):
        dst = np.zeros((96, 32), np.float32)
        ManyProduct(native, SET, weight, None, 64, src, dst, lambda rows: np.zeros((rows, 32), np.float32))()
        made.append(dst)
    np.testing.assert_array_equal(*made)
    assert made[0].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "fits"), [((48, 16), True), ((47, 16), False), ((48, 24), False)])
def test_other_shapes_are_onednns(native, dtype, shape, fits):
    array = np.zeros(shape, np.uint16 if dtype == "bfloat16" else np.float32)
    assert is_fast(native, slot(array)) is fits


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "products"), [(few_product.MOST, 0), (9, 2), (MOST, 2), (MOST + 1, 0)])
def test_steps_of_a_middle_size_have_them(checkpoint, feeder, backend, native, dtype, tokens, products):
    """products: of a layer; this model's others have too few rows."""
    run = feeder(checkpoint("llama", dtype=dtype).engine(), [list(range(40)), list(range(40))])
    run.step({0: 1, 1: 1})
    run.step({0: min(tokens - 1, 38), 1: max(1, tokens - 38)})
    used = run.engine._backend
    program, _ = used._programs[*used.form(tokens), False]
    assert sum(isinstance(step, ManyProduct) for step in program._steps) == products * used._spec.layers


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_add_what_adapters_change_where_every_part_has_rows_enough(
    native, checkpoint_class, tmp_path, backend, dtype
):
    """o, gate and up, and down of a layer; of q, k and v the last two have 32 rows: adapters are added afterwards."""
    Checkpoint.random(tmp_path / "small", 0)
    backend_of = checkpoint_class(tmp_path / "small", dtype=dtype).engine()._backend
    for tokens in (16, MOST):
        program, _ = backend_of._record(tokens, False, True)
        products = [step for step in program._steps if isinstance(step, ManyProduct)]
        assert sum(step._adapted is not None for step in products) == 3 * backend_of._spec.layers
        assert len(products) == 4 * backend_of._spec.layers


@pytest.mark.parametrize("sum_parts", [1, 2, 4])
def test_a_prompt_is_the_same_in_any_steps_also_where_inputs_are_summed_in_parts(
    native, checkpoint_class, feeder, tmp_path, sum_parts
):
    """A part of what attention made lies in the midst of each token's numbers, where the kernel does not look."""
    Checkpoint.random(tmp_path / "wide", 0, num_attention_heads=8, num_key_value_heads=4)
    model = checkpoint_class(tmp_path / "wide")
    ids = list(range(1, 61))
    made = []
    for steps in ([60], [1] * 8 + [32] + [20]):
        run = feeder(model.engine(deterministic="on", sum_parts=sum_parts), [ids])
        for count in steps:
            run.step({0: count})
        made.append(run.all_logits(0))
    assert np.array_equal(*made)


@pytest.fixture
def dtype():
    return "float32"

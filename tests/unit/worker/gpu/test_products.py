"""Which own kernels there are for a shape."""

import pytest

from worker.gpu.products import Shape, instances, one_row_threads, skinny

SHAPES = [
    Shape("STORE", 4096, 1024, True),
    Shape("ADD", 1024, 2048, False),
    Shape("GATE", 3072, 1024, True),
    Shape("ADD", 1024, 3072, False),
]


def test_own_kernels_are_made_for_widths_that_they_fit():
    fits, odd = Shape("ADD", 1024, 2048, False), Shape("ADD", 576, 1536 + 8, False)
    assert "ONE_ROW(one_ADD_2048, 4, 2, ADD, false)" in instances([fits], 132)
    assert instances([odd], 132) == ""
    assert one_row_threads(odd, 132) == []
    assert one_row_threads(fits, 132) == [128, 256]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 17, 32])
def test_a_skinny_products_blocks_fill_the_device_once(shape, tokens):
    kernel = skinny(shape, tokens, 132)
    assert kernel is not None
    assert 100 < kernel.blocks <= 132
    assert kernel.blocks % kernel.split == 0
    assert kernel.part * kernel.split == shape.k
    assert kernel.most >= tokens
    assert kernel.line in instances([shape], 132)


def test_a_large_skinny_product_has_more_blocks_than_fit_at_once():
    kernel = skinny(Shape("GATE", 18944, 3584, True), 1, 132)
    assert kernel is not None
    assert kernel.rows == 16  # gate's and up's least
    assert kernel.blocks * (kernel.rows // 2) >= 18944


def test_more_rows_and_other_shapes_have_no_skinny_product():
    assert skinny(SHAPES[0], 33, 132) is None
    assert skinny(Shape("ADD", 576, 1536 + 8, False), 1, 132) is None
    assert skinny(Shape("WIDE", 151936, 1024, True), 1, 132) is None

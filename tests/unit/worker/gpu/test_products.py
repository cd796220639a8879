"""Which own kernels there are for a shape, and which way is taken."""

from types import SimpleNamespace

import pytest

from worker.gpu.products import Choices, Shape, instances, one_row_threads, skinny

SHAPES = [
    Shape("STORE", 4096, 1024, True),
    Shape("ADD", 1024, 2048, False),
    Shape("GATE", 3072, 1024, True),
    Shape("ADD", 1024, 3072, False),
]


def test_own_kernels_are_made_for_widths_that_they_fit():
    fits, odd = Shape("ADD", 1024, 2048, False), Shape("ADD", 576, 1536 + 8, False)
    assert "ONE_ROW(one_ADD_2048, 4, 2, ADD, false)" in instances([fits], 132)
    assert instances([odd], 132) == []
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


@pytest.mark.parametrize("tokens", [1, 16, 32])
@pytest.mark.parametrize("changed", [False, True])
def test_columns_that_no_power_of_two_divides_are_shared_by_other_numbers_of_blocks(tokens, changed):
    for shape in (Shape("STORE", 960, 576, True), Shape("ADD", 576, 576, False), Shape("GATE", 1536, 576, True)):
        kernel = skinny(shape, tokens, 132, changed=changed)
        assert kernel is not None
        assert kernel.split == (3 if tokens > 16 else 1)
        assert kernel.name.endswith("_changed") == changed


def test_a_product_that_adds_adapters_has_room_for_them():
    """Where the operands alone fill a block's memory, there is none with adapters, or one of fewer columns."""
    for rows in (1, 8, 16, 32):
        for k in range(64, 20000, 64):
            plain, changed = (skinny(Shape("GATE", 9216, k, True), rows, 132, changed=c) for c in (False, True))
            assert plain is not None or changed is None
            assert changed is None or changed.shared + 80 * changed.most < 227 << 10


def test_a_large_skinny_product_has_more_blocks_than_fit_at_once():
    kernel = skinny(Shape("GATE", 18944, 3584, True), 1, 132)
    assert kernel is not None
    assert kernel.rows == 16  # gate's and up's least
    assert kernel.blocks * (kernel.rows // 2) >= 18944


def test_more_rows_and_other_shapes_have_no_skinny_product():
    assert skinny(SHAPES[0], 33, 132) is None
    assert skinny(Shape("ADD", 576, 1536 + 8, False), 1, 132) is None
    assert skinny(Shape("WIDE", 151936, 1024, True), 1, 132) is None


def test_gate_and_up_apart_go_the_way_of_both_together_where_it_is_the_librarys(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = SimpleNamespace(version=1)
    choices = Choices(SimpleNamespace(name="a device", version=1), library, 132, "model")
    joined, apart = Shape("GATE", 3072, 1024, True), Shape("STORE", 6144, 1024, True)
    choices._ways |= {choices._key(joined, 64): "lt:3", choices._key(joined, 16): "skinny"}
    assert [choices.way(apart, rows) for rows in (64, 16, 8)] == ["lt:3", "lt:0", "lt:0"]
    assert choices.way(joined, 64) == "lt:3"
    choices._ways[choices._key(apart, 64)] = "lt:1"
    assert choices.way(apart, 64) == "lt:1"

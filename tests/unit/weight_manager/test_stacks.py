"""What trainers hold as one tensor and is served as several: qkv_proj, gate_up_proj, a layer's experts."""

import numpy as np
import pytest

from rollout_client.copying import move, slot_view, source_view
from rollout_client.protocol import Part
from tests.family_cases import FAMILIES, family_cases, taken_apart
from weight_manager.families import manifest_for
from weight_manager.layout import Layout, make_layout, rank_views
from weight_manager.plan import PlanError, place, prove


def pushed(layout: Layout, ranks: list[list[tuple[Part, np.ndarray]]]) -> bytes:
    """The slot after these trainer ranks have sent what they hold."""
    prove([[part for part, _ in held] for held in ranks], layout)
    slot = bytearray(layout.slot_bytes)
    for held in ranks:
        for copy in place([part for part, _ in held], layout):
            source = source_view(held[copy.part][1].reshape(-1), copy)
            move(source, "float32", slot_view(memoryview(slot), copy), "float32")
    return bytes(slot)


def whole(tensors: dict[str, np.ndarray]) -> list[tuple[Part, np.ndarray]]:
    return [(Part(name, "float32", value.shape), value) for name, value in tensors.items()]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_torch_modules_tensors_can_be_pushed(family: str, tp: int) -> None:
    """Whole, cut over two trainer ranks along any axis, as flat ranges, or apart: the same bytes are served."""
    for case in family_cases(family):
        layout = make_layout(manifest_for(case.config, "float32"), tp)
        expected = pushed(layout, [whole(taken_apart(layout, case.tensors))])
        assert pushed(layout, [whole(case.tensors)]) == expected
        for axis in range(2):
            halves: list[list[tuple[Part, np.ndarray]]] = [[], []]
            for name, value in case.tensors.items():
                along = min(axis, value.ndim - 1)
                middle = value.shape[along] // 3
                for half, (low, high) in zip(halves, ((0, middle), (middle, value.shape[along])), strict=True):
                    offset = [0] * value.ndim
                    offset[along] = low
                    box = np.ascontiguousarray(value.take(range(low, high), axis=along))
                    half.append((Part(name, "float32", value.shape, tuple(offset), box.shape), box))
            assert pushed(layout, halves) == expected
        ranges: list[list[tuple[Part, np.ndarray]]] = [[], []]
        for name, value in case.tensors.items():
            cut = value.size * 2 // 5 + 1
            for held, (low, high) in zip(ranges, ((0, cut), (cut, value.size)), strict=True):
                part = Part(name, "float32", value.shape, flat=(low, high))
                held.append((part, value.reshape(-1)[low:high]))
        assert pushed(layout, ranges) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_what_save_pretrained_writes_is_all_that_is_served(family: str) -> None:
    for case in family_cases(family):
        parts = [Part(name, "float32", shape) for name, shape in case.stored.items()]
        prove([parts], make_layout(manifest_for(case.config, "float32"), 1))


def test_a_stack_of_a_family_that_has_none_is_unknown() -> None:
    """Others stack q, k and v by KV head, in the same shape."""
    case = family_cases("llama")[0]
    layout = make_layout(manifest_for(case.config, "float32"), 1)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    rows = sum(case.module[f"model.layers.0.self_attn.{m}_proj.weight"][0] for m in "qkv")
    parts = [Part(n, "float32", shape) for n, shape in case.module.items() if "layers.0.self_attn" not in n]
    stack = Part(name, "float32", (rows, case.config["hidden_size"]))
    assert _refused([*parts, stack], layout)[:2] == ("unknown_tensor", name)


def _refused(case_parts: list[Part], layout: Layout) -> tuple[str, str, str]:
    with pytest.raises(PlanError) as refused:
        prove([case_parts], layout)
    first = refused.value.problems[0]
    return first.code, first.tensor, first.detail


def test_a_stack_and_a_member_of_it_are_sent_twice() -> None:
    case = family_cases("phi3")[0]
    layout = make_layout(manifest_for(case.config, "float32"), 1)
    views = rank_views(layout, 0, bytearray(layout.slot_bytes))
    name = "model.layers.0.self_attn.k_proj.weight"
    parts = [Part(n, "float32", shape) for n, shape in case.module.items()]
    code, tensor, detail = _refused([*parts, Part(name, "float32", views[name].shape)], layout)
    assert (code, tensor) == ("duplicate_tensor", name)
    assert "also sent as model.layers.0.self_attn.qkv_proj.weight" in detail
    assert f"both hold {name}" in detail


def test_what_lacks_of_a_stack_is_named_as_it_is_served() -> None:
    case = family_cases("phi3")[0]
    layout = make_layout(manifest_for(case.config, "float32"), 1)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    rows, columns = case.module[name]
    parts = [Part(n, "float32", shape) for n, shape in case.module.items() if n != name]
    half = Part(name, "float32", (rows, columns), (0, 0), (rows // 2, columns))
    code, tensor, _ = _refused([*parts, half], layout)
    assert (code, tensor) == ("missing_tensor", "model.layers.0.mlp.up_proj.weight")
    code, tensor, detail = _refused([*parts, Part(name, "float32", (rows + 2, columns))], layout)
    assert (code, tensor) == ("shape_mismatch", name)
    assert f"({rows}, {columns}) is served" in detail

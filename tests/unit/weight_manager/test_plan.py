import gc
import random
import time
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_client.copying import move, slot_view, source_view
from rollout_client.protocol import Part
from weight_manager.families import manifest_for
from weight_manager.layout import Manifest, Parameter, make_layout, rank_views
from weight_manager.plan import PlanError, Planned, Problem, place, prove

MANIFEST = Manifest(
    "M",
    "float32",
    (
        Parameter("q", (12, 5), split=0, heads=2, group=3, fused="qkv"),
        Parameter("k", (4, 5), split=0, heads=2, fused="qkv"),
        Parameter("v", (4, 5), split=0, heads=2, fused="qkv"),
        Parameter("o", (5, 12), split=1, heads=2, group=3),
        Parameter("conv", (3, 4, 5)),
        Parameter("embed", (7, 5), split=0, even=True, aliases=("head",)),
        Parameter("norm", (5,)),
    ),
)
TENSORS = {
    p.name: np.random.default_rng(i).standard_normal(p.shape, dtype=np.float32)
    for i, p in enumerate(MANIFEST.parameters)
}


@st.composite
def cut(draw, shape):
    """A tensor cut into boxes by planes and into flat ranges within boxes of one leading slab: any exact tiling."""
    if draw(st.booleans()):
        stops = sorted(draw(st.sets(st.integers(1, prod(shape)), max_size=4)) | {prod(shape)})
        return [("flat", (a, b)) for a, b in zip([0, *stops], stops, strict=False)]
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        low, high = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        if high[axis] - low[axis] < 2:
            boxes.append((low, high))
            continue
        at = draw(st.integers(low[axis] + 1, high[axis] - 1))
        boxes.append((low, (*high[:axis], at, *high[axis + 1 :])))
        boxes.append(((*low[:axis], at, *low[axis + 1 :]), high))
    return [("box", box) for box in boxes]


def part_and_bytes(name, shape, kind, where):
    tensor = TENSORS["embed" if name == "head" else name]
    if kind == "flat":
        return Part(name, "float32", shape, flat=where), tensor.reshape(-1)[where[0] : where[1]]
    low, high = where
    box = tensor[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
    if box.shape == shape:
        return Part(name, "float32", shape), box
    return Part(name, "float32", shape, low, box.shape), box


@st.composite
def pushes(draw):
    """All tensors, cut up, dealt to a few trainer ranks in any order. -> ranks of [(part, data)]."""
    pieces = []
    for p in MANIFEST.parameters:
        name = draw(st.sampled_from([p.name, *p.aliases]))
        pieces += [part_and_bytes(name, p.shape, *piece) for piece in draw(cut(p.shape))]
    seed, world = draw(st.integers(0, 1000)), draw(st.integers(1, 3))
    random.Random(seed).shuffle(pieces)
    return [pieces[rank::world] for rank in range(world)]


@settings(max_examples=200)
@given(pushes(), st.sampled_from([1, 2, 4, 6]))
def test_any_exact_tiling_lands_where_the_ranks_read_it(ranks, tp):
    layout = make_layout(MANIFEST, tp)
    slot, expected = bytearray(b"\xaa" * layout.slot_bytes), bytearray(b"\xaa" * layout.slot_bytes)
    written = np.zeros(layout.slot_bytes // 4, int)
    assert prove([[part for part, _ in rank] for rank in ranks], layout) == ()
    for rank in ranks:
        for copy in place([part for part, _ in rank], layout):
            flat = np.ascontiguousarray(rank[copy.part][1]).reshape(-1)
            move(source_view(flat, copy), "float32", slot_view(memoryview(slot), copy), "float32")
            counts = np.lib.stride_tricks.as_strided(
                written[copy.dst_offset :], copy.shape, tuple(8 * s for s in copy.dst_strides)
            )
            counts += 1
    for r in layout.regions:
        box = tuple(slice(a, a + n) for a, n in zip(r.start, r.shape, strict=True))
        flat = TENSORS[r.name][box].reshape(-1)
        expected[r.offset : r.offset + flat.nbytes] = flat.tobytes()
        assert (written[r.offset // 4 : r.offset // 4 + flat.size] == 1).all()
    assert slot == expected
    assert written.sum() == sum(prod(r.shape) for r in layout.regions)
    for rank in range(tp):
        np.testing.assert_array_equal(rank_views(layout, rank, slot)["norm"], TENSORS["norm"])


def elements(part):
    if part.flat is not None:
        return set(range(*part.flat))
    index = np.arange(prod(part.shape)).reshape(part.shape)
    if part.local_shape:
        index = index[tuple(slice(a, a + n) for a, n in zip(part.offset, part.local_shape, strict=True))]
    return set(index.reshape(-1).tolist())


@settings(max_examples=200)
@given(pushes(), st.data())
def test_the_proof_agrees_with_counting_elements(ranks, data):
    """Drop, repeat and move pieces at random: brute force says what must be refused, and which tensors."""
    parts = [part for rank in ranks for part, _ in rank]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(parts) - 1))
        change = data.draw(st.sampled_from(["drop", "repeat", "grow"]))
        part = parts[at]
        if change == "drop" and len(parts) > 1:
            del parts[at]
        elif change == "repeat":
            parts.append(part)
        elif change == "grow" and part.flat is not None and part.flat[1] < prod(part.shape):
            parts[at] = Part(part.name, part.dtype, part.shape, flat=(part.flat[0], part.flat[1] + 1))
    missing, twice = set(), set()
    for p in MANIFEST.parameters:
        count = np.zeros(prod(p.shape), int)
        for part in parts:
            if part.name in (p.name, *p.aliases):
                count[list(elements(part))] += 1
        if (count == 0).any():
            missing.add(p.name)
        if (count > 1).any():
            twice.add(p.name)
    try:
        prove([parts[::2], parts[1::2]], make_layout(MANIFEST, 1))
    except PlanError as error:
        named = {"embed" if q.tensor == "head" else q.tensor: set() for q in error.problems}
        for q in error.problems:
            named["embed" if q.tensor == "head" else q.tensor].add(q.code == "missing_tensor")
        assert {n for n, kinds in named.items() if True in kinds} == missing
        assert {n for n, kinds in named.items() if False in kinds} == twice
    else:
        assert not missing
        assert not twice


def whole():
    return {p.name: Part(p.name, "float32", p.shape) for p in MANIFEST.parameters}


LAYOUT = make_layout(MANIFEST, 2)


@pytest.mark.parametrize(
    ("change", "code", "tensor", "said"),
    [
        ({"norm": None}, "missing_tensor", "norm", r"norm: was not sent, shape \(5,\)"),
        ({"nrom": Part("nrom", "float32", (5,))}, "unknown_tensor", "nrom", "not served"),
        ({"q": Part("q", "float32", (5, 12))}, "shape_mismatch", "q", "its transpose"),
        ({"q": Part("q", "float32", (12, 6))}, "shape_mismatch", "q", r"\(12, 6\) was sent, \(12, 5\) is served"),
        ({"q": Part("q", "int64", (12, 5))}, "dtype_mismatch", "q", "int64 cannot be sent"),
        ({"head": Part("head", "float32", (7, 5))}, "duplicate_tensor", "head", "also sent as embed, they are tied"),
        ({"q2": Part("q", "float32", (12, 5))}, "duplicate_tensor", "q", "sent 2 times"),
        (
            {"q2": Part("q", "float32", (12, 5), flat=(3, 9))},
            "overlapping_tensor",
            "q",
            r"more than once at \[0:1, 3:5\]",
        ),
        (
            {"q": Part("q", "float32", (12, 5), (0, 0), (12, 4))},
            "missing_tensor",
            "q",
            r"nothing was sent at \[0:\d+, 4:5\]",
        ),
        ({"q": Part("q", "float32", (12, 5), (0, 2), (12, 4))}, "shape_mismatch", "q", "does not fit"),
        ({"q": Part("q", "float32", (12, 5), (-1, 0), (12, 5))}, "shape_mismatch", "q", "does not fit"),
        ({"q": Part("q", "float32", (12, 5), (0,), (12,))}, "shape_mismatch", "q", "does not fit"),
        ({"q": Part("q", "float32", (12, 5), (0, 0))}, "shape_mismatch", "q", "does not fit"),
        ({"q": Part("q", "float32", (12, 5), flat=(0, 61))}, "shape_mismatch", "q", "does not fit 60 elements"),
        ({"q": Part("q", "float32", (12, 5), flat=(9, 3))}, "shape_mismatch", "q", "does not fit"),
        ({"q": Part("q", "float32", (12, 5), (0, 0), (1, 1), (0, 1))}, "shape_mismatch", "q", "does not fit"),
    ],
)
def test_what_is_wrong_is_refused_by_name(change, code, tensor, said):
    parts = [part for part in (whole() | change).values() if part is not None]
    with pytest.raises(PlanError, match=said) as refused:
        prove([parts], LAYOUT)
    assert (refused.value.code, refused.value.tensors) == (code, [tensor])
    if code != "missing_tensor":
        with pytest.raises(PlanError, match=said):
            place(parts, LAYOUT)


def test_everything_that_is_wrong_is_listed_at_once():
    parts = [p for n, p in whole().items() if n not in ("k", "conv")]
    parts += [Part("x", "float32", (1,)), Part("v", "float32", (4, 5)), Part("norm", "float32", (6,))]
    with pytest.raises(PlanError) as refused:
        prove([parts], LAYOUT)
    assert sorted((q.code, q.tensor) for q in refused.value.problems) == [
        ("duplicate_tensor", "v"),
        ("missing_tensor", "conv"),
        ("missing_tensor", "k"),
        ("shape_mismatch", "norm"),
        ("unknown_tensor", "x"),
    ]
    many = [Part(f"x{i}", "float32", (1,)) for i in range(100)]
    with pytest.raises(PlanError, match="and 87 more") as refused:
        prove([many], LAYOUT)
    assert len(refused.value.tensors) == 107


def test_a_partial_push_names_what_it_leaves_out_but_may_not_leave_holes():
    names = [p.name for p in MANIFEST.parameters if p.name not in ("q", "embed")]
    parts = [Part("q", "float32", (12, 5)), Part("head", "float32", (7, 5))]
    assert prove([parts], LAYOUT, partial=True) == tuple(names)
    with pytest.raises(PlanError, match="nothing was sent at"):
        prove([[Part("q", "float32", (12, 5), flat=(0, 59))]], LAYOUT, partial=True)


def test_a_rank_that_holds_nothing_of_a_tensor_may_say_so():
    empty = [Part("q", "float32", (12, 5), (12, 0), (0, 5)), Part("k", "float32", (4, 5), flat=(7, 7))]
    assert prove([list(whole().values()), empty], LAYOUT) == ()
    assert place(empty, LAYOUT) == []


@pytest.mark.parametrize("sent", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_any_float_may_be_sent_for_any_served_dtype(sent, served):
    layout = make_layout(Manifest("M", served, MANIFEST.parameters), 1)
    copies = place([Part(p.name, sent, p.shape) for p in MANIFEST.parameters], layout)
    assert {copy.dst_dtype for copy in copies} == {served}


def test_whole_tensors_at_tp_1_are_one_flat_copy_each():
    for copy in place(list(whole().values()), make_layout(MANIFEST, 1)):
        assert (len(copy.shape), copy.src_offset, copy.src_strides) == (1, 0, (1,))


@pytest.fixture
def own_garbage_only():
    """Python's collector does not look through what tests before have left: it takes as long as the planning."""
    gc.collect()
    gc.freeze()


def test_planning_is_fast_enough_to_be_forgotten(own_garbage_only):
    """10k tensors, each from 4 trainer ranks: generous bounds, for a machine that is busy."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_hidden_layers": 900,
    }
    layout = make_layout(manifest_for(config, "bfloat16"), 2)
    parameters = layout.manifest.parameters
    ranks = [
        [
            Part(
                p.name,
                "float32",
                p.shape,
                (p.shape[0] // 4 * r, *(0 for _ in p.shape[1:])),
                (p.shape[0] // 4, *p.shape[1:]),
            )
            for p in parameters
        ]
        for r in range(4)
    ]
    began = time.process_time()
    prove(ranks, layout)
    place(ranks[0], layout)
    assert time.process_time() - began < 3
    began = time.process_time()
    prove([[Part(p.name, "float32", p.shape) for p in parameters]], layout)
    assert time.process_time() - began < 0.5


def test_a_plan_is_made_once_for_pushes_of_the_same_tensors():
    planned, made, layout = Planned(), [], make_layout(MANIFEST, 2)

    def plan(parts, *, fails=False):
        def make():
            made.append(parts)
            if fails:
                raise PlanError([Problem("unknown_tensor", "x", "is not served")])
            return place(parts, layout), ()

        return planned.plan(([parts], 1, False), make)[0]

    parts = [Part(p.name, "float32", p.shape) for p in layout.manifest.parameters]
    first = plan(parts)
    assert plan([Part(p.name, "float32", p.shape) for p in layout.manifest.parameters]) == first
    assert len(made) == 1
    others = [Part(p.name, "bfloat16", p.shape) for p in layout.manifest.parameters]
    with pytest.raises(PlanError):
        plan(others, fails=True)
    assert plan(others) == place(others, layout)
    assert plan(parts) == first
    assert len(made) == 4

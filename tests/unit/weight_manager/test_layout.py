from math import prod

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_client import copying
from weight_manager.layout import (
    ALIGN,
    Manifest,
    Parameter,
    make_layout,
    piece,
    rank_views,
    region_digests,
    version_digest,
)


@st.composite
def attention(draw):
    """Fused q, k, v and the o that belongs to them, as a family would list them."""
    kv, group, dim, hidden = (draw(st.integers(1, n)) for n in (4, 3, 3, 4))
    common = {"split": 0, "heads": kv, "fused": "qkv"}
    return [
        Parameter("q", (kv * group * dim, hidden), group=group, **common),
        Parameter("k", (kv * dim, hidden), **common),
        Parameter("v", (kv * dim, hidden), **common),
        Parameter("o", (hidden, kv * group * dim), split=1, heads=kv, group=group),
    ]


@st.composite
def manifests(draw):
    parameters = draw(attention())
    size, hidden, vocab = (draw(st.integers(1, n)) for n in (9, 4, 9))
    parameters += [
        Parameter("gate", (size, hidden), split=0, fused="gate_up"),
        Parameter("up", (size, hidden), split=0, fused="gate_up"),
        Parameter("down", (hidden, size), split=1),
        Parameter("embed", (vocab, hidden), split=0, even=True, aliases=("head",)),
        Parameter("norm", (hidden,)),
    ]
    return Manifest("M", draw(st.sampled_from(["float32", "bfloat16"])), tuple(parameters))


def fill(layout):
    """A slot in which every element says which one it is, and the tensors it came from."""
    dtype = np.dtype("<u2" if layout.manifest.dtype == "bfloat16" else "<f4")
    slot = bytearray(layout.slot_bytes)
    flat = np.frombuffer(slot, dtype)
    tensors, at = {}, 1
    for p in layout.manifest.parameters:
        tensors[p.name] = np.arange(at, at + prod(p.shape)).astype(dtype).reshape(p.shape)
        at += prod(p.shape)
    for r in layout.regions:
        box = tuple(slice(a, a + n) for a, n in zip(r.start, r.shape, strict=True))
        start = r.offset // dtype.itemsize
        assert not flat[start : start + prod(r.shape)].any(), "two regions share bytes"
        flat[start : start + prod(r.shape)] = tensors[r.name][box].reshape(-1)
    return slot, tensors


def whole_or_refused(manifest, tp):
    q, k = manifest.parameters[:2]
    shared = tp > k.heads and (tp % k.heads or tp // k.heads > q.group)
    if shared or tp > manifest.parameters[4].shape[0]:
        with pytest.raises(ValueError, match=r"too short|not a multiple"):
            make_layout(manifest, tp)
        return None
    return make_layout(manifest, tp)


@settings(max_examples=150)
@given(manifests(), st.integers(1, 8))
def test_ranks_read_what_tensor_parallelism_needs(manifest, tp):
    layout = whole_or_refused(manifest, tp)
    if layout is None:
        return
    slot, tensors = fill(layout)
    views = [rank_views(layout, rank, slot) for rank in range(tp)]
    for view in views:
        assert {"q", "k", "v", "o", "gate", "up", "down", "embed", "norm", "qkv", "gate_up"} == set(view)
        for name, array in view.items():
            assert array.flags.c_contiguous, name
            assert not array.flags.writeable, name
        np.testing.assert_array_equal(view["qkv"], np.concatenate([view["q"], view["k"], view["v"]]))
        np.testing.assert_array_equal(view["gate_up"], np.concatenate([view["gate"], view["up"]]))
        np.testing.assert_array_equal(view["norm"], tensors["norm"])
    for name, axis in (("q", 0), ("o", 1), ("gate", 0), ("up", 0), ("down", 1)):
        np.testing.assert_array_equal(np.concatenate([v[name] for v in views], axis=axis), tensors[name])
    if tensors["embed"].shape[0] % tp:
        assert all((v["embed"] == tensors["embed"]).all() for v in views)
    else:
        np.testing.assert_array_equal(np.concatenate([v["embed"] for v in views]), tensors["embed"])


@settings(max_examples=150)
@given(manifests(), st.integers(1, 8))
def test_query_heads_stay_with_the_kv_head_they_read(manifest, tp):
    """q row r belongs to query head r // dim, which reads KV head (r // dim) // group; and so do o's columns."""
    layout = whole_or_refused(manifest, tp)
    if layout is None:
        return
    q, k = manifest.parameters[:2]
    dim = k.shape[0] // k.heads
    for rank in range(tp):
        (q_start, *_), (q_rows, *_) = piece(q, tp, rank)
        (k_start, *_), (k_rows, *_) = piece(k, tp, rank)
        assert q_start % dim == q_rows % dim == k_start % dim == k_rows % dim == 0
        kv_read = {row // dim // q.group for row in range(q_start, q_start + q_rows)}
        assert kv_read == set(range(k_start // dim, (k_start + k_rows) // dim))
        assert piece(manifest.parameters[3], tp, rank) == ((0, q_start), (manifest.parameters[3].shape[0], q_rows))


@given(manifests(), st.integers(1, 4))
def test_blocks_start_on_cache_lines_and_slots_end_on_pages(manifest, tp):
    layout = whole_or_refused(manifest, tp)
    if layout is None:
        return
    firsts = {"q", "o", "gate", "down", "embed", "norm"}
    assert all(r.offset % ALIGN == 0 for r in layout.regions if r.name in firsts)
    assert layout.slot_bytes % 4096 == 0


def test_heads_split_unevenly_in_whole_units():
    """SmolLM2: 9 query heads, 3 KV heads; two ranks take 1 and 2 KV heads."""
    q = Parameter("q", (9 * 64, 8), split=0, heads=3, group=3)
    k = Parameter("k", (3 * 64, 8), split=0, heads=3)
    assert [piece(k, 2, r)[0][0] for r in (0, 1)] == [0, 64]
    assert [piece(q, 2, r)[1][0] for r in (0, 1)] == [3 * 64, 6 * 64]


def test_digest_depends_on_everything_and_on_nothing_else():
    base = Manifest("M", "float32", (Parameter("a", (4, 4), split=0), Parameter("b", (4,))))
    same = Manifest("M", "float32", (Parameter("a", (4, 4), split=0), Parameter("b", (4,))))
    others = [
        Manifest("M", "bfloat16", base.parameters),
        Manifest("M", "float32", base.parameters[::-1]),
        Manifest("M", "float32", (Parameter("a", (4, 4), split=1), base.parameters[1])),
    ]
    digests = [make_layout(m, 2).digest for m in (base, *others)] + [make_layout(base, 1).digest]
    assert make_layout(same, 2).digest == digests[0]
    assert len(set(digests)) == len(digests)


def test_region_and_version_digests():
    layout = make_layout(Manifest("M", "float32", (Parameter("a", (4, 4), split=0), Parameter("b", (4,)))), 2)
    slot, tensors = fill(layout)
    digests = region_digests(layout, slot)
    assert digests == [
        xxhash.xxh3_64_intdigest(x.tobytes()) for x in (tensors["a"][:2], tensors["a"][2:], tensors["b"])
    ]
    before = version_digest(layout, digests)
    slot[layout.regions[1].offset + 3] ^= 1
    assert version_digest(layout, region_digests(layout, slot)) != before


@pytest.mark.parametrize(
    ("parameters", "tp", "said"),
    [
        ([Parameter("a", (2, 4)), Parameter("a", (2, 4))], 1, "a is in the manifest twice"),
        ([Parameter("a", (2, 4), aliases=("b",)), Parameter("b", (2, 4))], 1, "b is in the manifest twice"),
        ([Parameter("a", ())], 1, "a has no elements"),
        ([Parameter("a", (2, 4), fused="f"), Parameter("b", (2, 5), fused="f")], 1, "f: members differ"),
        ([Parameter("a", (2, 4), split=0, fused="f"), Parameter("b", (2, 4), fused="f")], 2, "f: some members"),
        ([Parameter("a", (3, 4), split=0)], 4, "a: axis 0 of .* too short for 4 ranks"),
        ([Parameter("a", (6, 4), split=0, heads=2)], 3, "a: tp 3 is above the 2 KV heads"),
        ([Parameter("a", (5, 4), split=0, heads=2)], 2, "a: axis 0 of .* 2 equal heads"),
        ([Parameter("a", (2, 4))], 0, "tp must be at least 1"),
    ],
)
def test_what_cannot_be_laid_out_is_named(parameters, tp, said):
    with pytest.raises(ValueError, match=said):
        make_layout(Manifest("M", "float32", tuple(parameters)), tp)


def test_regions_are_hashed_alike_in_one_call_and_one_by_one(monkeypatch):
    """Also one of several pieces (digest.py): the first is 17 MB."""
    shapes = ("a", (17 << 18, 1)), ("b", (5, 3)), ("c", (1, 1))
    layout = make_layout(Manifest("M", "float32", tuple(Parameter(*named) for named in shapes)), 1)
    slot = np.random.default_rng(0).bytes(layout.slot_bytes)
    assert copying.prepare(60.0) is not None
    at_once = region_digests(layout, memoryview(slot))
    monkeypatch.setattr(copying, "ready", lambda: None)
    assert at_once == region_digests(layout, memoryview(slot))
    assert len(set(at_once)) == 3

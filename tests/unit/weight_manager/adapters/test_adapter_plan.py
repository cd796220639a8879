import numpy as np
import pytest

from rollout_client.copying import WIRE_DTYPE, move, slot_view, source_view
from rollout_client.peft import AdapterConfig
from rollout_client.protocol import AdapterPush, Part
from weight_manager.adapters.lines import Lines
from weight_manager.adapters.plan import AdapterPlanner, adapter_layout, in_trainers_terms
from weight_manager.config import StoreConfig
from weight_manager.errors import PushRefused
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, rank_views
from weight_manager.plan import PlanError, place, prove

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MANIFEST = manifest_for(CONFIG, "float32")
SHAPES = {p.name.removesuffix(".weight"): p.shape for p in MANIFEST.parameters if p.name.endswith("_proj.weight")}


def base(tp=1):
    return make_layout(MANIFEST, tp)


def tensors(modules, rank=4, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    found = {}
    for module in modules:
        rows, columns = SHAPES[module]
        found[f"{module}.lora_A"] = rng.standard_normal((rank, columns)).astype(dtype)
        found[f"{module}.lora_B"] = rng.standard_normal((rows, rank)).astype(dtype)
    return found


def parts_of(named):
    return [Part(name, array.dtype.name, array.shape) for name, array in named.items()]


def staged(named, config, tp=1):
    """What each rank sees of an adapter that was sent."""
    planner, parts = AdapterPlanner(base(tp)), parts_of(named)
    shape = planner.shape(config, parts, 64)
    layout = adapter_layout(shape, planner.base)
    pieces = planner.pieces(parts)
    prove([[piece.part for piece in pieces]], layout)
    copies = in_trainers_terms(place([piece.part for piece in pieces], layout), pieces)
    slot = bytearray(layout.slot_bytes)
    arrays = list(named.values())
    for copy in copies:
        flat = np.ascontiguousarray(arrays[copy.part]).reshape(-1)
        move(source_view(flat, copy), parts[copy.part].dtype, slot_view(memoryview(slot), copy), copy.dst_dtype)
    return shape, [rank_views(layout, rank, slot) for rank in range(tp)]


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_reads_what_its_piece_of_the_weight_needs(tp):
    named = tensors(SHAPES)
    shape, ranks = staged(named, AdapterConfig(4, 8, target_modules=ALL), tp)
    assert [m.name for m in shape.modules] == list(SHAPES)
    rng = np.random.default_rng(9)
    for module, (_, columns) in SHAPES.items():
        x = rng.standard_normal(columns).astype(np.float32)
        wanted = named[f"{module}.lora_B"] @ (named[f"{module}.lora_A"] @ x)
        by_columns = module.endswith(("o_proj", "down_proj"))
        outs = []
        start = 0
        for views in ranks:
            a, b = views[f"{module}.lora_A"], views[f"{module}.lora_B"]
            mine = x[start : start + a.shape[1]] if by_columns else x
            start += a.shape[1]
            outs.append(b @ (a @ mine))
        np.testing.assert_allclose(sum(outs) if by_columns else np.concatenate(outs), wanted, rtol=1e-4, atol=1e-5)


def test_a_fused_groups_a_is_one_matrix_when_all_members_have_one():
    named = tensors(SHAPES)
    _, (views,) = staged(named, AdapterConfig(4, 8, target_modules=ALL))
    prefix = "model.layers.1.self_attn"
    wanted = np.concatenate([named[f"{prefix}.{m}_proj.lora_A"] for m in "qkv"])
    np.testing.assert_array_equal(views[f"{prefix}.qkv_proj.lora_A"], wanted)
    some = [m for m in SHAPES if m.endswith(("q_proj", "v_proj"))]
    _, (views,) = staged(tensors(some), AdapterConfig(4, 8, target_modules=["q_proj", "v_proj"]))
    assert f"{prefix}.qkv_proj.lora_A" not in views


def test_a_module_that_is_fused_in_the_trainer_is_divided_by_rows():
    rng = np.random.default_rng(3)
    named = {}
    for layer in range(2):
        for group, members in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            prefix, _, _ = f"model.layers.{layer}.{group}".rpartition(".")
            shapes = [SHAPES[f"{prefix}.{m}_proj"] for m in members]
            named[f"model.layers.{layer}.{group}.lora_A"] = rng.standard_normal((4, 32), dtype=np.float32)
            rows = sum(s[0] for s in shapes)
            named[f"model.layers.{layer}.{group}.lora_B"] = rng.standard_normal((rows, 4), dtype=np.float32)
    shape, (views,) = staged(named, AdapterConfig(4, 8, target_modules=["qkv_proj", "gate_up_proj"]))
    assert len(shape.modules) == 10
    b, a = (named[f"model.layers.0.self_attn.qkv_proj.lora_{x}"] for x in "BA")
    for member, rows in (("q", slice(0, 32)), ("k", slice(32, 48)), ("v", slice(48, 64))):
        np.testing.assert_array_equal(views[f"model.layers.0.self_attn.{member}_proj.lora_A"], a)
        np.testing.assert_array_equal(views[f"model.layers.0.self_attn.{member}_proj.lora_B"], b[rows])


def test_names_with_and_without_the_models_own_prefix_are_the_same_module():
    some = [m for m in SHAPES if m.endswith("q_proj")]
    for prefix in ("", "model.model."):
        named = {prefix + name.removeprefix("model."): value for name, value in tensors(some).items()}
        shape, _ = staged(named, AdapterConfig(4, 8, target_modules=["q_proj"]))
        assert [m.name for m in shape.modules] == some


def test_all_that_is_wrong_is_listed():
    named = tensors([m for m in SHAPES if "layers.0" in m])
    named["model.embed_tokens.lora_A"] = np.zeros((4, 64), np.float32)
    named["model.layers.9.self_attn.q_proj.lora_A"] = np.zeros((4, 32), np.float32)
    named["model.layers.0.input_layernorm.weight"] = np.zeros(32, np.float32)
    planner = AdapterPlanner(base())
    with pytest.raises(PlanError) as refused:
        planner.shape(AdapterConfig(128, 8, rank_pattern={"q_proj": 4}), parts_of(named), 64)
    text = str(refused.value)
    assert "only the projections of attention and MLP" in text
    assert "layers.9.self_attn.q_proj, which this model does not have" in text
    assert "neither a lora_A nor a lora_B" in text
    assert "rank 128 is over the largest that is served, 64" in text
    assert {p.code for p in refused.value.problems} == {"unknown_tensor", "too_large"}


@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.q_proj.lora_B"), "missing_tensor", "was not sent"),
        (
            lambda t: [t.pop(f"model.layers.1.self_attn.q_proj.lora_{x}") for x in "AB"],
            "missing_tensor",
            "was not sent",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.lora_A": np.zeros((8, 32), np.float32)}),
            "shape_mismatch",
            "(4, 32) is served",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.lora_B": np.zeros((32, 4), np.int32)}),
            "dtype_mismatch",
            "int32",
        ),
        (
            lambda t: t.update({"layers.1.self_attn.q_proj.lora_B": np.zeros((32, 4), np.float32)}),
            "duplicate_tensor",
            "too",
        ),
    ],
)
def test_an_adapter_is_whole_or_refused(spoil, code, says):
    named = tensors([m for m in SHAPES if m.endswith("q_proj")])
    spoil(named)
    with pytest.raises(PlanError) as refused:
        staged(named, AdapterConfig(4, 8, target_modules=["q_proj"]))
    assert code in {p.code for p in refused.value.problems}
    assert says in str(refused.value)


def test_numbers_are_kept_as_wide_as_they_came():
    some = [m for m in SHAPES if m.endswith("v_proj")]
    half = tensors(some, dtype=np.float16)
    shape, (views,) = staged(half, AdapterConfig(4, 8))
    assert shape.dtype == "float32"
    np.testing.assert_array_equal(views[f"{some[0]}.lora_A"], half[f"{some[0]}.lora_A"].astype(np.float32))
    parts = [Part(p.name, "bfloat16", p.shape) for p in parts_of(half)]
    assert AdapterPlanner(base()).shape(AdapterConfig(4, 8), parts, 64).dtype == "bfloat16"
    assert WIRE_DTYPE["bfloat16"].itemsize == 2


def test_the_layout_names_ranks_and_scales_too():
    planner, parts = AdapterPlanner(base()), parts_of(tensors([m for m in SHAPES if m.endswith("v_proj")]))
    digests = {
        adapter_layout(planner.shape(config, parts, 64), planner.base).digest
        for config in (AdapterConfig(4, 8), AdapterConfig(4, 12), AdapterConfig(4, 8, use_rslora=True))
    }
    assert len(digests) == 3


def test_a_slice_of_a_fused_module_is_refused():
    part = Part("model.layers.0.self_attn.qkv_proj.lora_B", "float32", (64, 4), (0, 0), (32, 4))
    with pytest.raises(PlanError, match="cannot be divided"):
        AdapterPlanner(base()).pieces([part])


FOR_EVER = {
    "alternatives that are the same": "([a-z._0-9]{1,2}|[a-z._0-9]{1,3})+X",
    "many repetitions": ".*" * 30 + "X",
    "repeated repetitions": "([a-z._0-9]+)+X",
    "looking ahead": "(?=([a-z._0-9]{1,2}|[a-z._0-9]{1,3})+X)",
}


@pytest.mark.timeout(40)
@pytest.mark.parametrize("pattern", FOR_EVER.values(), ids=FOR_EVER)
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"])
def test_patterns_that_are_matched_for_ever_are_given_up(pattern, field):
    fields = {"target_modules": ".*q_proj"} | {field: {pattern: 4} if field.endswith("pattern") else pattern}
    with pytest.raises(PushRefused, match="matching its patterns"):
        AdapterPlanner(base()).shape(AdapterConfig(8, 8, **fields), parts_of(tensors(SHAPES)), 64)


def test_patterns_as_people_write_them_are_none_of_these():
    """With what PEFT's users need: a look around, and every module by its name."""
    config = AdapterConfig(
        *(8, 8),
        target_modules=r"(?!.*vision)(model\.)*(.*\.)*layers\.(\d+\.)+(self_attn|mlp)\.(q|v|down)_proj",
        rank_pattern=dict.fromkeys(sorted(SHAPES), 2) | {f"model.layers.{n}.x": 1 for n in range(1000)},
    )
    named = {n: t for n, t in tensors(SHAPES, rank=2).items() if n.split(".")[-2] in ("q_proj", "v_proj", "down_proj")}
    shape = AdapterPlanner(base()).shape(config, parts_of(named), 64)
    assert len(shape.modules) == 3 * CONFIG["num_hidden_layers"]
    assert {module.rank for module in shape.modules} == {2}


def test_nothing_is_kept_of_names_that_are_refused(tmp_path):
    """They are without number. Refused for its size, so nothing of a line is made: what would make one is left out."""
    config = StoreConfig(run_dir=tmp_path, model=tmp_path, adapter_bytes=1 << 20, max_adapter_rank=256)
    others = dict.fromkeys(["background", "files", "counters", "audience", "members", "data", "made"])
    lines = Lines(config, base(), None, tmp_path, **others)
    parts, shape = parts_of(tensors(SHAPES, rank=256)), AdapterConfig(256, 8, target_modules=ALL)
    for number in range(100):
        with pytest.raises(PushRefused, match="adapter_bytes"):
            lines.for_push(AdapterPush(f"adapter-{number}", shape), parts)
    assert not lines._shapes

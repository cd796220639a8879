import json
from pathlib import Path

import pytest
from safetensors import safe_open

from weight_manager.families import FAMILIES, manifest_for
from weight_manager.layout import make_layout

FIXTURES = Path(__file__).parents[3] / "fixtures" / "models"
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
LAYER = [
    ("input_layernorm.weight", (32,)),
    ("self_attn.q_proj.weight", (32, 32)),
    ("self_attn.k_proj.weight", (16, 32)),
    ("self_attn.v_proj.weight", (16, 32)),
    ("self_attn.o_proj.weight", (32, 32)),
    ("post_attention_layernorm.weight", (32,)),
    ("mlp.gate_proj.weight", (48, 32)),
    ("mlp.up_proj.weight", (48, 32)),
    ("mlp.down_proj.weight", (32, 48)),
]


def manifest(architecture, **config):
    return manifest_for(SMALL | {"architectures": [architecture]} | config, "float32")


def shapes(found):
    return {p.name: p.shape for p in found.parameters}


def test_llama_serves_the_tensors_of_its_checkpoint():
    expected = {"model.embed_tokens.weight": (96, 32)}
    expected |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER}
    expected |= {"model.norm.weight": (32,), "lm_head.weight": (96, 32)}
    assert shapes(manifest("LlamaForCausalLM")) == expected


def test_a_tied_head_is_another_name_of_the_embeddings():
    found = manifest("LlamaForCausalLM", tie_word_embeddings=True)
    assert found.parameters[0].aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in shapes(found)


def added(architecture, **config):
    return set(shapes(manifest(architecture, **config))) - set(shapes(manifest("LlamaForCausalLM")))


def test_what_the_other_families_add():
    bias = {f"model.layers.{i}.self_attn.{m}_proj.bias" for i in range(2) for m in "qkv"}
    assert added("Qwen2ForCausalLM") == bias
    norms = {f"model.layers.{i}.self_attn.{m}_norm.weight" for i in range(2) for m in "qk"}
    assert added("Qwen3ForCausalLM") == norms
    out = {f"model.layers.{i}.self_attn.o_proj.bias" for i in range(2)}
    assert added("LlamaForCausalLM", attention_bias=True) == bias | out
    assert added("Ernie4_5ForCausalLM", tie_word_embeddings=False) == set()
    mlp = {f"model.layers.{i}.mlp.{m}_proj.bias" for i in range(2) for m in ("gate", "up", "down")}
    assert added("Ernie4_5ForCausalLM", tie_word_embeddings=False, use_bias=True) == bias | out | mlp


def test_defaults_are_the_families_own():
    assert manifest("Ernie4_5ForCausalLM").parameters[0].aliases == ("lm_head.weight",)
    assert shapes(manifest("Qwen3ForCausalLM"))["model.layers.0.self_attn.q_proj.weight"] == (4 * 128, 32)
    assert shapes(manifest("Qwen3ForCausalLM", head_dim=16))["model.layers.0.self_attn.o_proj.weight"] == (32, 64)
    one_head_each = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"} | {
        "architectures": ["LlamaForCausalLM"]
    }
    assert shapes(manifest_for(one_head_each, "float32"))["model.layers.0.self_attn.k_proj.weight"] == (32, 32)


def test_experts_of_qwen3_lie_together():
    found = manifest("Qwen3MoeForCausalLM", num_experts=3, moe_intermediate_size=8, mlp_only_layers=[1])
    names = shapes(found)
    assert names["model.layers.0.mlp.gate.weight"] == (3, 32)
    assert names["model.layers.0.mlp.experts.2.down_proj.weight"] == (32, 8)
    assert names["model.layers.1.mlp.gate_proj.weight"] == (48, 32)
    fused = [
        p.name.split(".experts.")[1]
        for p in found.parameters
        if p.fused and p.fused.endswith("0.mlp.experts.gate_up_proj.weight")
    ]
    assert fused == [f"{e}.{m}_proj.weight" for e in range(3) for m in ("gate", "up")]


def test_experts_of_ernie_with_shared_ones_from_the_second_layer_on():
    found = shapes(
        manifest(
            "Ernie4_5_MoeForCausalLM",
            moe_num_experts=2,
            moe_intermediate_size=8,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
        )
    )
    assert found["model.layers.0.mlp.gate_proj.weight"] == (48, 32)
    assert found["model.layers.1.mlp.moe_statics.e_score_correction_bias"] == (1, 2)
    assert found["model.layers.1.mlp.shared_experts.up_proj.weight"] == (16, 32)
    assert "model.layers.1.mlp.gate_proj.weight" not in found


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_every_family_can_be_laid_out(architecture, tp):
    moe = {"num_experts": 3, "moe_num_experts": 3, "moe_intermediate_size": 8, "moe_num_shared_experts": 1}
    if tp == 3:
        moe |= {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}
    assert make_layout(manifest(architecture, **moe), tp).regions


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not served; known: Llama"),
        ({"architectures": []}, "None is not served"),
        (
            {"architectures": ["LlamaForCausalLM"], "vocab_size": None},
            "vocab_size must be a positive integer, got None",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "hidden_size": "32"},
            "hidden_size must be a positive integer, got '32'",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 3},
            "3 is not a multiple of num_key_value_heads 2",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_key(config, said):
    with pytest.raises(ValueError, match=said):
        manifest_for(SMALL | config, "float32")


def test_a_layer_that_drafts_is_served_with_the_rest():
    config = json.loads((FIXTURES / "ernie45_mtp" / "config.json").read_text())
    parameters = {p.name: p for p in manifest_for(config, "float32").parameters}
    own = {name for name in parameters if name.startswith("model.mtp_")}
    assert {name.removeprefix("model.").split(".")[0] for name in own} == {
        "mtp_emb_norm",
        "mtp_hidden_norm",
        "mtp_linear_proj",
        "mtp_block",
    }
    assert parameters["model.mtp_linear_proj.0.weight"].shape == (32, 64)
    assert parameters["model.embed_tokens.weight"].aliases == ("lm_head.weight",), "embedding and head are shared"
    with safe_open(FIXTURES / "ernie45_mtp" / "model.safetensors", "numpy") as file:
        assert set(file.keys()) == set(parameters)
    without = manifest_for(config | {"num_nextn_predict_layers": 0}, "float32")
    assert set(parameters) - {p.name for p in without.parameters} == own
    with pytest.raises(ValueError, match="num_nextn_predict_layers"):
        manifest_for(config | {"num_nextn_predict_layers": 2}, "float32")

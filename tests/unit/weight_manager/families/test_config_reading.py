"""What config.json says in odd ways: read as it was meant, or refused by its key."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from weight_manager.families import decoder_spec, manifest_for
from weight_manager.families.rope import NEEDED
from worker.models.rope import rope_table

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
MOE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "moe_num_experts": 4,
    "moe_intermediate_size": 16,
    "moe_layer_start_index": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
TWO = {"full_attention": FULL, "sliding_attention": FULL | {"rope_theta": 10.0}}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"rope_scaling": {"type": "linear", "factor": "2.0"}}, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": "4", "attention_factor": "0.5", "beta_fast": "16"}},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "beta_fast": 16}},
        ),
        (
            {"rope_scaling": LLAMA3 | {"factor": "8.0", "original_max_position_embeddings": "64"}},
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}},
        ),
        ({"rope_theta": "500000.0"}, {"rope_theta": 500000.0}),
        ({"rope_parameters": {"full_attention": FULL}}, {"rope_parameters": FULL}),
        ({"rope_parameters": TWO}, {"rope_parameters": FULL}),
        (
            {"rope_parameters": TWO, "layer_types": ["full_attention", "full_attention"]},
            {"rope_parameters": FULL},
        ),
        ({"rope_parameters": {"rope_type": None, "factor": None}}, {}),
        ({"rope_scaling": None, "rope_theta": None, "partial_rotary_factor": None}, {}),
        ({"rms_norm_eps": "1e-05"}, {"rms_norm_eps": 1e-5}),
    ],
)
def test_what_has_one_meaning_is_read(said: dict[str, Any], meant: dict[str, Any]) -> None:
    assert decoder_spec(SMALL | said) == decoder_spec(SMALL | meant)


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
BOTH = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("architecture", "hub", "today"),
    [
        # As Phi-3's and Gemma 3's own config.json are on the hub, and as transformers 5 writes them.
        (
            "Phi3ForCausalLM",
            {"rope_theta": 1e4, "rope_scaling": {"type": "su", **LONGROPE}, "original_max_position_embeddings": 16},
            {"rope_parameters": {"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": 16}},
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", **LONGROPE}, "original_max_position_embeddings": 16},
            {"rope_parameters": {"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": 16}},
        ),
        (
            "Gemma3ForCausalLM",
            {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
            | {"sliding_window_pattern": 2},
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
                },
                "layer_types": BOTH,
            },
        ),
        (
            "Olmo3ForCausalLM",
            {"rope_theta": 7e3, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "layer_types": BOTH},
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 7e3},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
                },
                "layer_types": BOTH,
            },
        ),
        (
            "GlmForCausalLM",
            {"partial_rotary_factor": 0.25, "rope_theta": 5e3},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.25}},
        ),
        ("GemmaForCausalLM", {"hidden_act": "gelu", "hidden_activation": None}, {"hidden_act": "gelu_pytorch_tanh"}),
        ("GemmaForCausalLM", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, {}),
        ("MistralForCausalLM", {}, {"sliding_window": 4096}),
        ("LLaMAForCausalLM", {}, {}),
        ("InternLMForCausalLM", {}, {"bias": True}),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, {}),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        ),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}, {"no_rope_layers": [1, 0]}),
    ],
)
def test_both_forms_of_a_familys_config_are_read(architecture: str, hub: dict[str, Any], today: dict[str, Any]) -> None:
    own = {"architectures": [architecture], "num_key_value_heads": 2}
    assert decoder_spec(SMALL | own | hub) == decoder_spec(SMALL | own | today)


def test_names_of_llama_mean_what_their_own_code_computes() -> None:
    plain = decoder_spec(SMALL)
    assert decoder_spec(SMALL | {"architectures": ["LLaMAForCausalLM"]}) == plain
    old = decoder_spec(SMALL | {"architectures": ["InternLMForCausalLM"]})
    assert (old.qkv_bias, old.out_bias, old.mlp_bias) == (True, True, False)
    new = decoder_spec(SMALL | {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": False})
    assert (new.qkv_bias, new.out_bias, new.mlp_bias) == (True, False, False)


BAD = [
    ({"rms_norm_eps": None}, "rms_norm_eps must be a number, got None"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, got 'small'"),
    ({"rms_norm_eps": True}, "rms_norm_eps must be a number, got True"),
    ({"max_position_embeddings": None}, "max_position_embeddings must be a number, got None"),
    ({"rope_theta": [1]}, r"rope_theta must be a number, got \[1\]"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling: rope type 'linear' needs factor"),
    ({"rope_scaling": {"type": "linear", "factor": None}}, "rope_scaling: rope type 'linear' needs factor"),
    ({"rope_scaling": {"type": "linear", "factor": "two"}}, "rope_scaling.factor must be a number, got 'two'"),
    ({"rope_scaling": {"type": "linear", "factor": [2]}}, r"rope_scaling.factor must be a number, got \[2\]"),
    (
        {"rope_parameters": {"sliding_attention": FULL}},
        "rope_parameters is by type of layer, and has nothing for full_att",
    ),
    (
        {"kv_lora_rank": 512, "architectures": ["DeepseekV3ForCausalLM"]},
        "kv_lora_rank is not served: multi-head latent",
    ),
    ({"text_config": {}, "architectures": ["Gemma3ForConditionalGeneration"]}, "text_config is not served"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not served: quantised"),
    ({"rope_scaling": {"type": "of its own"}}, "rope_scaling: rope type 'of its own' is not served"),
    ({"use_sliding_window": True}, "use_sliding_window is not served"),
    ({"head_dim": 7}, "head_dim 7 is odd"),
    (
        {"architectures": ["MinistralForCausalLM"], "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
        "layer_types has 'sliding_attention', but sliding_window says that there is none",
    ),
    (
        {"architectures": ["MinistralForCausalLM"], "layer_types": ["full_attention"]},
        "layer_types must have a type for each of num_hidden_layers 2",
    ),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window must be a positive integer"),
    (
        {"architectures": ["Ministral3ForCausalLM"], "num_key_value_heads": 2}
        | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
        "rope_parameters.llama_4_scaling_beta is not served",
    ),
    (
        {"architectures": ["Phi3ForCausalLM"]}
        | {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 4}},
        "rope_scaling.short_factor must be a list of 4 numbers",
    ),
    ({"architectures": ["GlmForCausalLM"], "partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 rotates 51 of"),
    ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not served"),
    (
        {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
        "use_bidirectional_attention is not served",
    ),
    ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"}, "hidden_activation 'gelu' is not served"),
    (
        {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": FULL},
        "rope_parameters must be by type of layer in this family",
    ),
    ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers must have 0 or 1 for each of"),
    (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has 'sliding_attention', which is not served",
    ),
]


@pytest.mark.parametrize(("said", "error"), BAD)
def test_what_has_none_is_refused_by_key(said: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match="config.json: " + error):
        decoder_spec(SMALL | said)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, got '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"head_dim": -1}, "head_dim must be a positive integer, got -1"),
        ({"intermediate_size": None}, "intermediate_size must be a positive integer, got None"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: rope type 'linear' needs factor"),
    ],
)
def test_store_and_engine_refuse_the_same(said: dict[str, Any], error: str) -> None:
    """The store would serve bytes otherwise that no rank can compute with, and the other way round."""
    with pytest.raises(ValueError, match="config.json: " + error):
        decoder_spec(SMALL | said)
    with pytest.raises(ValueError, match="config.json: " + error):
        manifest_for(SMALL | said, "float32")


@pytest.mark.parametrize("kind", NEEDED)
def test_every_rope_type_that_is_read_can_be_computed(kind: str) -> None:
    scaling = {"rope_type": kind, **{name: 4.0 - index for index, name in enumerate(NEEDED[kind])}}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    if "high_freq_factor" in scaling:
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    cos, sin = rope_table(decoder_spec(SMALL | {"rope_scaling": scaling}).ropes[0], 8)
    assert cos.shape == sin.shape == (8, 4)
    assert np.isfinite(cos).all()


def test_reading_a_config_loads_no_paddle() -> None:
    """Nor pydantic, ZeroMQ or a web framework; numpy comes with the layout, which whoever reads a config makes next."""
    heavy = ("paddle", "torch", "pydantic", "zmq", "fastapi")
    code = f"import sys, weight_manager.families; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What is on the hub, in the words of its own config.json; what changes no logit is left out.
HUB: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"architectures": ["MistralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu"}
        | {"max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096}
        | {"tie_word_embeddings": False},
        {"windows": [4096] * 32, "head_dim": 128},
    ),
    (
        {"architectures": ["Phi3ForCausalLM"], "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu"}
        | {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05}
        | {"rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "attention_bias": False},
        {"windows": [2047] * 32, "head_dim": 96, "stacked": ("qkv_proj", "gate_up_proj")},
    ),
    (
        {"architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None}
        | {"final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
        | {"hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4}
        | {"num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06}
        | {"rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512}
        | {"sliding_window_pattern": 6, "vocab_size": 262144},
        {
            "windows": [0 if (layer + 1) % 6 == 0 else 512 for layer in range(26)],
            "thetas": [1e6 if (layer + 1) % 6 == 0 else 1e4 for layer in range(26)],
            "tied": True,
            "scale": 256**-0.5,
        },
    ),
]


@pytest.mark.parametrize(("config", "meant"), HUB, ids=lambda value: value.get("architectures", [""])[0])
def test_config_files_of_the_hub(config: dict[str, Any], meant: dict[str, Any]) -> None:
    spec = decoder_spec(config)
    ropes = [attention.rope for attention in spec.attention]
    found = {
        "windows": [attention.window for attention in spec.attention],
        "thetas": [rope.theta for rope in ropes if rope is not None],
        **{name: getattr(spec, name) for name in meant.keys() - {"windows", "thetas"}},
    }
    assert {name: found[name] for name in meant} == meant


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": -1}, "architecture -1"),
        ({"architectures": {"a": 1}}, "architecture"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"hidden_act": []}, "another kind"),
        *(
            (MOE | {key: value}, key)
            for key in ("moe_layer_start_index", "moe_layer_end_index", "moe_num_shared_experts")
            for value in (None, -2, 1.5, float("inf"), "x", True)
        ),
        (MOE | {"moe_num_experts": 1 << 40}, "moe_num_experts"),
    ],
)
def test_a_value_of_another_kind_is_refused_and_not_read_as_something(changes, says):
    with pytest.raises(ValueError, match=r"config\.json|architecture") as refused:
        manifest_for(SMALL | changes, "float32")
    assert says in str(refused.value)

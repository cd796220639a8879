"""GLM and GLM-4: half of every head is rotated, in neighbouring pairs; GLM-4 also norms what its layers add."""

from weight_manager.families.config_values import Config
from weight_manager.families.spec import DecoderSpec, Norms, spec_from

_AROUND = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def glm(config: Config) -> DecoderSpec:
    """GLM's defaults: theta 10000, eps 1.5625e-7, untied, heads of 128, half of them rotated; biases on q, k and v."""
    return _either(config, Norms())


def glm4(config: Config) -> DecoderSpec:
    """GLM-4 0414: GLM's defaults, with norms around attention and MLP."""
    return _either(config, _AROUND)


def _either(config: Config, norms: Norms) -> DecoderSpec:
    return spec_from(
        config,
        theta=10000.0,
        eps=0.00000015625,
        positions=131072,
        kv_heads=2,
        head_dim=128,
        partial=0.5,
        interleaved=True,
        stacked=("gate_up_proj",),
        qkv_bias=bool(config.get("attention_bias", True)),
        norms=norms,
    )

"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from weight_manager.families.config_values import Config
from weight_manager.families.spec import DecoderSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """Qwen2's defaults: theta 10000, eps 1e-6, untied."""
    return spec_from(config, theta=10000.0, eps=1e-6, qkv_bias=True)

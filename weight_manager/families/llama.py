"""Llama (and SmolLM2, TinyLlama, ...): the plain decoder."""

from weight_manager.families.config_values import Config
from weight_manager.families.spec import DecoderSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """Llama's defaults: theta 10000, eps 1e-6, untied; biases if the config asks for them."""
    biased = bool(config.get("attention_bias"))
    return spec_from(
        config, theta=10000.0, eps=1e-6, qkv_bias=biased, out_bias=biased, mlp_bias=bool(config.get("mlp_bias"))
    )

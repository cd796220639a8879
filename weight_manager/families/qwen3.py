"""Qwen3: q and k of every head are RMS-normed before they are rotated; the head width is free."""

from weight_manager.families.config_values import Config
from weight_manager.families.spec import DecoderSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """Qwen3's defaults: theta 10000, eps 1e-6, untied, heads of 128; biases of attention on request."""
    biased = bool(config.get("attention_bias"))
    return spec_from(config, theta=10000.0, eps=1e-6, head_dim=128, qk_norm=True, qkv_bias=biased, out_bias=biased)

"""Qwen3: q and k of every head are RMS-normed before they are rotated; the head width is free."""

from weight_manager.families.config_values import Config
from weight_manager.families.qwen2 import windowed
from weight_manager.families.spec import DecoderSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """Qwen3's defaults: as Qwen2's, heads of 128; biases of attention on request, none of its own."""
    biased = bool(config.get("attention_bias"))
    types, cells = windowed(config, lambda layer, first: layer >= first)
    return spec_from(
        config,
        theta=10000.0,
        eps=1e-6,
        positions=32768,
        kv_heads=32,
        head_dim=128,
        qk_norm="heads",
        qkv_bias=biased,
        out_bias=biased,
        types=types,
        window=cells,
    )

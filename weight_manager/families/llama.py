"""Llama (and SmolLM2, TinyLlama, ...), the plain decoder, and families that are it under another name."""

from weight_manager.families.config_values import Config
from weight_manager.families.spec import DecoderSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """Llama's defaults: theta 10000, eps 1e-6, untied; biases if the config asks for them."""
    biased = bool(config.get("attention_bias"))
    return _spec(config, qkv_bias=biased, out_bias=biased, mlp_bias=bool(config.get("mlp_bias")))


def internlm(config: Config) -> DecoderSpec:
    """InternLM: ``bias`` (on by default) is of q, k, v and o."""
    biased = bool(config.get("bias", True))
    return _spec(config, qkv_bias=biased, out_bias=biased)


def internlm3(config: Config) -> DecoderSpec:
    """InternLM 3: ``qkv_bias`` is of q, k and v, ``bias`` of all other matrices."""
    biased = bool(config.get("bias", False))
    return _spec(config, qkv_bias=bool(config.get("qkv_bias", False)), out_bias=biased, mlp_bias=biased)


def seed_oss(config: Config) -> DecoderSpec:
    """Seed-OSS: heads of 128; ``attention_bias`` (on by default) is of q, k and v, ``attention_out_bias`` of o."""
    return spec_from(
        config,
        theta=10000.0,
        eps=1e-6,
        positions=524288,
        kv_heads=8,
        head_dim=128,
        qkv_bias=bool(config.get("attention_bias", True)),
        out_bias=bool(config.get("attention_out_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _spec(config: Config, *, qkv_bias: bool, out_bias: bool, mlp_bias: bool = False) -> DecoderSpec:
    return spec_from(config, theta=10000.0, eps=1e-6, qkv_bias=qkv_bias, out_bias=out_bias, mlp_bias=mlp_bias)

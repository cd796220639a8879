"""Gemma 1, 2 and 3 (text): norms as distances from one, scaled embeddings, gelu; 2 and 3 also norm what they add."""

from typing import Any

from weight_manager.families.config_values import Config, count, number, window
from weight_manager.families.rope import by_type
from weight_manager.families.spec import FULL, SLIDING, DecoderSpec, Norms, layer_types, spec_from

_AROUND = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def gemma(config: Config) -> DecoderSpec:
    """Gemma's defaults: theta 10000, eps 1e-6, tied, heads of 256. ``gelu`` means its tanh form, as HF reads it too."""
    said = config.get("hidden_activation") or config.get("hidden_act", "gelu_pytorch_tanh")
    named = config | {"hidden_act": "gelu_pytorch_tanh" if said == "gelu" else said}
    return _spec(named, positions=8192, kv_heads=16, activation="hidden_act")


def gemma2(config: Config) -> DecoderSpec:
    """Gemma 2's defaults: as Gemma's; scores capped at 50, logits at 30; every other layer has a window of 4096."""
    cells = window(config, default=4096)
    return _spec(
        config,
        positions=8192,
        kv_heads=4,
        activation="hidden_activation",
        norms=_AROUND,
        types=layer_types(config, lambda layer: FULL if layer % 2 else SLIDING, cells),
        window=cells,
        query_scalar=number(config, "query_pre_attn_scalar", 256),
        score_cap=_cap(config, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(config, "final_logit_softcapping", 30.0),
    )


def gemma3(config: Config) -> DecoderSpec:
    """Gemma 3's defaults: as Gemma 2's without caps, with q and k normed; five layers of six have the window.

    Those rotate by ``rope_local_base_freq`` (10000), the others by ``rope_theta`` (1000000) and ``rope_scaling``.
    """
    if config.get("attn_logit_softcapping") is not None:  # transformers knows the key, and does not apply it
        raise ValueError("config.json: attn_logit_softcapping is not served in Gemma 3")
    cells, period = window(config, default=4096), count(config, "sliding_window_pattern", 6)
    return _spec(
        by_type(config, full=1e6, sliding=("rope_local_base_freq", 1e4)),
        positions=131072,
        kv_heads=4,
        activation="hidden_activation",
        norms=_AROUND,
        qk_norm="heads",
        types=layer_types(config, lambda layer: SLIDING if (layer + 1) % period else FULL, cells),
        window=cells,
        query_scalar=number(config, "query_pre_attn_scalar", 256),
        logit_cap=_cap(config, "final_logit_softcapping", 0.0),
    )


def _spec(config: Config, **own: Any) -> DecoderSpec:
    if config.get("use_bidirectional_attention"):
        raise ValueError("config.json: use_bidirectional_attention is not served: tokens would see later ones")
    biased = bool(config.get("attention_bias"))
    return spec_from(
        config,
        theta=10000.0,
        eps=1e-6,
        tied=True,
        head_dim=256,
        qkv_bias=biased,
        out_bias=biased,
        unit_norms=True,
        scaled_embeddings=True,
        **own,
    )


def _cap(config: Config, key: str, default: float) -> float:
    return 0.0 if config.get(key, default) is None else number(config, key, default)

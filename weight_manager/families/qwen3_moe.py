"""Qwen3 MoE: softmax over all experts, the best k, their weights normalised if the config says so."""

from weight_manager.families.config_values import Config, count, window
from weight_manager.families.spec import FULL, SLIDING, DecoderSpec, MoeSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """Qwen3-MoE's defaults: theta 10000, eps 1e-6, 32768 positions, untied; a window in all layers if one is wanted."""
    biased = bool(config.get("attention_bias"))
    cells = window(config, default=4096) if config.get("use_sliding_window") else 0
    moe = _experts(config)
    return spec_from(
        config,
        theta=10000.0,
        eps=1e-6,
        positions=32768,
        kv_heads=4,
        qk_norm="heads",
        qkv_bias=biased,
        out_bias=biased,
        types=[SLIDING if cells else FULL] * len(moe),
        window=cells,
        moe=moe,
    )


def sparse_layers(config: Config) -> list[bool]:
    """Which layers have experts, in Qwen's MoE families: all that are not listed as dense and on the step."""
    dense, step = config.get("mlp_only_layers") or [], count(config, "decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(count(config, "num_hidden_layers"))]


def _experts(config: Config) -> tuple[MoeSpec | None, ...]:
    sparse = sparse_layers(config)
    if not any(sparse):
        return (None,) * len(sparse)
    experts = MoeSpec(
        # transformers 5 saves the second name.
        experts=count(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        intermediate=count(config, "moe_intermediate_size"),
        top_k=count(config, "num_experts_per_tok", 8),
        normalise=bool(config.get("norm_topk_prob", False)),
    )
    return tuple(experts if is_sparse else None for is_sparse in sparse)

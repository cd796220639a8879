"""Qwen2-MoE: Qwen2 with experts, and one more that every token goes through, weighted by a gate of its own."""

from weight_manager.families.config_values import Config, count
from weight_manager.families.qwen2 import windowed
from weight_manager.families.qwen3_moe import sparse_layers
from weight_manager.families.spec import DecoderSpec, MoeSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """Qwen2-MoE's defaults: as Qwen2's; 60 experts, 4 of them a token, biases on q, k and v unless ``qkv_bias`` is off.

    Where there is a window, every other layer below ``max_window_layers`` has it.
    """
    types, cells = windowed(config, lambda layer, below: layer % 2 == 0 and layer < below)
    experts = MoeSpec(
        experts=count(config, "num_experts", 60),
        intermediate=count(config, "moe_intermediate_size", 1408),
        top_k=count(config, "num_experts_per_tok", 4),
        normalise=bool(config.get("norm_topk_prob", False)),
        shared=count(config, "shared_expert_intermediate_size", 5632),
        shared_name="shared_expert",
        shared_gate=True,
    )
    return spec_from(
        config,
        theta=10000.0,
        eps=1e-6,
        positions=32768,
        kv_heads=16,
        qkv_bias=bool(config.get("qkv_bias", True)),
        types=types,
        window=cells,
        moe=tuple(experts if sparse else None for sparse in sparse_layers(config)),
    )

"""Qwen3 MoE: softmax over all experts, the best k, their weights normalised if the config says so."""

from weight_manager.families.config_values import Config, count
from weight_manager.families.spec import DecoderSpec, MoeSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """Qwen3-MoE's defaults: theta 10000, eps 1e-6, untied; a layer is sparse unless listed or off the step."""
    biased = bool(config.get("attention_bias"))
    return spec_from(
        config, theta=10000.0, eps=1e-6, qk_norm=True, qkv_bias=biased, out_bias=biased, moe=_experts(config)
    )


def _experts(config: Config) -> tuple[MoeSpec | None, ...]:
    dense, step = config.get("mlp_only_layers") or [], count(config, "decoder_sparse_step", 1)
    sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(count(config, "num_hidden_layers"))]
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

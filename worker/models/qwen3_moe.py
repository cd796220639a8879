"""Qwen3 MoE: softmax over all experts, the best k, their weights normalised if the config says so."""

from worker.models.spec import Config, DecoderSpec, MoeSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """Qwen3-MoE's defaults: theta 10000, eps 1e-6, untied; a layer is sparse unless listed or off the step."""
    experts = MoeSpec(
        # transformers 5 saves the second name.
        experts=int(config["num_experts"] if "num_experts" in config else config["num_local_experts"]),
        top_k=int(config.get("num_experts_per_tok", 8)),
        normalise=bool(config.get("norm_topk_prob", False)),
    )
    dense = config.get("mlp_only_layers") or []
    step = int(config.get("decoder_sparse_step", 1))
    moe = tuple(
        None if layer in dense or (layer + 1) % step else experts for layer in range(int(config["num_hidden_layers"]))
    )
    return spec_from(config, theta=10000.0, eps=1e-6, qk_norm=True, moe=moe)

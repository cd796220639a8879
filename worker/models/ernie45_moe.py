"""ERNIE 4.5 MoE: experts chosen by softmax plus a learned correction, weighted by softmax alone, one shared expert."""

from worker.models.spec import Config, DecoderSpec, MoeSpec, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """ERNIE 4.5 MoE's defaults: as the dense form; layers [start, end] at the interval are sparse."""
    layers = int(config["num_hidden_layers"])
    experts = MoeSpec(
        experts=int(config["moe_num_experts"]),
        top_k=int(config.get("moe_k", 6)),
        normalise=True,
        norm_min=float(config.get("moe_norm_min", 1e-12)),
        correction_bias=True,
        shared=int(config.get("moe_num_shared_experts", 0)) > 0,
    )
    first, last = int(config.get("moe_layer_start_index", 1)), int(config.get("moe_layer_end_index", -1))
    last = layers - 1 if last < 0 else last
    interval = int(config.get("moe_layer_interval", 1))
    moe = tuple(experts if first <= layer <= last and (layer + 1) % interval == 0 else None for layer in range(layers))
    mtp = bool(config.get("num_nextn_predict_layers"))
    return spec_from(config, theta=500000.0, eps=1e-5, tied=True, interleaved=True, moe=moe, mtp=mtp)

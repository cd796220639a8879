"""ERNIE 4.5 MoE: experts chosen by softmax plus a learned correction, weighted by softmax alone, one shared expert."""

from weight_manager.families.config_values import Config, count, number, whole
from weight_manager.families.ernie45 import either
from weight_manager.families.spec import DecoderSpec, MoeSpec


def decoder_spec(config: Config) -> DecoderSpec:
    """ERNIE 4.5 MoE's defaults: as the dense form; layers [start, end] at the interval are sparse."""
    return either(config, kv_heads=4, moe=_experts(config), head_bias=True)


def _experts(config: Config) -> tuple[MoeSpec | None, ...]:
    layers, interval = count(config, "num_hidden_layers"), count(config, "moe_layer_interval", 1)
    first, last = whole(config, "moe_layer_start_index", 1, 0), whole(config, "moe_layer_end_index", -1, -1)
    last = layers - 1 if last < 0 else last
    sparse = [first <= layer <= last and (layer + 1) % interval == 0 for layer in range(layers)]
    if not any(sparse):
        return (None,) * layers
    size = count(config, "moe_intermediate_size")
    experts = MoeSpec(
        experts=count(config, "moe_num_experts"),
        intermediate=size,
        top_k=count(config, "moe_k", 6),
        normalise=True,
        norm_min=number(config, "moe_norm_min", 1e-12),
        correction_bias=True,
        shared=size * whole(config, "moe_num_shared_experts", 2, 0),
    )
    return tuple(experts if is_sparse else None for is_sparse in sparse)

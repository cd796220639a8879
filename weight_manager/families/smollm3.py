"""SmolLM3: Llama in which every fourth layer does not rotate (NoPE), and may have a sliding window."""

from weight_manager.families.config_values import Config, count, window
from weight_manager.families.spec import FULL, SLIDING, DecoderSpec, layer_types, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """SmolLM3's defaults: theta 2000000, eps 1e-6, 32768 positions, tied, no window; biases on request."""
    rotated = _rotated(config)
    cells = window(config) if config.get("use_sliding_window") else 0
    biased = bool(config.get("attention_bias"))
    return spec_from(
        config,
        theta=2000000.0,
        eps=1e-6,
        positions=32768,
        kv_heads=4,
        tied=True,
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=bool(config.get("mlp_bias")),
        types=layer_types(config, lambda layer: SLIDING if cells and not rotated[layer] else FULL, cells),
        window=cells,
        rotated=rotated,
    )


def _rotated(config: Config) -> list[bool]:
    """Which layers rotate: ``no_rope_layers`` has 1 for those that do."""
    layers, found = count(config, "num_hidden_layers"), config.get("no_rope_layers")
    if found is None:
        interval = count(config, "no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(found, list) or len(found) != layers or any(value not in {0, 1} for value in found):
        raise ValueError(
            f"config.json: no_rope_layers must have 0 or 1 for each of num_hidden_layers {layers}, got {found!r}"
        )
    return [bool(value) for value in found]

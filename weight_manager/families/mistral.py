"""Mistral and Ministral: Llama with a sliding window, in all layers or in those that the config names."""

from weight_manager.families.config_values import Config, window
from weight_manager.families.spec import FULL, SLIDING, DecoderSpec, layer_types, spec_from


def mistral(config: Config) -> DecoderSpec:
    """Mistral's defaults: theta 10000, eps 1e-6, untied; a window of 4096 in all layers, none if it is null.

    ``layer_types`` has no meaning here, as in transformers.
    """
    return ministral({name: value for name, value in config.items() if name != "layer_types"})


def ministral(config: Config) -> DecoderSpec:
    """Ministral: like Mistral, but ``layer_types`` may say which layers have the window, and heads are as wide as
    hidden_size says.
    """
    return _spec(config, window(config, default=4096), head_dim=None, eps=1e-6, positions=131072)


def ministral3(config: Config) -> DecoderSpec:
    """Ministral 3's text model, where its positions do not scale queries (``llama_4_scaling_beta``): eps 1e-5."""
    return _spec(config, window(config), head_dim=128, eps=1e-5, positions=262144)


def _spec(config: Config, cells: int, *, head_dim: int | None, eps: float, positions: int) -> DecoderSpec:
    return spec_from(
        config,
        theta=10000.0,
        eps=eps,
        positions=positions,
        kv_heads=8,
        head_dim=head_dim,
        types=layer_types(config, lambda _: SLIDING if cells else FULL, cells),
        window=cells,
    )

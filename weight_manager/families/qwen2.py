"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; a sliding window in the upper layers if the config wants it."""

from collections.abc import Callable

from weight_manager.families.config_values import Config, window
from weight_manager.families.spec import FULL, SLIDING, DecoderSpec, layer_types, spec_from


def decoder_spec(config: Config) -> DecoderSpec:
    """Qwen2's defaults: theta 10000, eps 1e-6, 32768 positions, untied, no window."""
    types, cells = windowed(config, lambda layer, first: layer >= first)
    return spec_from(
        config, theta=10000.0, eps=1e-6, positions=32768, kv_heads=32, qkv_bias=True, types=types, window=cells
    )


def windowed(config: Config, slides: Callable[[int, int], bool]) -> tuple[tuple[str, ...], int]:
    """(types of layers, window) of a Qwen. slides: whether a layer does, given ``max_window_layers``.

    Raises ValueError.
    """
    wanted = config.get("use_sliding_window", False)
    if not isinstance(wanted, bool):
        raise ValueError(f"config.json: use_sliding_window must be true or false, got {wanted!r}")
    cells = window(config, default=4096) if wanted else 0
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool):
        raise ValueError(f"config.json: max_window_layers must be an integer, got {first!r}")
    return layer_types(config, lambda layer: SLIDING if cells and slides(layer, first) else FULL, cells), cells

"""OLMo 2 and 3: norms only of what layers add, and of q and k over all heads; OLMo 3 has windows in most layers."""

from typing import Any

from weight_manager.families.config_values import Config, window
from weight_manager.families.rope import by_type
from weight_manager.families.spec import FULL, SLIDING, DecoderSpec, Norms, layer_types, spec_from

_BEHIND = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def olmo2(config: Config) -> DecoderSpec:
    """OLMo 2's defaults: theta 10000, eps 1e-5, 2048 positions, untied; biases of attention on request."""
    return _either(config)


def olmo3(config: Config) -> DecoderSpec:
    """OLMo 3: OLMo 2's defaults but for theta, 500000; three layers of four have a window of 4096, and ``rope_scaling``
    is for the others alone.
    """
    cells = window(config, default=4096)
    return _either(
        by_type(config, full=500000.0, sliding=("rope_theta", 500000.0)),
        types=layer_types(config, lambda layer: SLIDING if (layer + 1) % 4 else FULL, cells),
        window=cells,
    )


def _either(config: Config, **own: Any) -> DecoderSpec:
    biased = bool(config.get("attention_bias"))
    return spec_from(
        config,
        theta=10000.0,
        eps=1e-5,
        qk_norm="whole",
        qkv_bias=biased,
        out_bias=biased,
        norms=_BEHIND,
        **own,
    )

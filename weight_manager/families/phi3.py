"""Phi-3 and Phi-4: Llama with longrope, heads that are rotated in part, and a sliding window in all layers or none."""

from weight_manager.families.config_values import Config, window
from weight_manager.families.spec import FULL, SLIDING, DecoderSpec, spec_from

_OLD_NAMES = {"su": "longrope", "yarn": "longrope"}
"""What the first checkpoints call rope types -> their names of today."""


def decoder_spec(config: Config) -> DecoderSpec:
    """Phi-3's defaults: theta 10000, eps 1e-5, 4096 positions, untied, no window."""
    cells, layers = window(config), config.get("num_hidden_layers")
    return spec_from(
        _renamed(config),
        theta=10000.0,
        eps=1e-5,
        positions=4096,
        types=[SLIDING if cells else FULL] * (layers if isinstance(layers, int) else 0),
        window=cells,
        partial=1.0,
        stacked=("qkv_proj", "gate_up_proj"),
    )


def _renamed(config: Config) -> Config:
    """Rope types by today's names. Phi-3 has no yarn: what says so means longrope."""
    made = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        found = config.get(key)
        if isinstance(found, dict):
            made[key] = {
                name: _OLD_NAMES.get(value, value)
                if name in {"type", "rope_type"} and isinstance(value, str)
                else value
                for name, value in found.items()
            }
    return made

"""Rotary positions as config.json says them: HF's scaling types. What becomes of them is the engine's (rope_table)."""

from dataclasses import dataclass
from typing import Any

from weight_manager.families.config_values import Config, number

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": _LLAMA3,
    "yarn": ("factor",),
    "dynamic": ("factor",),
}
"""Types that are served -> parameters that each must have."""
_NUMBERS = frozenset(
    (
        *(*_LLAMA3, "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    )
)


@dataclass(frozen=True)
class RopeSpec:
    """kind: default | linear | dynamic | llama3 | yarn. dim: rotated width (the head's). params: HF's, by name.

    interleaved: a rotary pair is two neighbouring elements (ERNIE), else one from each half of the head.
    """

    kind: str
    dim: int
    theta: float
    trained: int
    params: tuple[tuple[str, float], ...] = ()
    interleaved: bool = False


def rope_spec(config: Config, dim: int, *, theta: float, positions: int, interleaved: bool) -> RopeSpec:
    """Read ``rope_parameters`` (transformers 5) or ``rope_scaling`` and ``rope_theta`` (before).

    Raises ValueError for a type that is not served, or naming a parameter that is missing.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    found = _of_all_layers(config, key)
    kind = str(found.pop("rope_type", found.pop("type", "default")))
    found.pop("type", None)
    for name in _NUMBERS & found.keys():
        found[name] = number(found, name, 0.0, where=f"{key}.")
    base = found.pop("rope_theta", None) or (number(config, "rope_theta", theta) if config.get("rope_theta") else theta)
    if kind not in NEEDED:
        raise ValueError(f"config.json: rope type {kind!r} is not served; known: {', '.join(NEEDED)}")
    if (config.get("partial_rotary_factor") or found.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("config.json: partial_rotary_factor is not served")
    missing = [name for name in NEEDED[kind] if name not in found]
    if missing:
        raise ValueError(f"config.json: {key}: rope type {kind!r} needs {', '.join(missing)}")
    if kind in {"llama3", "yarn"}:
        trained = "original_max_position_embeddings"
        found[trained] = number(config, trained, found.get(trained, positions))
    params = tuple(sorted((k, float(v)) for k, v in found.items() if isinstance(v, int | float)))
    return RopeSpec(kind, dim, base, positions, params, interleaved)


def _of_all_layers(config: Config, key: str) -> dict[str, Any]:
    """The rope parameters, nulls left out. transformers 5 may have them by type of layer: then all must be the same."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"config.json: {key} must be an object, got {found!r}")
    if any(isinstance(value, dict) for value in found.values()):
        types = list(dict.fromkeys(config.get("layer_types") or ["full_attention"]))
        lacking = [name for name in types if not isinstance(found.get(name), dict)]
        if lacking:
            raise ValueError(f"config.json: {key} is by type of layer, and has nothing for {', '.join(lacking)}")
        if any(found[name] != found[types[0]] for name in types):
            raise ValueError(f"config.json: {key} differs between {', '.join(types)}, which is not served")
        found = found[types[0]]
    return {name: value for name, value in found.items() if value is not None}

"""Rotary positions as config.json says them: HF's scaling types. What becomes of them is the engine's (rope_table)."""

from dataclasses import dataclass
from typing import Any

from weight_manager.families.config_values import Config, number, numbers

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": _LLAMA3,
    "yarn": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
"""Types that are served -> parameters that each must have."""
_NUMBERS = frozenset(
    (
        *(*_LLAMA3, "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    )
)
_LISTS = ("short_factor", "long_factor")
_REFUSED = ("llama_4_scaling_beta",)
"""Parameters that change what is computed, and are not served."""


@dataclass(frozen=True)
class RopeSpec:
    """kind: default | linear | dynamic | llama3 | yarn | longrope. dim: elements of a head that are rotated, its first.

    params: HF's, by name. short, long: what longrope divides each pair's frequency by, in contexts up to
    ``original_max_position_embeddings`` and in longer ones.
    interleaved: a rotary pair is two neighbouring elements (ERNIE, GLM), else one from each half of `dim`.
    """

    kind: str
    dim: int
    theta: float
    trained: int
    params: tuple[tuple[str, float], ...] = ()
    interleaved: bool = False
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


def rope_spec(
    config: Config,
    dim: int,
    *,
    theta: float,
    positions: int,
    interleaved: bool,
    partial: float | None = None,
    layer_type: str = "full_attention",
) -> RopeSpec:
    """Read ``rope_parameters`` (transformers 5) or ``rope_scaling`` and ``rope_theta``, for one type of layers.

    partial: the family's default of ``partial_rotary_factor``; None: it has none, and 1 is all that is taken.
    Raises ValueError for a type that is not served, or naming a parameter that is missing.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    found = _of_type(config, key, layer_type)
    kind = str(found.pop("rope_type", found.pop("type", "default")))
    found.pop("type", None)
    for name in _REFUSED:
        if name in found:
            raise ValueError(f"config.json: {key}.{name} is not served")
    for name in _NUMBERS & found.keys():
        found[name] = number(found, name, 0.0, where=f"{key}.")
    base = found.pop("rope_theta", None) or (number(config, "rope_theta", theta) if config.get("rope_theta") else theta)
    if kind not in NEEDED:
        raise ValueError(f"config.json: {key}: rope type {kind!r} is not served; known: {', '.join(NEEDED)}")
    rotated = _rotated(config, found, dim, partial)
    missing = [name for name in NEEDED[kind] if name not in found]
    if missing:
        raise ValueError(f"config.json: {key}: rope type {kind!r} needs {', '.join(missing)}")
    if kind in {"llama3", "yarn", "longrope"}:
        trained = "original_max_position_embeddings"
        found[trained] = number(config, trained, found.get(trained, positions))
    lists = {}
    if kind == "longrope":
        lists = {name: numbers(found, name, rotated // 2, where=f"{key}.") for name in _LISTS}
    params = tuple(sorted((k, float(v)) for k, v in found.items() if isinstance(v, int | float)))
    return RopeSpec(
        kind,
        rotated,
        base,
        positions,
        params,
        interleaved,
        short=lists.get("short_factor", ()),
        long=lists.get("long_factor", ()),
    )


def by_type(config: Config, *, full: float, sliding: tuple[str, float]) -> Config:
    """The config with its rope parameters by type of layer, as transformers 5 has them, from either form.

    full: theta of full layers where no key says it. sliding: the key that says the others' theta, and its default.
    ``rope_scaling`` is of full layers alone. Raises ValueError.
    """
    found, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", found), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise ValueError(f"config.json: {key} must be an object, got {value!r}")
    own = {kind: found.get(kind) or {} for kind in ("full_attention", "sliding_attention")}
    if found and not any(own.values()):
        raise ValueError("config.json: rope_parameters must be by type of layer in this family")
    thetas = {"full_attention": number(config, "rope_theta", full), "sliding_attention": number(config, *sliding)}
    made = {kind: {"rope_theta": thetas[kind]} | values for kind, values in own.items()}
    made["full_attention"] |= scaling
    return config | {"rope_parameters": made, "rope_scaling": None, "rope_theta": None}


def _rotated(config: Config, found: dict[str, Any], dim: int, partial: float | None) -> int:
    """Elements of a head of `dim` that are rotated."""
    said = found.pop("partial_rotary_factor", None)
    if said is None and config.get("partial_rotary_factor") is not None:
        said = number(config, "partial_rotary_factor", 1.0)
    share = float(said if said is not None else 1.0 if partial is None else partial)
    if partial is None and share != 1.0:
        raise ValueError("config.json: partial_rotary_factor is not served")
    width = int(dim * share)
    if share == 1.0 and width % 2:
        raise ValueError(f"config.json: head_dim {dim} is odd: it has no rotary pairs")
    if not 0 < width <= dim or width % 2:
        raise ValueError(f"config.json: partial_rotary_factor {share:g} rotates {width} of a head's {dim} elements")
    return width


def _of_type(config: Config, key: str, layer_type: str) -> dict[str, Any]:
    """The rope parameters of one type of layers, nulls left out; transformers 5 may have them by type."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"config.json: {key} must be an object, got {found!r}")
    if any(isinstance(value, dict) for value in found.values()):
        if not isinstance(found.get(layer_type), dict):
            raise ValueError(f"config.json: {key} is by type of layer, and has nothing for {layer_type}")
        found = found[layer_type]
    return {name: value for name, value in found.items() if value is not None}

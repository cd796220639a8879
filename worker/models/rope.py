"""Rotary positions: HF's scaling types as one table of cos and sin by position.

A row of the table depends on the position alone, so a token's KV is the same whatever else is in its batch
and however its prompt was cut into chunks. For ``dynamic`` this fixes the length that scales the base: at
positions past the trained length it is the position itself, as when HF decodes token by token. For ``longrope`` it
is the longest context that is served.
"""

import logging
import math

import numpy as np
import numpy.typing as npt

from weight_manager.families.rope import RopeSpec

log = logging.getLogger(__name__)

Float32 = npt.NDArray[np.float32]
_ONE = np.float32(1.0)


def rope_table(spec: RopeSpec, length: int) -> tuple[Float32, Float32]:
    """(cos, sin), each float32 [length, dim / 2], attention factor included. length: of the longest context served."""
    positions = np.arange(length, dtype=np.float32)[:, None]
    params = dict(spec.params)
    if spec.kind == "dynamic":
        lengths = np.maximum(positions + 1, spec.trained)
        growth = params["factor"] * lengths / spec.trained - (params["factor"] - 1)
        base = np.float32(spec.theta) * growth ** np.float32(spec.dim / (spec.dim - 2))
        inverse, factor = (_ONE / base ** _exponents(spec.dim)).astype(np.float32), _ONE
    elif spec.kind == "longrope":
        inverse, factor = _longrope(spec, params, length)
    else:
        inverse, factor = _FREQUENCIES[spec.kind](spec, params)
    angles = positions * inverse
    return np.cos(angles) * factor, np.sin(angles) * factor


def _exponents(dim: int) -> Float32:
    return np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)


def _default(spec: RopeSpec, _: dict[str, float]) -> tuple[Float32, np.float32]:
    return _ONE / np.float32(spec.theta) ** _exponents(spec.dim), _ONE


def _linear(spec: RopeSpec, params: dict[str, float]) -> tuple[Float32, np.float32]:
    return _default(spec, params)[0] / np.float32(params["factor"]), _ONE


def _llama3(spec: RopeSpec, params: dict[str, float]) -> tuple[Float32, np.float32]:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    inverse, _ = _default(spec, params)
    factor, trained = np.float32(params["factor"]), params["original_max_position_embeddings"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    wavelength = np.float32(2 * math.pi) / inverse
    smooth = (np.float32(trained) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (_ONE - smooth) * inverse / factor + smooth * inverse
    scaled = np.where(wavelength > trained / low, inverse / factor, blended)
    return np.where(wavelength < trained / high, inverse, scaled).astype(np.float32), _ONE


def _yarn(spec: RopeSpec, params: dict[str, float]) -> tuple[Float32, np.float32]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, ramp between."""
    factor, trained = params["factor"], params["original_max_position_embeddings"]
    attention = params.get("attention_factor")
    if attention is None:
        mscale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
        attention = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1)
    low, high = (
        spec.dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))
        for turns in (params.get("beta_fast") or 32, params.get("beta_slow") or 1)
    )
    if params.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    high = high if high != low else high + 0.001
    ramp = np.clip((np.arange(spec.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    inverse, _ = _default(spec, params)
    kept = _ONE - ramp
    return (inverse / np.float32(factor) * (_ONE - kept) + inverse * kept).astype(np.float32), np.float32(attention)


def _longrope(spec: RopeSpec, params: dict[str, float], length: int) -> tuple[Float32, np.float32]:
    """LongRoPE (arXiv 2402.13753): a divisor for each frequency, of two sets.

    HF takes the set by the length that a sequence has come to, and so would change keys that are cached. Here the
    longest context that is served decides, for all sequences and positions, as in vLLM.
    """
    trained = params["original_max_position_embeddings"]
    growth = params.get("factor", spec.trained / trained)
    factor = params.get("attention_factor")
    if factor is None:
        factor = 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(trained))
    if length > trained:
        log.warning(
            "longrope: contexts of up to %d tokens are served, so all of them have the frequencies of those over %d; "
            "transformers has others for shorter ones: worker.max_model_len %d serves those",
            *(length, trained, trained),
        )
    divisors = np.array(spec.long if length > trained else spec.short, np.float32)
    return _default(spec, params)[0] / divisors, np.float32(factor)


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}

"""Weights that need no file: what a test and the script that asked HF for its logits both make from a name."""

import zlib
from collections.abc import Mapping

import numpy as np


def random_tensor(name: str, shape: tuple[int, ...], seed: int, *, unit_norms: bool = False) -> np.ndarray:
    """float32; norms are around one (unit_norms: around zero), so that one that is left out shows."""
    drawn = np.random.default_rng([seed, zlib.crc32(name.encode())]).random(shape, np.float32) * 2 - 1
    if "norm" in name:
        return drawn / 2 + np.float32(0 if unit_norms else 1)
    return drawn * np.float32(0.35)


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], seed: int, *, unit_norms: bool = False
) -> dict[str, np.ndarray]:
    """One of each."""
    return {name: random_tensor(name, tuple(shape), seed, unit_norms=unit_norms) for name, shape in shapes.items()}

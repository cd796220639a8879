"""LoRA adapters on every projection of a reference checkpoint, and weights that compute what it does with one."""

from typing import Any

import numpy as np

from tests.reference.checkpoint import Weights

ALPHA = 8
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapter_config(rank: int) -> dict[str, Any]:
    """As PEFT saves it."""
    return {"r": rank, "lora_alpha": ALPHA, "target_modules": MODULES}


def adapter(base: Weights, seed: int, rank: int) -> Weights:
    """On every projection, as PEFT names it, large enough to change every token. base: whose shapes it has."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, weight in base.items():
        if name.endswith("_proj.weight"):
            module = "base_model.model." + name.removesuffix(".weight")
            rows, columns = weight.shape
            tensors[f"{module}.lora_A.weight"] = rng.standard_normal((rank, columns)).astype(np.float32) * 0.2
            tensors[f"{module}.lora_B.weight"] = rng.standard_normal((rows, rank)).astype(np.float32) * 0.2
    return tensors


def merged(base: Weights, changes: Weights) -> Weights:
    """Weights that compute what the base with this adapter does."""
    found = dict(base)
    for name in base:
        module = "base_model.model." + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in changes:
            a, b = (changes[f"{module}.lora_{half}.weight"] for half in "AB")
            found[name] = base[name] + (b @ a) * np.float32(ALPHA / len(a))
    return found

"""LoRA on the demo's model: A and B of every projection, and the weights that they make of the base."""

from typing import Any

import numpy as np
import paddle

RANK, ALPHA = 8, 16
CONFIG = {
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


class Adapter:
    """Trainable A and B. base: the frozen weights by HF name, Linear = [out, in]."""

    def __init__(self, base: dict[str, Any], seed: int) -> None:
        self._base = {name: weight.detach() for name, weight in base.items()}
        rng = np.random.default_rng(seed)
        self.halves: dict[str, Any] = {}
        for name, weight in base.items():
            if name.endswith("_proj.weight"):
                rows, columns = weight.shape
                module = name.removesuffix(".weight")
                bound = 1 / np.sqrt(columns)
                self.halves[f"{module}.lora_A"] = _parameter(rng.uniform(-bound, bound, (RANK, columns)))
                self.halves[f"{module}.lora_B"] = _parameter(np.zeros((rows, RANK)))

    def weights(self) -> dict[str, Any]:
        """By HF name, with gradients to A and B."""
        made = dict(self._base)
        for name, weight in self._base.items():
            module = name.removesuffix(".weight")
            if f"{module}.lora_A" in self.halves:
                product = paddle.matmul(self.halves[f"{module}.lora_B"], self.halves[f"{module}.lora_A"])
                made[name] = weight + product * (ALPHA / RANK)
        return made

    def state_dict(self) -> dict[str, Any]:
        """As PEFT names it."""
        return {f"base_model.model.{name}.weight": half.numpy() for name, half in self.halves.items()}


def _parameter(values: Any) -> Any:
    return paddle.to_tensor(values, dtype="float32", stop_gradient=False)

"""What the rows share: rounds of ratios, and how they are written down."""

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.push import source
from rollout_client import WeightPublisher

RESULTS = Path("benchmarks/results")


class Bits:
    """A bfloat16 tensor without a framework: what the publisher asks of one."""

    dtype = "bfloat16"

    def __init__(self, bits: np.ndarray) -> None:
        self._bits = bits
        self.shape = bits.shape

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return int(self._bits.ctypes.data)

    @property
    def strides(self) -> tuple[int, ...]:
        return self._bits.strides

    def contiguous(self) -> "Bits":
        return self

    def view(self, dtype: str) -> np.ndarray:
        return self._bits.view(dtype)

    def __dlpack__(self) -> Any:
        return self._bits.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def as_bf16(path: Path) -> tuple[dict[str, Bits], int]:
    """(the float32 source's first half as bfloat16 tensors of the same shapes, bytes)."""
    flat, tensors = source.read(path)
    bits = flat.view(np.uint16)
    held, start = {}, 0
    for name, tensor in tensors.items():
        piece = bits[start : start + tensor.size].reshape(tensor.shape)
        piece &= 0xBFFF  # no NaN and no infinity, whatever the random bits
        held[name] = Bits(piece)
        start += tensor.size
    return held, start * 2


class Pusher:
    """The same tensors again under the next version."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors
        self._version = 0

    def push(self, publisher: WeightPublisher) -> dict[str, float]:
        """Seconds, by stage and in all."""
        self._version += 1
        return publisher.push(self._tensors, self._version, timeout_s=300.0).seconds


def load() -> float:
    return round(os.getloadavg()[0], 2)


def middle(values: Any) -> float:
    return round(median(values), 3)


def write(name: str, result: dict[str, Any], ratios: dict[str, float], bars: dict[str, tuple[str, float]]) -> None:
    """Says each ratio beside its bar; writes push_NAME.json. bars: name -> (">=" or "<=", value)."""
    result |= {"cores": len(os.sched_getaffinity(0)), "median_ratios": ratios, "bars": bars}
    for key, value in ratios.items():
        sign, bar = bars[key]
        met = value >= bar if sign == ">=" else value <= bar
        print(f"{name}: {key} {value:.3f}, bar {sign} {bar}: {'met' if met else 'MISSED'}", flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"push_{name}.json").write_text(json.dumps(result, indent=2) + "\n")

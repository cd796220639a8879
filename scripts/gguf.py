"""Read a GGUF file: metadata and tensors dequantised to float32 with numpy.

Covers what llama.cpp's small Llama files use: F32, Q8_0 and Q4_1 blocks. Layout of a file (all little-endian):
header, key/value metadata, tensor table, then tensor data aligned to ``general.alignment`` (32 by default).
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32
"""Weights in one quantised block."""


class GgufFile:
    """One memory-mapped GGUF file. Raises ValueError for a file that is not GGUF v2/v3 or uses other block types."""

    def __init__(self, path: Path) -> None:
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._at = 0
        if bytes(self._data[:4]) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in {2, 3}:
            raise ValueError(f"{path}: GGUF version {version} is not supported")
        n_tensors, n_keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self._table: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(n_tensors):
            name = self._string()
            # GGUF lists the fastest-varying dimension first; numpy and HF list it last.
            dims = tuple(self._scalar("Q") for _ in range(self._scalar("I")))[::-1]
            self._table[name] = (dims, self._scalar("I"), self._scalar("Q"))
        align = int(self.metadata.get("general.alignment", 32))
        self._base = -(-self._at // align) * align

    def names(self) -> Iterator[str]:
        """Tensor names in file order."""
        return iter(self._table)

    def tensor(self, name: str) -> Float32:
        """One tensor as float32, in C order of its HF shape."""
        shape, kind, offset = self._table[name]
        count = int(np.prod(shape))
        start = self._base + offset
        if kind == _F32:
            return self._data[start : start + 4 * count].view(np.float32).reshape(shape).copy()
        blocks = count // _BLOCK
        if kind == _Q8_0:  # float16 scale, 32 int8
            raw = self._data[start : start + 34 * blocks].reshape(blocks, 34)
            scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
            return (raw[:, 2:].view(np.int8).astype(np.float32) * scale).reshape(shape)
        if kind == _Q4_1:  # float16 scale, float16 minimum, 16 bytes: low nibbles are weights 0-15, high ones 16-31
            raw = self._data[start : start + 20 * blocks].reshape(blocks, 20)
            scale, low = (raw[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
            quants = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1).astype(np.float32)
            return (quants * scale + low).reshape(shape)
        raise ValueError(f"{name}: GGUF block type {kind} is not supported (F32, Q8_0 and Q4_1 are)")

    def _scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from("<" + fmt, self._data.data, self._at)
        self._at += struct.calcsize(fmt)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        self._at += length
        return bytes(self._data[self._at - length : self._at]).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, length = self._scalar("I"), self._scalar("Q")
            return [self._value(inner) for _ in range(length)]
        return self._scalar(_SCALARS[kind])

"""The bytes that everybody moves: one file in shared memory, and an index of the tensors in it.

numpy alone, because peers read it in environments of their own.
"""

import json
import mmap
import os
from math import prod
from pathlib import Path

import numpy as np

Tensors = dict[str, np.ndarray]
BLOCK = 16 << 20


def write(directory: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Random float32 tensors, one after the other; the index lies beside the file. Returns the file."""
    path = directory / "source.bin"
    rng = np.random.default_rng(0)
    left = sum(prod(shape) for shape in shapes.values())
    with path.open("wb") as file:
        while left:
            count = min(left, BLOCK // 4)
            file.write(rng.random(count, np.float32))
            left -= count
    path.with_suffix(".json").write_text(json.dumps(shapes))
    return path


def read(path: Path) -> tuple[np.ndarray, Tensors]:
    """(all bytes, names -> tensors in them), mapped and in memory; written by nobody."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        mapping = mmap.mmap(descriptor, 0, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    flat = np.frombuffer(mapping, np.uint8)
    return flat, split(flat, path)


def split(flat: np.ndarray, path: Path) -> Tensors:
    """Bytes that lie as in the source, as its tensors."""
    tensors, start = {}, 0
    for name, shape in json.loads(path.with_suffix(".json").read_text()).items():
        stop = start + prod(shape) * 4
        tensors[name] = flat[start:stop].view(np.float32).reshape(shape)
        start = stop
    return tensors


def checksum(tensors: Tensors) -> int:
    """Equal for equal bytes under equal names, near enough for a transfer that went wrong."""
    total = 0
    for name in sorted(tensors):
        words = np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint32)
        total = (total * 31 + int(words.sum(dtype=np.uint64))) % (1 << 64)
    return total

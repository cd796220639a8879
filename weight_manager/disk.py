"""A checkpoint directory as a source of a version: the same plan as a trainer's push, copied from mapped files."""

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np

from rollout_client.copying import WIRE_DTYPE, move, slot_view, source_view
from rollout_client.protocol import Copy
from weight_manager.checkpoint import Tensor, TensorFile, weight_files
from weight_manager.errors import CheckpointError, PushRefused
from weight_manager.manifest import Layout
from weight_manager.plan import place, prove

log = logging.getLogger(__name__)

DERIVED = (".rotary_emb.inv_freq", ".attention.masked_bias", ".attention.bias")
"""Endings of buffers that old checkpoints carry and every engine computes by itself."""


class Loaded(NamedTuple):
    """What was written into a slot: the copies, the tensor of each, and the digest of what was read for it."""

    copies: list[Copy]
    names: list[str]
    digests: list[int]


Reader = Callable[[memoryview, Event], Loaded]
"""Fills a slot in a thread; stops with PushRefused "aborted" soon after the event is set."""


def read_checkpoint(directory: Path, layout: Layout, slot: memoryview, cancelled: Event) -> Loaded:
    """Copy a directory's tensors into a slot. Everything wrong with it is found before the first byte moves.

    Raises PlanError or CheckpointError listing tensors.
    """
    files = [TensorFile(path) for path in weight_files(directory)]
    try:
        tensors = _wanted([tensor for file in files for tensor in file.tensors()], layout)
        parts = [tensor.part for tensor in tensors]
        prove([parts], layout)
        copies = place(parts, layout)
        digests = [_copy(tensors[copy.part], copy, slot, cancelled) for copy in copies]
    finally:
        for file in files:
            file.close()
    return Loaded(copies, [parts[copy.part].name for copy in copies], digests)


def _copy(tensor: Tensor, copy: Copy, slot: memoryview, cancelled: Event) -> int:
    if cancelled.is_set():
        raise PushRefused("aborted", "the load was ended")
    tensor.file.prefetch(tensor)
    dtype = WIRE_DTYPE[tensor.part.dtype]
    flat = np.frombuffer(tensor.file.data, dtype, tensor.nbytes // dtype.itemsize, tensor.offset)
    return move(source_view(flat, copy), tensor.part.dtype, slot_view(slot, copy), copy.dst_dtype)


def _wanted(tensors: list[Tensor], layout: Layout) -> list[Tensor]:
    """Without derived buffers, and without the second copy of a tied tensor if it is equal to the first."""
    owner = {name: p.name for p in layout.manifest.parameters for name in (p.name, *p.aliases)}
    kept: dict[str, Tensor] = {}
    for tensor in tensors:
        name = owner.get(tensor.part.name, tensor.part.name)
        if name.endswith(DERIVED) and name not in owner:
            log.info("%s is computed, not loaded", name)
            continue
        first = kept.setdefault(name, tensor)
        if first is not tensor and not _equal(first, tensor):
            message = f"{tensor.file.path}: {tensor.part.name} is tied to {first.part.name} but holds other values"
            raise CheckpointError(message, [tensor.part.name], code="duplicate_tensor")
    return list(kept.values())


def _equal(a: Tensor, b: Tensor) -> bool:
    left, right = (memoryview(t.file.data)[t.offset : t.offset + t.nbytes] for t in (a, b))
    with left, right:
        return (a.part.dtype, a.part.shape) == (b.part.dtype, b.part.shape) and left == right

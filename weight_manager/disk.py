"""A checkpoint directory as a source of a version: the same plan as a trainer's push, read into its place."""

import logging
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_client.copying import WIRE_DTYPE, move, slot_view, source_view
from rollout_client.digest import digest_of
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


_COMPARED = 8 << 20
"""Bytes of two tensors compared at a time."""
Bytes = npt.NDArray[np.uint8]
Reader = Callable[[memoryview, Event], Loaded]
"""Fills a slot in a thread; stops with PushRefused "aborted" soon after the event is set."""


def read_checkpoint(directory: Path, layout: Layout, slot: memoryview, cancelled: Event) -> Loaded:
    """Copy a directory's tensors into a slot. Everything wrong with it is found before the first byte moves.

    Raises PlanError or CheckpointError listing tensors.
    """
    files: list[TensorFile] = []
    try:
        for path in weight_files(directory):
            files.append(TensorFile(path))  # noqa: PERF401  a failure has to close those that are open
        tensors = _wanted([tensor for file in files for tensor in file.tensors()], layout)
        parts = [tensor.part for tensor in tensors]
        prove([parts], layout)
        copies = place(parts, layout)
        scratch = np.empty(max((tensor.nbytes for tensor in tensors), default=0), np.uint8)
        digests: list[int] = []
        for part, group in groupby(copies, key=lambda copy: copy.part):
            if cancelled.is_set():
                raise PushRefused("aborted", "the load was ended")
            digests += _load(tensors[part], list(group), slot, scratch)
    finally:
        for file in files:
            file.close()
    return Loaded(copies, [parts[copy.part].name for copy in copies], digests)


def _load(tensor: Tensor, copies: list[Copy], slot: memoryview, scratch: Bytes) -> Iterator[int]:
    """Digests of a tensor's copies: one read straight into the slot where that is all, else through scratch."""
    targets = [slot_view(slot, copy) for copy in copies]
    if len(copies) == 1 and tensor.part.dtype == copies[0].dst_dtype and targets[0].flags.c_contiguous:
        target = targets[0].reshape(-1).view(np.uint8)
        tensor.file.read_into(target.data, tensor.offset)
        yield digest_of(target.data)
        return
    raw = scratch[: tensor.nbytes]
    tensor.file.read_into(raw.data, tensor.offset)
    flat = raw.view(WIRE_DTYPE[tensor.part.dtype])
    for copy, view in zip(copies, targets, strict=True):
        yield move(source_view(flat, copy), tensor.part.dtype, view, copy.dst_dtype)


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
            names = [first.part.name, tensor.part.name]
            message = f"{tensor.file.path}: {names[0]} and {names[1]} are tied, but hold different values"
            raise CheckpointError(message, names, code="duplicate_tensor")
    return list(kept.values())


def _equal(a: Tensor, b: Tensor) -> bool:
    if (a.part.dtype, a.part.shape) != (b.part.dtype, b.part.shape):
        return False
    left, right = bytearray(_COMPARED), bytearray(_COMPARED)
    for start in range(0, a.nbytes, _COMPARED):
        count = min(_COMPARED, a.nbytes - start)
        for tensor, buffer in ((a, left), (b, right)):
            tensor.file.read_into(memoryview(buffer)[:count], tensor.offset + start)
        if left[:count] != right[:count]:
            return False
    return True

"""A checkpoint directory as a source of a version: the same plan as a trainer's push, read into its place."""

import logging
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from threading import Event
from time import monotonic
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_client.copying import WIRE_DTYPE, move, slot_view, source_view
from rollout_client.digest import digest_of
from rollout_client.protocol import Copy
from weight_manager.checkpoint import Checkpoint, Tensor
from weight_manager.errors import PushRefused
from weight_manager.layout import Layout
from weight_manager.plan import place, prove
from weight_manager.redundant import wanted

log = logging.getLogger(__name__)

SAID_EVERY_S = 10.0
"""Seconds between two lines in the log about a load that goes on."""


class Loaded(NamedTuple):
    """What was written into a slot: the copies, the tensor of each, and the digest of what was read for it."""

    copies: list[Copy]
    names: list[str]
    digests: list[int]


class Loading:
    """One load, which a thread reads: how far it is, and whether it is to stop. Any thread may ask or stop it."""

    def __init__(self, what: str, nbytes: int) -> None:
        """what: is loaded, in words for the log. nbytes: of the whole slot, about as many as are to be read."""
        self._what = what
        self._nbytes = nbytes
        self._read = 0
        self._began = self._said = monotonic()
        self._stopped = Event()

    def __str__(self) -> str:
        seconds = max(monotonic() - self._began, 1e-3)
        return f"{self._read / 1e9:.3f} of {self._nbytes / 1e9:.3f} GB read, {self._read / seconds / 1e6:.1f} MB/s"

    def stop(self) -> None:
        """Nobody waits for it any more."""
        self._stopped.set()

    def goes_on(self, read: int = 0) -> None:
        """Note so many more bytes read, and say so now and then. Raises PushRefused "aborted" once stopped."""
        if self._stopped.is_set():
            raise PushRefused("aborted", "the load was ended")
        self._read += read
        now = monotonic()
        if now >= self._said + SAID_EVERY_S:
            self._said = now
            log.info("loading %s: %s", self._what, self)


Bytes = npt.NDArray[np.uint8]
Reader = Callable[[memoryview, Loading], Loaded]
"""Fills a slot in a thread, and asks often whether it `goes_on`."""


def read_checkpoint(directory: Path, layout: Layout, slot: memoryview, loading: Loading) -> Loaded:
    """Copy a directory's tensors into a slot. Everything wrong with it is found before the first byte moves.

    Raises PlanError or CheckpointError listing tensors.
    """
    owner = {name: p.name for p in layout.manifest.parameters for name in (p.name, *p.aliases)}
    with Checkpoint(directory) as checkpoint:
        tensors = wanted(checkpoint, owner)
        parts = [tensor.part for tensor in tensors]
        prove([parts], layout)
        copies = place(parts, layout)
        scratch = np.empty(max((tensor.nbytes for tensor in tensors), default=0), np.uint8)
        digests: list[int] = []
        for part, group in groupby(copies, key=lambda copy: copy.part):
            loading.goes_on()
            digests += _load(tensors[part], list(group), slot, scratch, loading)
    return Loaded(copies, [parts[copy.part].name for copy in copies], digests)


def _load(tensor: Tensor, copies: list[Copy], slot: memoryview, scratch: Bytes, loading: Loading) -> Iterator[int]:
    """Digests of a tensor's copies: one read straight into the slot where that is all, else through scratch."""
    targets = [slot_view(slot, copy) for copy in copies]
    if len(copies) == 1 and tensor.part.dtype == copies[0].dst_dtype and targets[0].flags.c_contiguous:
        target = targets[0].reshape(-1).view(np.uint8)
        tensor.file.read_into(target.data, tensor.offset, loading.goes_on)
        yield digest_of(target.data)
        return
    raw = scratch[: tensor.nbytes]
    tensor.file.read_into(raw.data, tensor.offset, loading.goes_on)
    flat = raw.view(WIRE_DTYPE[tensor.part.dtype])
    for copy, view in zip(copies, targets, strict=True):
        yield move(source_view(flat, copy), tensor.part.dtype, view, copy.dst_dtype)

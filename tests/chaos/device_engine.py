"""Paddle's engine over weights in memory of its own, which stands for a GPU's: slots, filling and proofs are those of
worker/gpu, and what is computed is the same to the bit.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.memfd_device import HostDigests, MemfdDriver, MemfdPuller
from weight_manager.dynamic_weight_manager import Spans
from weight_manager.families import manifest_for
from weight_manager.layout import ITEMSIZE, make_layout
from weight_manager.messages import Live
from worker.config import WorkerConfig
from worker.engine.paddle_engine import PaddleEngine
from worker.gpu.filling import Filling
from worker.gpu.weights import DeviceSlots, Staged, placement

Views = Mapping[str, npt.NDArray[Any]]


class DeviceEngine(PaddleEngine):
    """`SupportsStage`, `CopiesAhead` and `TakesFromTrainers`, of one rank."""

    def __init__(self, config: WorkerConfig, hf_config: dict[str, Any], rank: int) -> None:
        if config.tp != 1:
            raise ValueError("tp is 1 where chaos has devices")
        layout = make_layout(manifest_for(hf_config, config.dtype), config.tp)
        super().__init__(config, layout.manifest, None, rank)
        driver = MemfdDriver()
        self._slots = DeviceSlots(driver, placement(layout, rank))
        self._filling = Filling(self._slots, HostDigests(layout), MemfdPuller(driver))

    def take_at(self, socket: Path, asked: Callable[[], None]) -> None:
        self._filling.listen(socket, asked)

    def stage(self, live: Live, views: Views, regions: Sequence[int] = ()) -> object:
        staged = self._filling.stage(live, views, regions)
        return staged, super().prepare(self._own(staged, views))

    def copy_ahead(self, key: tuple[int, int], memory: memoryview, spans: Spans) -> None:
        self._filling.copy_ahead(key, memory, spans)

    def read(self, handle: Any, name: str) -> npt.NDArray[Any]:
        return self._slots.read(handle[0], name, ITEMSIZE[self._dtype])

    def bind(self, prepared: object | None) -> None:
        staged, handle = prepared if isinstance(prepared, tuple) else (None, None)
        super().bind(handle)
        if staged is None:
            self._filling.withdraw()
        else:
            self._slots.bind(staged)

    def _own(self, staged: Staged, views: Views) -> Views:
        """The same tensors where they lie on the device. views: of the arena's slot."""
        there = self._slots.tensors(staged.slot)
        found = {}
        for name, view in views.items():
            memory = (ctypes.c_ubyte * view.nbytes).from_address(there[name].address)
            found[name] = np.frombuffer(memory, view.dtype).reshape(view.shape)
            found[name].flags.writeable = False
        return found

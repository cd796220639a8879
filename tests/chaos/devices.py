"""Devices for a chaos run, whose memory is memfds (tests/memfd_device.py).

Ranks compute with weights that lie there (device_engine.py), the trainer's versions go live from there before the arena
has them, and a process copies from there into the arena where the trainer dies.
"""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollout_client import publisher, shm_transport
from rollout_client.copying import source_view
from rollout_client.cuda_copy import COMMIT_S, Job
from rollout_client.digest import digest_of
from rollout_client.offers import Offers
from rollout_client.own_memory import Run
from rollout_client.protocol import Part
from rollout_client.tensors import Named, Source, sources
from rollout_client.transport import Reporter
from tests.memfd_device import MemfdCuda
from worker.config import WorkerConfig

ENGINE = "worker.engine=tests.chaos.devices:made"
"""For `serve --set`."""
LIBCUDA = Path(__file__).parents[1] / "faults" / "memfd_cuda"
"""For PYTHONPATH of a service: NVIDIA's library in its processes."""


def environment() -> dict[str, str]:
    """Of a service on such devices."""
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(LIBCUDA), os.environ.get("PYTHONPATH", "")))}


def made(config: WorkerConfig, hf_config: dict[str, Any], rank: int) -> tuple[Any, None]:
    """A `worker.boot.EngineMaker`."""
    from worker.cpu.tuning import load_paddle, tune
    from worker.device import select_cpu

    tune(config.threads, config.ranks_on_host)
    load_paddle()
    select_cpu()
    from tests.chaos.device_engine import DeviceEngine

    return DeviceEngine(config, hf_config, rank), None


def lie_on_device() -> None:
    """What this process pushes through shared memory lies on its device from now on."""
    publisher.sources = _on_device
    shm_transport.CudaCopier = Copier  # type: ignore[assignment,misc]


def _on_device(named: Named, known: Mapping[str, Part]) -> list[Source]:
    return [msgspec.structs.replace(source, on_gpu=source.data) for source in sources(named, known)]


class Copier:
    """Stands for rollout_client.cuda_copy.CudaCopier: it fills ranks first, then the arena's slot."""

    def __init__(self) -> None:
        self._cuda = MemfdCuda()
        self._offers = Offers(self._cuda)
        self._allocated: dict[int, Run] = {}  # by number of a copy: a trainer's tensors stay where they are

    def stage(
        self,
        slot: int,
        memory: memoryview,
        writable: Callable[[], AbstractContextManager[object]],
        jobs: Sequence[Job],
        reporter: Reporter,
        ranks: tuple[Sequence[str], int] = ((), 0),
        *,
        ahead: bool = False,
    ) -> int:
        """As the real one."""
        pieces = {
            number: (copy, np.ascontiguousarray(source_view(source.load(), copy)))
            for source, copies in jobs
            for number, copy in copies
        }
        digests = {number: digest_of(piece.data) for number, (_, piece) in pieces.items()}
        filled = 0
        if ranks[0]:
            runs = [
                self._on_device(number, copy.dst_offset * piece.itemsize, piece)
                for number, (copy, piece) in pieces.items()
            ]
            self._offers.begin(ranks[0], slot, ranks[1])
            self._offers.take(runs, last=True, through=ahead)
            filled = self._offers.taken()
            if ahead and self._offers.whole:
                reporter.go_ahead(list(digests.items()))
                reporter.pause_for_live(COMMIT_S)
            self._offers.end()
        target = np.frombuffer(memory, np.uint8)
        for number, (copy, piece) in pieces.items():
            at = copy.dst_offset * piece.itemsize
            with writable():
                ctypes.memmove(target.ctypes.data + at, piece.ctypes.data, piece.nbytes)
            reporter.moved(piece.nbytes)
            reporter.written(number, digests[number], piece.nbytes)
            reporter.turn()
        return filled

    def _on_device(self, number: int, target: int, piece: Any) -> Run:
        run = self._allocated.get(number)
        if run is None or (run.start, run.nbytes) != (target, piece.nbytes):
            run = self._allocated[number] = Run(target, self._cuda.allocate(piece.nbytes), piece.nbytes)
        ctypes.memmove(run.address, piece.ctypes.data, piece.nbytes)
        return run

    def foresee(self, jobs: Sequence[Job]) -> None:
        """Nothing is hashed before it is asked for."""

    def settle(self) -> None:
        """So nothing is under way."""

    def unshare(self) -> None:
        """As the real one."""
        self._offers.close(wait=True)

    def close(self) -> None:
        """As the real one."""
        self._offers.close()

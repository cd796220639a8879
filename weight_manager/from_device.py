"""Fills a slot of the arena from a rank's device memory: a process of its own, since the store itself has no CUDA.

The store starts it when a version is live from device memory and its trainer does not bring it into the arena (ADR 23):
`python -m weight_manager.from_device` with a `Task` as JSON on standard input, and the descriptor of the memory left
open. It exits with 0 once every byte is there; nothing is checked here, the store computes the digest of the slot. As
any writer it holds the slot's lock meanwhile (rollout_client/slot_lock.py): it may outlive the store.
"""

import ctypes
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollout_client import slot_lock
from rollout_client.arena_file import ArenaFile
from rollout_client.device_memory import CudaCallFailed, MappedMemory, call
from rollout_client.errors import ArenaError


class Task(msgspec.Struct, frozen=True):
    """What is to be copied: runs of (start in the arena's slot, start in the memory, bytes)."""

    arena: str
    slot: int
    write_epoch: int  # of the slot; another one: it is not to be filled any more
    fd: int
    nbytes: int  # of the memory
    runs: list[tuple[int, int, int]]


def main() -> int:
    """0 = every byte is in the slot."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        call(cuda, "cuInit", 0)
        with ArenaFile(Path(task.arena), write=True) as arena:
            locked = slot_lock.lock_shared(arena.fd, arena.slot_offset(task.slot), arena.slot_bytes)
            if not locked or arena.write_epoch(task.slot) != task.write_epoch:
                raise ArenaError(f"slot {task.slot} was given away")
            fill(cuda, task, np.frombuffer(arena.slot(task.slot), np.uint8).ctypes.data)
    except (ArenaError, CudaCallFailed, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def fill(cuda: Any, task: Task, slot: int) -> None:
    """Copy every run to where it lies in the slot, which begins at that address. Raises CudaCallFailed."""
    memory = _mapped(cuda, task)
    for start, at, nbytes in task.runs:
        source, size = ctypes.c_uint64(memory.address + at), ctypes.c_size_t(nbytes)
        call(cuda, "cuMemcpyDtoH_v2", ctypes.c_void_p(slot + start), source, size)
    memory.unmap()


def _mapped(cuda: Any, task: Task) -> MappedMemory:
    """The memory, on the device that it is of: a device can read from its neighbours' at best, so each is tried."""
    count = ctypes.c_int()
    call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    failure = CudaCallFailed("no GPU is visible here")
    for ordinal in range(count.value):
        device, context = ctypes.c_int(), ctypes.c_void_p()
        call(cuda, "cuDeviceGet", ctypes.byref(device), ordinal)
        call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call(cuda, "cuCtxSetCurrent", context)
        try:
            return MappedMemory(cuda, task.fd, task.nbytes)
        except CudaCallFailed as error:
            failure = error
    raise failure


if __name__ == "__main__":
    sys.exit(main())

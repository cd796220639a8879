"""verl 0.9.1's bucketed transfer through shared memory; the bucket holds the largest tensor. torch with one thread.

VERL_DIR names the unpacked wheel. Its package is not imported, for that wants Ray and more: two of its modules are
stood in for, one that says the device is the CPU and one that makes an iterator asynchronous.
"""

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.push import source
from benchmarks.push.peers.pair import Meeting, main

FILE = "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py"


def load() -> Any:
    torch.set_num_threads(1)
    device, rollout = ModuleType("verl.utils.device"), ModuleType("verl.workers.rollout.utils")
    nothing = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None, ipc_collect=lambda: None)
    vars(device).update(
        get_device_id=lambda: 0,
        get_device_name=lambda: "cpu",
        get_torch_device=lambda: nothing,
        is_support_ipc=lambda: False,
    )
    vars(rollout).update(ensure_async_iterator=one_by_one)
    sys.modules |= {name: ModuleType(name) for name in ("verl", "verl.utils", "verl.workers", "verl.workers.rollout")}
    sys.modules |= {"verl.utils.device": device, "verl.workers.rollout.utils": rollout}
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer", Path(os.environ["VERL_DIR"]) / FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def one_by_one(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def handle(meeting: Meeting) -> str:
    return f"ipc://{meeting.scratch}/verl"


class Sender:
    def __init__(self, meeting: Meeting) -> None:
        self._module, self._handle = load(), handle(meeting)
        self._tensors = {name: torch.from_numpy(a) for name, a in source.read(meeting.path)[1].items()}
        largest = max(t.nbytes for t in self._tensors.values())
        self._bucket_mb = max(384, (largest >> 20) + 1)

    def send(self) -> None:
        sender = self._module.BucketedWeightSender(self._handle, self._bucket_mb, use_shm=True)
        asyncio.run(sender.async_send_weights(self._tensors.items()))


class Receiver:
    def __init__(self, meeting: Meeting) -> None:
        self._module, self._handle = load(), handle(meeting)
        self._held: dict[str, np.ndarray] = {
            name: np.zeros(a.shape, np.float32) for name, a in source.read(meeting.path)[1].items()
        }

    def receive(self) -> source.Tensors:
        receiver = self._module.BucketedWeightReceiver(self._handle, torch.device("cpu"), use_shm=True)

        def keep(weights: list[tuple[str, torch.Tensor]], is_last: bool = False) -> None:
            for name, tensor in weights:
                torch.from_numpy(self._held[name]).copy_(tensor)

        receiver.receive_weights(keep)
        return dict(self._held)


if __name__ == "__main__":
    main(Sender, Receiver)

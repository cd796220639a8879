"""A real device: what goes live from its memory before the arena has it, and a trainer that dies in between."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from tests.faults import small_model
from tests.faults.device_replica import DeviceReplica
from tests.faults.small_model import LAYOUT
from tests.faults.store_process import Store
from tests.faults.waiting import until
from worker.gpu.digests import DeviceDigests
from worker.gpu.trainer_memory import Puller
from worker.gpu.weights import placement

PUSHES = """
import json, logging, sys
import torch
from rollout_client.publisher import WeightPublisher
from tests.faults import small_model

logging.basicConfig(level=logging.WARNING, format="warning: %(message)s")
endpoint, dtype, *versions = sys.argv[1:]
with WeightPublisher(endpoint, run_id="run", transport="cuda_ipc", durability="device") as publisher:
    for version in map(int, versions):
        tensors = small_model.weights(version).items()
        held = {name: torch.from_numpy(array).to("cuda", getattr(torch, dtype)) for name, array in tensors}
        report = publisher.push(held, version)
        ahead = 0 < report.live_s < report.seconds["total"]
        print(json.dumps([report.version, report.digest, report.filled, report.safe, ahead]), flush=True)
"""
DIES = """
import os, signal, sys
import torch
from rollout_client.cuda_copy import CudaCopier
from rollout_client.publisher import WeightPublisher
from rollout_client.transport import Reporter
from tests.faults import small_model

def dies(self, *given):
    next(one for one in given if isinstance(one, Reporter)).await_live()
    os.kill(os.getpid(), signal.SIGKILL)

CudaCopier._copy = CudaCopier._copy_made = dies
tensors = {name: torch.from_numpy(array).cuda() for name, array in small_model.weights(1).items()}
WeightPublisher(sys.argv[1], run_id="run", transport="cuda_ipc", durability="device").push(tensors, 1)
"""


@pytest.fixture
def store(tmp_path, driver):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(small_model.CONFIG))
    save_file(small_model.weights(0), model / "model.safetensors")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as arena:
        store = Store(tmp_path / "run", model, Path(arena), lease_s=10.0)
        yield store.wait_live()
        store.close()


@pytest.fixture
def rank(store, driver):
    digests = DeviceDigests(driver, LAYOUT, placement(LAYOUT, 0))
    rank = DeviceReplica(store, driver=driver, digests=digests, puller=Puller(driver))
    until(lambda: store.status().replicas.get("0", {}).get("ready"))
    yield rank
    rank.close()


def pushed(store, dtype, *versions):
    """What a trainer, a process of its own as its memory has to be another's, reports of each push."""
    command = [sys.executable, "-c", PUSHES, store.endpoint, dtype, *map(str, versions)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "warning: " not in done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_push_is_live_from_the_device_first(store, rank, device):
    wanted = {version: small_model.digest_of(small_model.weights(version)) for version in (1, 2, 3)}
    assert pushed(store, "float32", 1, 2, 3) == [[v, digest, 1, True, True] for v, digest in wanted.items()]
    assert rank.served() == store.serving() == (3, wanted[3])
    assert store.status().counters["commits_ahead"] == 3


def test_weights_of_another_dtype_are_cast_for_both(store, rank, device):
    import torch

    held = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in small_model.weights(1).items()}
    wanted = small_model.digest_of({name: tensor.float().numpy() for name, tensor in held.items()})
    assert pushed(store, "bfloat16", 1) == [[1, wanted, 1, True, True]]
    assert rank.served() == store.serving() == (1, wanted)
    assert store.status().counters["commits_ahead"] == 1


def test_a_trainer_that_is_killed_before_the_arena_has_it_loses_nothing(store, rank, device):
    trainer = subprocess.run([sys.executable, "-c", DIES, store.endpoint], env=os.environ, check=False, timeout=120)
    assert trainer.returncode == -signal.SIGKILL
    began = time.monotonic()
    assert store.status().live.version == 1
    status = until(lambda: (status := store.status()).ahead is None and status, seconds=60)
    print(f"in the arena {time.monotonic() - began:.2f} s after its trainer's death")
    assert store.serving() == rank.served() == (1, small_model.digest_of(small_model.weights(1)))
    assert status.counters["rescued"] == 1

"""Weights that are NaN or infinite: refused by name if the store is told so, else warned of."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout_client import errors
from rollout_client.publisher import WeightPublisher
from tests.faults.small_model import ADAPTER_CONFIG, adapter

VALUES = [np.nan, -np.inf]
RANK = 64
CONFIG = ADAPTER_CONFIG | {"r": RANK}
"""Of an adapter whose tensors have more elements than their ends."""


def spoiled(tensors, name, at, value):
    changed = {key: tensor.copy() for key, tensor in tensors.items()}
    changed[name].reshape(-1)[at] = value
    return changed


def counted(store):
    return store.status().counters["non_finite"]


@pytest.mark.parametrize("store_config", [{"refuse_non_finite": True, "dtype": d} for d in ("float32", "bfloat16")])
@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("value", VALUES)
def test_they_are_refused_by_name(store, push, weights, transport, value):
    push(weights(1), 1)
    before = store.status().live
    name = sorted(weights(2))[-1]
    middle = weights(2)[name].size // 2
    with pytest.raises(errors.InvalidPush, match=name) as refusal:
        push(spoiled(weights(2), name, middle, value), 2, transport=transport)
    assert (refusal.value.code, refusal.value.tensors) == ("non_finite", [name])
    assert store.status().live == before
    assert counted(store) == 1
    assert push(weights(2), 2, transport=transport).version == 2


@pytest.mark.parametrize("value", VALUES)
def test_a_diverged_training_is_warned_of(store, push, weights, value):
    name = sorted(weights(2))[-1]
    push(weights(1), 1)
    assert counted(store) == 0
    push(spoiled(weights(2), name, slice(None), value), 2)
    assert counted(store) == 1
    lines = [json.loads(line) for line in (store.run_dir / "log").read_text().splitlines() if line.startswith("{")]
    (warning,) = [line for line in lines if "NaN or infinite" in line["message"]]
    assert (warning["level"], warning["tensors"]) == ("warning", [name])


@pytest.fixture
def push_adapter(store, replica, run):
    replica(0)
    with WeightPublisher(store.endpoint, run_id=run) as publisher:
        yield lambda tensors, version: publisher.push_adapter("policy-a", tensors, CONFIG, version)


def spoiled_adapter(value):
    """In the middle of a tensor, and (its name, the same as the store knows it)."""
    tensors = adapter(2, RANK)
    name = max(tensors, key=lambda name: tensors[name].size)
    known = name.removeprefix("base_model.model.").removesuffix(".weight")
    return spoiled(tensors, name, tensors[name].size // 2, value), known


@pytest.mark.parametrize("store_config", [{"refuse_non_finite": True}])
@pytest.mark.parametrize("value", VALUES)
def test_an_adapter_that_holds_them_is_refused_by_name(store, push_adapter, value):
    push_adapter(adapter(1, RANK), 1)
    tensors, name = spoiled_adapter(value)
    with pytest.raises(errors.InvalidPush, match=name) as refusal:
        push_adapter(tensors, 2)
    assert (refusal.value.code, refusal.value.tensors) == ("non_finite", [name])
    assert [a["version"] for a in store.status().adapters] == [1]
    assert counted(store) == 1
    assert push_adapter(adapter(2, RANK), 2).version == 2


@pytest.mark.parametrize("value", VALUES)
def test_an_adapter_that_holds_one_anywhere_is_warned_of(store, push_adapter, value):
    tensors, name = spoiled_adapter(value)
    push_adapter(tensors, 1)
    assert counted(store) == 1
    lines = [json.loads(line) for line in (store.run_dir / "log").read_text().splitlines() if line.startswith("{")]
    (warning,) = [line for line in lines if "NaN or infinite" in line["message"]]
    assert (warning["level"], warning["tensors"]) == ("warning", [name])


def test_a_checkpoint_that_holds_them_is_not_served(launch, model, tmp_path, weights):
    directory = tmp_path / "sick"
    shutil.copytree(model, directory)
    name = sorted(weights(0))[0]
    save_file(spoiled(weights(0), name, 3, np.nan), directory / "model.safetensors")
    store = launch(model=directory, refuse_non_finite=True)
    assert store.process.wait(20) != 0
    assert f"infinite: {name}" in (store.run_dir / "log").read_text()

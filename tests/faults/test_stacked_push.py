"""Pushes of what a trainer's modules hold stacked (Phi-3: one product for q, k and v, one for gate and up)."""

import json

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

from rollout_client.publisher import WeightPublisher
from tests.faults.small_model import CONFIG
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, version_digest

PHI3 = CONFIG | {"architectures": ["Phi3ForCausalLM"]}
LAYOUT = make_layout(manifest_for(PHI3, "float32"), 1)
STACKS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def apart(seed):
    """As the service has them."""
    rng = np.random.default_rng(seed)
    return {p.name: rng.standard_normal(p.shape, dtype=np.float32) for p in LAYOUT.manifest.parameters}


def stacked(tensors):
    """As `state_dict` of the torch module has them."""
    made = dict(tensors)
    for layer in range(2):
        for half, stack in (("self_attn", "qkv_proj"), ("mlp", "gate_up_proj")):
            names = [f"model.layers.{layer}.{half}.{member}.weight" for member in STACKS[stack]]
            made[f"model.layers.{layer}.{half}.{stack}.weight"] = np.concatenate([made.pop(name) for name in names])
    return made


def digest(tensors):
    """What the store must call it: computed here from the tensors alone."""
    digests = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(tensors[r.name]).data) for r in LAYOUT.regions]
    return version_digest(LAYOUT, digests)


@pytest.fixture
def store(launch, tmp_path):
    """Begins with a file of the hub, which holds them stacked, too."""
    directory = tmp_path / "phi3"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(PHI3))
    save_file(stacked(apart(0)), directory / "model.safetensors")
    return launch(model=directory).wait_live()


@pytest.mark.parametrize("settings", [{"transport": "shm"}, {"transport": "zmq"}, {"transport": "zmq", "delta": True}])
def test_what_a_module_holds_is_pushed_whole_in_part_and_as_a_delta(store, settings):
    assert store.status().live.digest == digest(apart(0)), "the checkpoint"
    with WeightPublisher(store.endpoint, run_id="run", progress=False, **settings) as publisher:
        tensors = apart(5)
        first = publisher.push(stacked(tensors), 1, timeout_s=10)
        assert first.digest == store.status().live.digest == digest(tensors)
        changed = {name: value.copy() for name, value in tensors.items()}
        for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"):
            changed[name][3, 5:9] += 1
        second = publisher.push(stacked(changed), 2, timeout_s=10)
        assert second.digest == digest(changed)
        assert (second.sent < first.sent / 30) == settings.get("delta", False)
        # Apart, and then one stack of another version on top.
        assert publisher.push(tensors, 3, timeout_s=10).digest == digest(tensors)
        name = "model.layers.1.self_attn.qkv_proj.weight"
        third = publisher.push({name: stacked(changed)[name]}, 4, base_version=3, timeout_s=10)
        own = {f"model.layers.1.self_attn.{member}.weight" for member in STACKS["qkv_proj"]}
        assert third.digest == digest(tensors | {n: changed[n] for n in own})

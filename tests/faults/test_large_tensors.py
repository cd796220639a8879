"""Tensors that threads share on both sides: the same version whatever way they took, and one wrong byte is found."""

import json

import numpy as np
import pytest

from rollout_client import protocol as wire
from rollout_client.digest import PIECE
from tests.faults.small_model import CONFIG
from weight_manager.families import manifest_for

LARGE = CONFIG | {"vocab_size": 5 * PIECE // 256 + 1}
EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    return {p.name: rng.random(p.shape, np.float32) for p in manifest_for(LARGE, "float32").parameters}


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "large"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LARGE))
    return directory


@pytest.fixture
def store_config():
    return {"load_weights": False, "push_endpoint": "tcp://127.0.0.1:*", "lease_s": 10.0}


@pytest.fixture
def store(launch, store_config, model, until):
    store = launch(model=model, **store_config)
    until((store.run_dir / "push_endpoint").exists)
    return store


def test_every_way_makes_the_same_version(store, push, tensors, monkeypatch):
    assert tensors[EMBED].nbytes > 5 * PIECE
    near = push(tensors, 1, transport="shm", timeout_s=30)
    far = push(tensors, 2, transport="zmq", timeout_s=30)
    monkeypatch.setattr("rollout_client.zmq_transport.ZmqTransport._data_socket", lambda self, placement: None)
    frames = push(tensors, 3, transport="zmq", timeout_s=30)
    assert near.digest == far.digest == frames.digest


@pytest.mark.parametrize("where", [0, 3 * PIECE + 7, -1])
def test_one_wrong_byte_is_found(store, trainer, push, tensors, where):
    assert push(tensors, 1, transport="shm", timeout_s=30).version == 1
    t = trainer("other")
    placement = t.begin(tensors, 2)
    digests = t.write()
    with t.slot() as slot:
        copy = next(c for c in placement.copies if list(tensors)[c.part] == EMBED)
        start = copy.dst_offset * 4
        slot[start + where % tensors[EMBED].nbytes] ^= 1
    t.say(wire.Written(placement.session, digests))
    answer = t.ask(wire.Seal(placement.session))
    assert (answer.code, answer.tensors) == ("checksum_mismatch", [EMBED])
    assert push(tensors, 3, run_id="other", transport="shm", timeout_s=30).version == 3

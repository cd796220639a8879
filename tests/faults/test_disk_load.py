"""Checkpoint directories as the next version: the same all or nothing as a trainer's push."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout_client import protocol as wire
from weight_manager import messages

NORM = "model.norm.weight"


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


@pytest.fixture
def store(launch, root):
    return launch(disk_roots=[str(root)]).wait_live()


@pytest.fixture
def load(store, root):
    def ask(name, call="c", **fields):
        return store.ask(messages.LoadDisk(call, str(root / name), **fields))

    return ask


@pytest.fixture
def save(root):
    def write(name, tensors):
        (root / name).mkdir()
        save_file(tensors, root / name / "model.safetensors")
        return root / name / "model.safetensors"

    return write


def test_a_directory_becomes_the_next_version(store, replica, load, save, weights, digest_of):
    r = replica()
    save("one", weights(5))
    result = load("one")
    assert result.ok, result
    assert (result.data["version"], result.data["replicas"]) == (1, 1)
    assert store.serving() == r.served() == (1, digest_of(weights(5)))
    assert store.status().last_push["source"] == "disk"


def test_a_sharded_directory_is_one_version(store, root, load, weights, digest_of):
    tensors = weights(5)
    (root / "two").mkdir()
    names = list(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({n: tensors[n] for n in held}, root / "two" / file)
    index = {"weight_map": {n: file for file, held in files.items() for n in held}}
    (root / "two" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load("two", version=4, run_id="disk run").ok
    assert store.serving() == (4, digest_of(tensors))
    assert store.status().live.run_id == "disk run"
    refused = load("two", version=3)
    assert (refused.ok, refused.code) == (False, "stale_version")


def test_half_floats_are_widened_exactly(store, save, load, weights, digest_of):
    half = {n: t.astype(np.float16) for n, t in weights(5).items()}
    save("half", half)
    assert load("half").ok
    assert store.serving() == (1, digest_of({n: t.astype(np.float32) for n, t in half.items()}))


def test_a_tied_head_may_be_there_twice_if_it_is_the_same(store, save, load, weights, digest_of):
    tensors = weights(5)
    embed = tensors["model.embed_tokens.weight"]
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    save("tied", tensors | {"lm_head.weight": embed.copy()} | buffers)
    assert load("tied").ok
    save("untied", tensors | {"lm_head.weight": embed + 1})
    refused = load("untied")
    assert (refused.code, refused.tensors) == ("duplicate_tensor", ["lm_head.weight", "model.embed_tokens.weight"])
    assert store.serving() == (1, digest_of(tensors))


@pytest.mark.parametrize(
    ("spoil", "code", "named"),
    [
        (lambda w: {n: t for n, t in w.items() if n != NORM}, "missing_tensor", [NORM]),
        (lambda w: w | {NORM: np.zeros(65, np.float32)}, "shape_mismatch", [NORM]),
        (lambda w: w | {NORM: np.zeros(64, np.int64)}, "dtype_mismatch", [NORM]),
        (lambda w: w | {"model.extra": np.zeros(2, np.float32)}, "unknown_tensor", ["model.extra"]),
    ],
)
def test_wrong_tensors_are_refused_by_name(store, push, save, load, weights, digest_of, spoil, code, named):
    push(weights(1), 1)
    save("bad", spoil(weights(9)))
    result = load("bad")
    assert (result.ok, result.code, result.tensors) == (False, code, named)
    assert store.serving() == (1, digest_of(weights(1)))
    save("good", weights(2))
    assert load("good").data["version"] == 2
    assert store.serving() == (2, digest_of(weights(2)))


def truncate(path):
    os.truncate(path, path.stat().st_size - 4)


def lie_about_the_header(path):
    with path.open("r+b") as file:
        file.write((1 << 40).to_bytes(8, "little"))


def garble_the_header(path):
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"[[[[")


def empty(path):
    path.write_bytes(b"")


def fifo(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [truncate, lie_about_the_header, garble_the_header, empty, fifo])
def test_a_damaged_file_is_refused_in_time(store, save, load, weights, digest_of, within, spoil):
    spoil(save("bad", weights(9)))
    with within(2):
        result = load("bad")
    assert (result.ok, result.code) == (False, "io")
    assert "model.safetensors" in result.message
    assert store.serving() == (0, digest_of(weights(0)))
    save("good", weights(2))
    assert load("good").ok


def test_only_configured_roots_are_read(store, root, load, save, weights, tmp_path, digest_of):
    outside = save("one", weights(5)).parent.rename(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    (root / "files").mkdir()
    (root / "files" / "model.safetensors").symlink_to(outside / "model.safetensors")
    for name in ("../outside", "link", "files", "/etc"):
        result = load(name)
        assert (result.ok, result.code) == (False, "refused"), name
    assert load("nothing").code == "io"
    assert load("one\0").code == "bad_message"
    assert store.serving() == (0, digest_of(weights(0)))


def test_the_directory_may_go_once_the_answer_is_there(store, root, load, save, weights, digest_of):
    save("one", weights(5))
    assert load("one").ok
    shutil.rmtree(root / "one")
    assert store.serving() == (1, digest_of(weights(5)))


def test_a_load_waits_for_nobody(store, trainer, load, save, weights):
    placement = trainer().begin(weights(9), 1)
    save("one", weights(5))
    result = load("one")
    assert (result.ok, result.code) == (False, "busy")
    assert isinstance(placement, wire.Placement)


def test_a_replica_that_refuses_is_named_to_the_operator(store, replica, load, save, weights, digest_of):
    r = replica(prepare="no")
    save("one", weights(5))
    result = load("one")
    assert (result.ok, result.code, result.tensors) == (False, "refused", [NORM])
    assert "replica 0 rank 0" in result.message
    assert store.serving() == r.served() == (0, digest_of(weights(0)))

"""What checkpoints hold twice or for nothing: left out where nothing is lost, else refused by file and tensor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weight_manager.checkpoint import Checkpoint, below_roots, read_config
from weight_manager.errors import CheckpointError
from weight_manager.redundant import wanted

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
OWNER = {EMBED: EMBED, HEAD: EMBED, NORM: NORM}
VALUES = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
EXACT = np.array([[0.5, -2.0], [3.0, 65504.0]], np.float32)  # in every dtype, but the last: not in bfloat16
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def bf16(values: np.ndarray) -> tuple[str, np.ndarray]:
    bits = values.view(np.uint32)
    return "BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def f16(values: np.ndarray) -> tuple[str, np.ndarray]:
    return "F16", values.astype("<f2")


def f32(values: np.ndarray) -> tuple[str, np.ndarray]:
    return "F32", values


def save(path: Path, **tensors: Any) -> None:
    """A safetensors file. Names with __ for dots; arrays, or (dtype, bits)."""
    header, data = {}, b""
    for key, value in tensors.items():
        dtype, array = value if isinstance(value, tuple) else f32(value)
        raw = array.tobytes()
        header[key.replace("__", ".")] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def index(path: Path, **files: str) -> None:
    mapped = {key.replace("__", "."): f"{file}.safetensors" for key, file in files.items()}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapped}))


def loaded(path: Path) -> dict[str, str]:
    """Name -> dtype of what would be read."""
    with Checkpoint(path) as checkpoint:
        return {tensor.part.name: tensor.part.dtype for tensor in wanted(checkpoint, OWNER)}


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        loaded(path)
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        *(f"model.layers.0.self_attn.rotary_emb.{table}" for table in ("inv_freq", "cos_cached", "sin_cached")),
        "model.rotary_emb.inv_freq",
        "rotary_emb.original_inv_freq",
        "inv_freq",
        "transformer.h.0.attn.masked_bias",
        "gpt_neox.layers.0.attention.bias",
    ],
)
def test_computed_buffers_are_left_out(tmp_path: Path, name: str) -> None:
    save(tmp_path / "model.safetensors", **{NORM: VALUES, name: VALUES[0]})
    assert loaded(tmp_path) == {NORM: "float32"}


def test_what_is_served_is_never_left_out(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", **{NORM: VALUES, "a.inv_freq": VALUES[0], "model.freq": VALUES[0]})
    with Checkpoint(tmp_path) as checkpoint:
        found = wanted(checkpoint, OWNER | {"a.inv_freq": "a.inv_freq"})
        assert {tensor.part.name for tensor in found} == {NORM, "a.inv_freq", "model.freq"}


@pytest.mark.parametrize(
    ("embed", "head", "kept"),
    [
        (f32(VALUES), f32(VALUES), "float32"),
        (f32(VALUES), f16(VALUES), "float32"),
        (f32(VALUES), bf16(VALUES), "float32"),
        (f16(VALUES), f32(VALUES), "float32"),
        (bf16(VALUES), f32(VALUES), "float32"),
        (f32(np.float32([[np.nan, np.inf, 1e30]])), f16(np.float32([[np.nan, np.inf, np.inf]])), "float32"),
        (f16(EXACT), bf16(EXACT), "float16"),
        (bf16(EXACT[:1]), f16(EXACT[:1]), "bfloat16"),
    ],
)
def test_a_tied_head_may_be_there_in_another_dtype(tmp_path: Path, embed: Any, head: Any, kept: str) -> None:
    """The wider one is loaded: the other is it, rounded."""
    save(tmp_path / "model.safetensors", **{EMBED: embed, HEAD: head})
    assert set(loaded(tmp_path).values()) == {kept}
    assert len(loaded(tmp_path)) == 1


@pytest.mark.parametrize(
    "head", [f32(VALUES + 1), f16(VALUES + 1), bf16(-VALUES), f16(VALUES.T.copy()), ("I64", VALUES)]
)
def test_a_tied_head_of_other_values_is_refused_by_name(tmp_path: Path, head: Any) -> None:
    save(tmp_path / "model.safetensors", **{EMBED: VALUES, HEAD: head})
    error = refused(tmp_path)
    assert (error.code, error.tensors) == ("duplicate_tensor", [EMBED, HEAD])
    for said in (EMBED, HEAD, str(tmp_path / "model.safetensors"), "tied"):
        assert said in error.message


def test_a_name_in_two_shards(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", **{NORM: VALUES, EMBED: VALUES})
    save(tmp_path / "b.safetensors", **{NORM: VALUES, "model.x": VALUES})
    index(tmp_path, **{NORM: "a", EMBED: "a", "model.x": "b"})
    assert loaded(tmp_path).keys() == {NORM, EMBED, "model.x"}
    save(tmp_path / "b.safetensors", **{NORM: VALUES + 1, "model.x": VALUES})
    error = refused(tmp_path)
    assert (error.code, error.tensors) == ("duplicate_tensor", [NORM, NORM])
    for said in (NORM, "a.safetensors", "b.safetensors", "different values"):
        assert said in error.message
    assert "tied" not in error.message


def test_an_index_that_its_files_do_not_bear_out(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", **{NORM: VALUES})
    save(tmp_path / "b.safetensors", **{EMBED: VALUES})
    index(tmp_path, **{NORM: "b", EMBED: "b", "model.x": "a"})
    error = refused(tmp_path)
    assert (error.code, error.tensors) == ("missing_tensor", ["model.norm.weight", "model.x"])
    assert "index.json says that b.safetensors holds model.norm.weight, and it does not" in error.message


@pytest.mark.parametrize(
    ("single", "named", "said"),
    [
        ({NORM: VALUES, EMBED: VALUES + 1}, EMBED, "different values"),
        ({NORM: VALUES}, EMBED, "only one of them"),
        ({NORM: VALUES, EMBED: VALUES, "model.x": VALUES}, "model.x", "only one of them"),
        ({NORM: VALUES, EMBED: VALUES[:2]}, EMBED, "different values"),
    ],
)
def test_an_index_and_a_single_file_that_differ(tmp_path: Path, single: Any, named: str, said: str) -> None:
    save(tmp_path / "a.safetensors", **{NORM: VALUES, EMBED: VALUES})
    index(tmp_path, **{NORM: "a", EMBED: "a"})
    save(tmp_path / "model.safetensors", **single)
    error = refused(tmp_path)
    assert (error.code, error.tensors) == ("duplicate_tensor", [named])
    for part in (str(tmp_path / "model.safetensors"), "a.safetensors", said, "remove the one"):
        assert part in error.message


def test_an_index_and_a_single_file_that_are_the_same(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", **{NORM: VALUES, EMBED: VALUES})
    index(tmp_path, **{NORM: "a", EMBED: "a"})
    save(tmp_path / "model.safetensors", **{EMBED: VALUES, NORM: VALUES})
    assert loaded(tmp_path) == {NORM: "float32", EMBED: "float32"}
    index(tmp_path, **{NORM: "model", EMBED: "model"})
    assert loaded(tmp_path) == {NORM: "float32", EMBED: "float32"}


def test_a_single_file_outside_is_not_read_for_the_comparison(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    save(root / "a.safetensors", **{NORM: VALUES})
    index(root, **{NORM: "a"})
    save(tmp_path / "secret", **{NORM: VALUES})
    (root / "model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="points outside"):
        below_roots(str(root), (root,))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_pointer_of_git_lfs_is_called_one(tmp_path: Path, name: str) -> None:
    save(tmp_path / "model.safetensors", **{NORM: VALUES})
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        read_config(tmp_path) if name == "config.json" else loaded(tmp_path)


def test_files_are_closed_whatever_happens(tmp_path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    save(tmp_path / "a.safetensors", **{NORM: VALUES})
    index(tmp_path, **{NORM: "a", EMBED: "a"})
    refused(tmp_path)
    index(tmp_path, **{NORM: "a", EMBED: "gone"})
    assert "gone.safetensors: No such file" in refused(tmp_path).message
    assert len(set(Path("/proc/self/fd").iterdir())) == len(before)


@pytest.mark.parametrize(
    ("roots", "setting"), [((), '["ROOT/a"]'), (("/srv",), '["/srv", "ROOT/a"]')], ids=["no root yet", "one more"]
)
def test_what_lies_below_no_root_is_told_the_setting_word_for_word(tmp_path, roots, setting):
    with pytest.raises(CheckpointError) as caught:
        below_roots(str(tmp_path / "a"), tuple(map(Path, roots)))
    assert f"serve --set 'store.disk_roots={setting.replace('ROOT', str(tmp_path))}'" in caught.value.message


def test_a_directory_that_is_no_checkpoint_is_told_what_one_holds(tmp_path):
    for name in ("a.txt", "notes", "zebra"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert caught.value.message == (
        f"{tmp_path} is no checkpoint: it has no config.json, no model.safetensors and no model.safetensors.index.json"
    )
    (tmp_path / "config.json").touch()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        CheckpointError, match=r"holds no model\.safetensors and .* beside its config\.json, only pytorch_model\.bin$"
    ):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere is no directory"):
        Checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_that_are_a_link_to_nothing_are_told_where_it_leads(tmp_path, name):
    """As in a cache of checkpoints of which the largest files were removed."""
    (tmp_path / "config.json").touch()
    (tmp_path / name).symlink_to("../blobs/0a1b")
    with pytest.raises(CheckpointError, match=rf"{name} is a link to \.\./blobs/0a1b, which is not there$"):
        Checkpoint(tmp_path)

"""Rows of a parameter, read from a real arena."""

import json

import numpy as np
import pytest

from api.errors import BadInput, Conflict, Unavailable
from api.model import Model
from api.parameters import rows
from weight_manager.arena import Arena
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, rank_views
from weight_manager.messages import Live

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return Model("m", tmp_path, 32, 64, "LlamaForCausalLM", None)


@pytest.fixture(params=[("float32", 1), ("float32", 2), ("bfloat16", 2)], ids=str)
def filled(request, tmp_path):
    """An arena whose slot 1 holds random weights, and the whole tensors that were put there."""
    dtype, tp = request.param
    layout = make_layout(manifest_for(CONFIG, dtype), tp)
    random = np.random.default_rng(1)
    arena = Arena.create(tmp_path, "svc", layout.slot_bytes, spare=0)
    raw = np.frombuffer(arena.slot(1), np.float32 if dtype == "float32" else np.uint16)
    if dtype == "float32":
        raw[:] = random.normal(size=raw.size)
    else:
        raw[:] = random.normal(size=raw.size).astype(np.float32).view(np.uint32) >> 16
    pieces = [rank_views(layout, rank, arena.slot(1)) for rank in range(tp)]
    yield dtype, tp, pieces, arena
    arena.close()


def as_float(values):
    return values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)


def read(model, tmp_path, name, count, dtype, tp, live=None, service="svc"):
    live = live or Live("r", 3, 4, 1, "d")
    return rows(model, live, name, count, arena_dir=tmp_path, service=service, dtype=dtype, tp=tp)


def test_rows_of_whole_and_split_parameters(model, tmp_path, filled):
    dtype, tp, pieces, _ = filled
    for name, axis in (("model.layers.0.mlp.up_proj.weight", 0), ("model.layers.0.mlp.down_proj.weight", 1)):
        whole = as_float(np.concatenate([p[name] for p in pieces], axis))
        np.testing.assert_array_equal(read(model, tmp_path, name, 5, dtype, tp), whole[:5])
        np.testing.assert_array_equal(read(model, tmp_path, name, 1000, dtype, tp), whole)
    norm = as_float(pieces[0]["model.norm.weight"])
    np.testing.assert_array_equal(read(model, tmp_path, "model.norm.weight", 3, dtype, tp), norm[:3])


def test_a_tied_parameter_has_both_names(model, tmp_path, filled):
    dtype, tp, _, _ = filled
    one, other = (read(model, tmp_path, n, 4, dtype, tp) for n in ("lm_head.weight", "model.embed_tokens.weight"))
    np.testing.assert_array_equal(one, other)


def test_what_cannot_be_read(model, tmp_path, filled):
    dtype, tp, _, _ = filled
    with pytest.raises(BadInput, match="no parameter 'x'"):
        read(model, tmp_path, "x", 4, dtype, tp)
    with pytest.raises(Unavailable, match="no arena"):
        read(model, tmp_path, "model.norm.weight", 4, dtype, tp, service="sv")
    with pytest.raises(Conflict, match="changed"):
        read(model, tmp_path, "model.norm.weight", 4, dtype, tp, live=Live("r", 3, 4, 1, "d", write_epoch=99))

"""Rows of a parameter, read from a real arena by what a store answers with."""

import numpy as np
import pytest

from api import parameters
from api.errors import BadInput, Conflict, from_store
from api.parameters import rows
from weight_manager.arena import Arena
from weight_manager.errors import PushRefused
from weight_manager.families import manifest_for
from weight_manager.inspect import read_tensor
from weight_manager.layout import make_layout, rank_views
from weight_manager.messages import Live, ReadTensor, Result

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
URL = "/get_weights_by_name"


class ReadByStore:
    """What api.weights.Weights.tensor answers with, from this arena. moves: another version goes live at each call.
    renamed: so it does, under the same number.
    """

    def __init__(self, layout, arena, *, moves=False):
        self.epoch, self.renamed = 4, False
        self.layout, self.arena, self.moves, self.version, self.limits = layout, arena, moves, 3, []

    async def tensor(self, name, *, offset, limit):
        self.version += self.moves
        self.limits.append(limit)
        self.epoch += self.moves or self.renamed
        live = Live("r", self.version, self.epoch, 1, "d")
        try:
            return read_tensor(self.layout, self.arena, live, name, offset=offset, limit=limit)
        except PushRefused as refusal:
            raise from_store(refusal.code, str(refusal), []) from None


@pytest.fixture(params=[("float32", 1), ("float32", 2), ("bfloat16", 2)], ids=str)
def filled(request, tmp_path):
    """A store whose slot 1 holds random weights, and the whole tensors that were put there."""
    dtype, tp = request.param
    layout = make_layout(manifest_for(CONFIG, dtype), tp)
    random = np.random.default_rng(1)
    arena = Arena.create(tmp_path, "svc", layout.slot_bytes, spare=0)
    raw = np.frombuffer(arena.slot(1), np.float32 if dtype == "float32" else np.uint16)
    if dtype == "float32":
        raw[:] = random.normal(size=raw.size)
    else:
        raw[:] = random.normal(size=raw.size).astype(np.float32).view(np.uint32) >> 16
    yield ReadByStore(layout, arena), [rank_views(layout, rank, arena.slot(1)) for rank in range(tp)]
    arena.close()


def as_float(values):
    return values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("piece", [100, parameters.PIECE])
async def test_rows_of_whole_and_split_parameters(filled, piece, monkeypatch):
    monkeypatch.setattr(parameters, "PIECE", piece)
    store, pieces = filled
    for name, axis in (("model.layers.0.mlp.up_proj.weight", 0), ("model.layers.0.mlp.down_proj.weight", 1)):
        whole = as_float(np.concatenate([p[name] for p in pieces], axis))
        np.testing.assert_array_equal(await rows(store, name, 5), whole[:5])
        np.testing.assert_array_equal(await rows(store, name, 1000), whole)
    norm = as_float(pieces[0]["model.norm.weight"])
    np.testing.assert_array_equal(await rows(store, "model.norm.weight", 3), norm[:3])
    assert max(store.limits) <= piece


async def test_a_tied_parameter_has_both_names(filled):
    store, _ = filled
    one, other = [await rows(store, n, 4) for n in ("lm_head.weight", "model.embed_tokens.weight")]
    assert one == other


async def test_what_cannot_be_read(filled):
    store, _ = filled
    with pytest.raises(BadInput, match="no tensor 'x'"):
        await rows(store, "x", 4)
    store.moves = True
    with pytest.raises(Conflict, match="changed"):
        await rows(store, "model.norm.weight", 4)


async def test_another_version_of_the_same_number_is_another(filled):
    """Of another run, or forced."""
    store, _ = filled
    store.renamed = True
    with pytest.raises(Conflict, match="changed"):
        await rows(store, "model.norm.weight", 4)


async def test_the_route_reads_from_its_own_store_whatever_else_is_on_the_host(client, store):
    data = {"name": "a", "version": 0, "dtype": "float32", "shape": [1], "offset": 0, "more": False, "epoch": 1}
    store.results[ReadTensor] = Result("", True, data=data | {"bytes": np.float32(1.5).tobytes()})
    assert (await client.post(URL, json={"name": "a"})).json() == [1.5]
    store.results[ReadTensor] = Result("", False, "unknown_tensor", "no tensor 'b' is served")
    reply = await client.post(URL, json={"name": "b"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "no tensor 'b' is served")

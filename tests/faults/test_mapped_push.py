"""A trainer with names and layouts of its own, against a real store: the version must be the same to the bit."""

import numpy as np

from rollout_client.mapping import Mapping, Rule

TO_HF = Mapping(
    Rule(r"llama\.layers\.(\d+)\.qkv\.weight", [rf"model.layers.\1.self_attn.{x}_proj.weight" for x in "qkv"],
         transpose=True, sizes=(64, 32, 32), groups=2),
    Rule(r"llama\.(.*_proj\.weight)", r"model.\1", transpose=True),
    Rule(r"llama\.(.*)", r"model.\1"),
)  # fmt: skip


def as_in_paddle(weights):
    """Linear weights [in, out]; q, k and v of a layer in one, per KV head."""
    own = {}
    for name, array in weights.items():
        if "self_attn" not in name or "o_proj" in name:
            own["llama" + name.removeprefix("model")] = array.T.copy() if "_proj" in name else array
    for layer in range(2):
        q, k, v = (weights[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for x in "qkv")
        rows = [part for h in range(2) for part in (q[h * 32 : h * 32 + 32], k[h * 16 :][:16], v[h * 16 :][:16])]
        own[f"llama.layers.{layer}.qkv.weight"] = np.ascontiguousarray(np.concatenate(rows).T)
    return own


def test_the_same_version_to_the_bit(store, replica, push, weights, digest_of):
    served = replica()
    for version, transport in ((1, "shm"), (2, "zmq")):
        push(TO_HF(as_in_paddle(weights(version))), version, transport=transport)
        assert store.serving() == served.served() == (version, digest_of(weights(version)))

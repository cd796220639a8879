"""An independent Llama in numpy, float64: what a service must have computed, token by token.

It shares no code with the engine. `owner` says which weight set computed each position, so that a KV cache that
was kept over an update can be replayed: a position's keys and values stay those of the weights that made them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.reference.checkpoint import Weights

Float64 = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


class Replay:
    """Forward passes over whole sequences; weight sets are addressed by their index."""

    def __init__(self, config: dict[str, Any], sets: Sequence[Weights]):
        self._config = config
        self._sets = [{name: value.astype(np.float64) for name, value in weights.items()} for weights in sets]

    def logprobs(self, ids: Sequence[int], owner: Sequence[int]) -> Float64:
        """[T, vocab] log-probabilities of the token after each of the T positions."""
        config = self._config
        who = np.asarray(owner)
        heads, kv_heads, head = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        length = len(ids)
        cos, sin = self._rotation(length, head)
        future = np.triu(np.full((length, length), -np.inf), 1)
        x = self._rows("model.embed_tokens.weight", who, np.asarray(ids))
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            h = self._norm(layer + "input_layernorm.weight", who, x)
            q, k, v = (self._linear(layer + f"self_attn.{p}_proj.weight", who, h) for p in "qkv")
            q = _rotate(q.reshape(length, heads, head), cos, sin)
            k = np.repeat(_rotate(k.reshape(length, kv_heads, head), cos, sin), heads // kv_heads, axis=1)
            v = np.repeat(v.reshape(length, kv_heads, head), heads // kv_heads, axis=1)
            scores = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) / np.sqrt(head) + future
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            mixed = (scores @ v.transpose(1, 0, 2)).transpose(1, 0, 2).reshape(length, heads * head)
            x = x + self._linear(layer + "self_attn.o_proj.weight", who, mixed)
            h = self._norm(layer + "post_attention_layernorm.weight", who, x)
            gate, up = (self._linear(layer + f"mlp.{p}_proj.weight", who, h) for p in ("gate", "up"))
            x = x + self._linear(layer + "mlp.down_proj.weight", who, gate / (1 + np.exp(-gate)) * up)
        head_name = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
        logits = self._linear(head_name, who, self._norm("model.norm.weight", who, x))
        logits -= logits.max(-1, keepdims=True)
        result: Float64 = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return result

    def _rows(self, name: str, owner: Int, ids: Int) -> Float64:
        return np.stack([self._sets[o][name][i] for o, i in zip(owner, ids, strict=True)])

    def _linear(self, name: str, owner: Int, x: Float64) -> Float64:
        out = np.empty((len(x), self._sets[0][name].shape[0]))
        for o in np.unique(owner):
            out[owner == o] = x[owner == o] @ self._sets[o][name].T
        return out

    def _norm(self, name: str, owner: Int, x: Float64) -> Float64:
        scale = np.stack([self._sets[o][name] for o in owner])
        result: Float64 = x / np.sqrt((x**2).mean(-1, keepdims=True) + self._config["rms_norm_eps"]) * scale
        return result

    def _rotation(self, length: int, head: int) -> tuple[Float64, Float64]:
        angles = np.outer(np.arange(length), self._config["rope_theta"] ** (-np.arange(0, head, 2) / head))
        angles = np.concatenate([angles, angles], axis=-1)[:, None]
        return np.cos(angles), np.sin(angles)


def _rotate(x: Float64, cos: Float64, sin: Float64) -> Float64:
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin

"""Small random HF Llama checkpoints, made with numpy alone."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Weights = dict[str, npt.NDArray[np.float32]]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 0,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory and the same weights in memory."""

    directory: Path
    config: dict[str, Any]
    weights: Weights

    @staticmethod
    def random(directory: Path, seed: int, **changes: Any) -> "Checkpoint":
        """Write one; `changes` replace entries of CONFIG."""
        config = CONFIG | changes
        weights = random_weights(config, seed)
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(config))
        save_file(weights, directory / "model.safetensors")
        return Checkpoint(directory, config, weights)


def random_weights(config: dict[str, Any], seed: int) -> Weights:
    """Weights whose distributions are peaked enough that two seeds never agree on many greedy tokens."""
    rng = np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "self_attn.q_proj.weight"] = (queries, hidden)
        shapes[layer + "self_attn.k_proj.weight"] = (keys, hidden)
        shapes[layer + "self_attn.v_proj.weight"] = (keys, hidden)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, queries)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes[layer + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[layer + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    weights: Weights = {}
    for name, shape in shapes.items():
        spread = 0.4 if "embed" in name or "lm_head" in name else 0.3
        value = rng.normal(1, 0.2, shape) if len(shape) == 1 else rng.normal(0, spread, shape)
        weights[name] = value.astype(np.float32)
    return weights

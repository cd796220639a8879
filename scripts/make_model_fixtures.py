"""Write tests/fixtures/models: one tiny random checkpoint per family and rope type, with HF's logits.

Needs torch and transformers, which the project itself does not depend on:
    python -m scripts.make_model_fixtures
Each directory holds config.json, model.safetensors (hub names) and expected.safetensors: token ids [N] of one
sequence and HF's float32 logits [N, vocab], computed in float32 with eager attention.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

OUT = Path("tests/fixtures/models")
TOKENS = 40
_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
_MOE = {"moe_intermediate_size": 24, "num_hidden_layers": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_theta": 10000.0}),
    "llama_tied_biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama_dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            "max_position_embeddings": 24,
        },
    ),
    "llama_llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "qwen2": ("Qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen2_yarn": ("Qwen2", {"num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": _YARN}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_MOE, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "ernie45": ("Ernie4_5", {"use_bias": True}),
    "ernie45_moe": (
        "Ernie4_5_Moe",
        {**_MOE, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
}


def main() -> None:
    """Write every case."""
    for seed, (name, (family, changes)) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(**_SMALL | changes)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        _spread(model)
        ids = torch.randint(0, config.vocab_size, (TOKENS,))
        logits = _logits(model, ids, config.max_position_embeddings)
        into = OUT / name
        model.save_pretrained(into)
        (into / "generation_config.json").unlink(missing_ok=True)
        save_file({"ids": ids.int(), "logits": logits}, into / "expected.safetensors")
        stored = load_file(into / "model.safetensors")
        print(name, json.loads((into / "config.json").read_text())["architectures"], len(stored), logits.std().item())


def _spread(model: Any) -> None:
    """Norms and biases start as ones and zeros; random values show whether they are used at all."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.2)
            elif "norm" in name:
                p.uniform_(0.5, 1.5)


def _logits(model: Any, ids: torch.Tensor, trained: int) -> torch.Tensor:
    """One pass up to the trained length, then token by token: how ``dynamic`` rope is defined past it."""
    with torch.no_grad():
        out = model(ids[None, :trained], use_cache=True)
        parts = [out.logits[0]]
        for i in range(trained, len(ids)):
            out = model(ids[None, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits[0])
    return torch.cat(parts)


if __name__ == "__main__":
    main()

"""Write tests/fixtures/models: one tiny random checkpoint per family and rope type, with HF's logits.

Needs torch and transformers, which the project itself does not depend on:
    python -m scripts.make_model_fixtures [CASE...]
Each directory holds config.json, model.safetensors (hub names) and expected.safetensors: token ids [N] of one
sequence and HF's float32 logits [N, vocab], computed in float32 with eager attention. Those with a layer that drafts
tokens also hold its logits [N - 1, vocab], of the token after the next one: transformers drops that layer, so it is
put together here from transformers' own parts, as ERNIE's training code does it.
"""

import json
import sys
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
    "ernie45_mtp": ("Ernie4_5", {"tie_word_embeddings": True, "num_nextn_predict_layers": 1}),
    "ernie45_moe_mtp": (
        "Ernie4_5_Moe",
        {
            **_MOE,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "tie_word_embeddings": False,
            "num_nextn_predict_layers": 1,
        },
    ),
}


def main() -> None:
    """Write every case, or those named on the command line."""
    for seed, (name, (family, changes)) in enumerate(CASES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
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
        expected = {"ids": ids.int(), "logits": logits}
        stored = load_file(into / "model.safetensors")
        if changes.get("num_nextn_predict_layers"):
            draft = DraftLayer(model)
            _spread(draft)
            expected["draft_logits"] = draft(ids)
            stored |= draft.stored()
            save_file(stored, into / "model.safetensors", {"format": "pt"})
        save_file(expected, into / "expected.safetensors")
        print(name, json.loads((into / "config.json").read_text())["architectures"], len(stored), logits.std().item())


class DraftLayer(torch.nn.Module):  # type: ignore[misc]  # torch is not installed where this is checked
    """ERNIE's multi-token prediction: [norm(embedding of the next token); norm(hidden state)] -> layer -> norm -> head.

    The hidden state is the residual stream before the model's last norm, which both outputs go through.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = [model]  # in a list: its parameters are not this module's
        config, size = model.config, model.config.hidden_size
        modules = sys.modules[type(model).__module__]
        norm = next(getattr(modules, name) for name in dir(modules) if name.endswith("RMSNorm"))
        self.mtp_emb_norm = torch.nn.ModuleList([norm(size, config.rms_norm_eps)])
        self.mtp_hidden_norm = torch.nn.ModuleList([norm(size, config.rms_norm_eps)])
        self.mtp_linear_proj = torch.nn.ModuleList([torch.nn.Linear(2 * size, size, bias=config.use_bias)])
        dense = transformers.Ernie4_5Config(**_SMALL | {"use_bias": config.use_bias})
        dense._attn_implementation = "eager"
        block = transformers.models.ernie4_5.modeling_ernie4_5.Ernie4_5DecoderLayer(dense, 0)
        self.mtp_block = torch.nn.ModuleList([block])
        for name, p in self.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(p, 0, 0.2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [N] -> logits [N - 1, vocab]; row i of the token at i + 2, from the hidden state at i and token i + 1."""
        model = self._model[0]
        seen: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        with torch.no_grad():
            model(ids[None, :-1])
            hook.remove()
            embedded = model.model.embed_tokens(ids[None, 1:])
            both = [self.mtp_emb_norm[0](embedded), self.mtp_hidden_norm[0](seen[0])]
            x = self.mtp_linear_proj[0](torch.cat(both, -1))
            positions = torch.arange(len(ids) - 1)[None]
            mask = torch.full((len(ids) - 1,) * 2, -torch.inf).triu(1)[None, None]
            angles = model.model.rotary_emb(x, positions)
            x = self.mtp_block[0](x, attention_mask=mask, position_embeddings=angles, position_ids=positions)
            x = x[0] if isinstance(x, tuple) else x
            logits: torch.Tensor = model.lm_head(model.model.norm(x))[0]
            return logits

    def stored(self) -> dict[str, torch.Tensor]:
        """Its tensors under the names of the checkpoints on the hub."""
        return {f"model.{name}": p.detach().contiguous() for name, p in self.named_parameters()}


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

"""Write tests/fixtures/adapters: random PEFT adapters over the tiny checkpoints, with logits of PEFT's merged model.

Needs torch, transformers and peft, which the project itself does not depend on:
    python -m scripts.make_adapter_fixtures [CASE...]
Each directory holds what `PeftModel.save_pretrained` writes, and expected.safetensors: token ids [N] and the float32
logits [N, vocab] of `merge_and_unload`. The checkpoint is the directory's name up to the dot.
"""

import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

MODELS, OUT = Path("tests/fixtures/models"), Path("tests/fixtures/adapters")
_ATTENTION, _MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "llama.all": {"r": 4, "lora_alpha": 8, "target_modules": _ATTENTION + _MLP},
    "llama.default": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "llama.patterns": {
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": [*_ATTENTION[:3], *_MLP],
        "rank_pattern": {"q_proj": 1, "v_proj": 17, "1.mlp.up_proj": 20},
        "alpha_pattern": {"k_proj": 2},
        "layers_to_transform": [1],
    },
    "llama_tied_biased.all": {"r": 5, "target_modules": _ATTENTION + _MLP},
    "qwen2.all": {"r": 16, "target_modules": _ATTENTION + _MLP},
    "qwen3.all": {"r": 2, "target_modules": "all-linear"},
    "ernie45.all": {"r": 4, "target_modules": _ATTENTION + _MLP},
    "qwen3_moe.attention": {"r": 4, "target_modules": _ATTENTION},
}


def main() -> None:
    """Write the cases named on the command line, or all."""
    for name in sys.argv[1:] or CASES:
        torch.manual_seed(7)
        checkpoint = MODELS / name.split(".")[0]
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **CASES[name]))
        with torch.no_grad():
            for key, p in adapted.named_parameters():
                if "lora_" in key:  # B starts as zeros
                    p.normal_(0, 0.2)
        into = OUT / name
        adapted.save_pretrained(into)
        (into / "README.md").unlink()
        ids = load_file(checkpoint / "expected.safetensors")["ids"]
        with torch.no_grad():
            logits = adapted.merge_and_unload()(ids[None]).logits[0]
        save_file({"ids": ids, "logits": logits.contiguous()}, into / "expected.safetensors")
        base = load_file(checkpoint / "expected.safetensors")["logits"]
        print(name, len(load_file(into / "adapter_model.safetensors")), (logits - base).abs().max().item())


if __name__ == "__main__":
    main()

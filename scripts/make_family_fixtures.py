"""Write tests/fixtures/families: HF's logits for five random small configs of every family, at three lengths each.

Needs torch and transformers, which the project itself does not depend on:
    python -m scripts.make_family_fixtures [FAMILY...]
A file holds no weights: they are made from their names (tests/random_tensors.py). It has, for each case c and length n,
``c.ids.n`` and HF's float32 logits ``c.logits.n`` [n, vocab], computed in one pass with eager attention, and as JSON in
its header what config.json says, which tensors the torch module has, and which save_pretrained writes.
`config_defaults.json` has what transformers' configuration classes say when nothing is set.
"""

import json
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from tests.random_tensors import random_tensors

OUT = Path("tests/fixtures/families")
CASES, LENGTHS = 5, (5, 19, 41)
Changes = dict[str, Any]


def _common(r: random.Random) -> Changes:
    heads, kv_heads = r.choice([(4, 2), (4, 1), (2, 2), (6, 2), (4, 4)])
    return {
        "vocab_size": r.choice([64, 80]),
        "hidden_size": heads * r.choice([8, 12, 16]),  # a multiple is asked for
        "intermediate_size": r.choice([48, 64, 80]),
        "num_hidden_layers": r.choice([2, 3, 4]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": r.choice([16, 16, 32, 8]),
        "max_position_embeddings": 64,
        "rms_norm_eps": r.choice([1e-5, 1e-6]),
        "tie_word_embeddings": r.random() < 0.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }


def _rope(r: random.Random) -> Changes:
    theta = r.choice([10000.0, 500000.0])
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": theta}
    linear = {"rope_type": "linear", "factor": 3.0, "rope_theta": theta}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 32, "rope_theta": theta}
    plain = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": r.choice([plain, plain, yarn, linear, llama3])}


def _square(common: Changes) -> Changes:
    """Of families whose heads are as wide as hidden_size says."""
    del common["head_dim"]
    common["hidden_size"] = common["num_attention_heads"] * 16
    return common


def _window(r: random.Random) -> int:
    return r.choice([1, 3, 6, 17])


def _qwen_window(r: random.Random) -> Changes:
    if r.random() < 0.4:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": _window(r), "max_window_layers": r.choice([0, 1, 2])}


def _phi3(r: random.Random) -> Changes:
    made = _square(_common(r)) | {"sliding_window": r.choice([None, 7])}
    share = r.choice([1.0, 0.75, 0.5])
    pairs = int(16 * share) // 2
    rope: Changes = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    if r.random() < 0.7:
        rope |= {
            "rope_type": "longrope",
            "short_factor": [round(r.uniform(1, 1.2), 3) for _ in range(pairs)],
            "long_factor": [round(r.uniform(1, 30), 3) for _ in range(pairs)],
            "original_max_position_embeddings": 16,
        }
        made |= {"original_max_position_embeddings": 16}
    return made | {"rope_parameters": rope}


def _gemma(r: random.Random) -> Changes:
    return _common(r) | {"attention_bias": r.random() < 0.3}


def _gemma2(r: random.Random) -> Changes:
    caps = {"attn_logit_softcapping": r.choice([0.7, 2.0, None]), "final_logit_softcapping": r.choice([1.5, 30.0])}
    return _gemma(r) | {"sliding_window": _window(r), "query_pre_attn_scalar": r.choice([16, 24])} | caps


def _gemma3(r: random.Random) -> Changes:
    ropes = {
        "full_attention": r.choice(
            [
                {"rope_type": "default", "rope_theta": 1000000.0},
                {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            ]
        ),
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    types = {"layer_types": None, "sliding_window_pattern": r.choice([2, 3])}
    scalar = {"query_pre_attn_scalar": r.choice([16, 24]), "final_logit_softcapping": r.choice([None, 2.0])}
    return _gemma(r) | {"sliding_window": _window(r), "rope_parameters": ropes} | types | scalar


def _olmo3(r: random.Random) -> Changes:
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500000.0}
    made = _square(_common(r)) | {"num_hidden_layers": r.choice([4, 5]), "sliding_window": _window(r)}
    return made | {"rope_parameters": {"full_attention": r.choice([plain, yarn]), "sliding_attention": plain}}


def _smollm3(r: random.Random) -> Changes:
    made = _square(_common(r)) | _rope(r) | {"attention_bias": r.random() < 0.5, "mlp_bias": r.random() < 0.5}
    windows = r.choice([{}, {"use_sliding_window": True, "sliding_window": 5}])
    return made | windows | {"no_rope_layer_interval": r.choice([2, 3])}


def _glm(r: random.Random) -> Changes:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": r.choice([0.5, 0.5, 1.0, 0.25])}
    return _common(r) | {"head_dim": r.choice([16, 32]), "rope_parameters": rope, "attention_bias": r.random() < 0.7}


def _qwen_moe(r: random.Random) -> Changes:
    return {
        "moe_intermediate_size": r.choice([16, 24]),
        "num_experts": r.choice([4, 6]),
        "num_experts_per_tok": r.choice([1, 2, 3]),
        "norm_topk_prob": r.random() < 0.5,
        "decoder_sparse_step": r.choice([1, 2]),
        "mlp_only_layers": r.choice([[], [0]]),
    }


def _qwen2_moe(r: random.Random) -> Changes:
    own = {"shared_expert_intermediate_size": r.choice([16, 40]), "qkv_bias": r.random() < 0.7}
    return _square(_common(r)) | _qwen_moe(r) | _qwen_window(r) | own | {"num_hidden_layers": 3}


def _ernie_moe(r: random.Random) -> Changes:
    own = {"moe_num_experts": r.choice([4, 6]), "moe_k": 2, "moe_intermediate_size": r.choice([16, 24])}
    places = {"moe_layer_start_index": r.choice([0, 1]), "moe_layer_interval": r.choice([1, 2]), "num_hidden_layers": 4}
    shared = {"moe_num_shared_experts": r.choice([0, 1, 2]), "use_bias": r.random() < 0.6}
    return _square(_common(r)) | own | places | shared


FAMILIES: dict[str, tuple[str, Callable[[random.Random], Changes]]] = {
    "llama": (
        "Llama",
        lambda r: _common(r) | _rope(r) | {"attention_bias": r.random() < 0.5, "mlp_bias": r.random() < 0.5},
    ),
    "seed_oss": ("SeedOss", lambda r: _common(r) | _rope(r) | {"attention_out_bias": r.random() < 0.5}),
    "mistral": ("Mistral", lambda r: _common(r) | _rope(r) | {"sliding_window": r.choice([None, _window(r)])}),
    "ministral": (
        "Ministral",
        lambda r: (
            _common(r)
            | {"sliding_window": _window(r), "num_hidden_layers": 3}
            | {"layer_types": [r.choice(["full_attention", "sliding_attention"]) for _ in range(3)]}
        ),
    ),
    "phi3": ("Phi3", _phi3),
    "qwen2": ("Qwen2", lambda r: _square(_common(r)) | _rope(r) | _qwen_window(r)),
    "qwen3": ("Qwen3", lambda r: _common(r) | _rope(r) | _qwen_window(r) | {"attention_bias": r.random() < 0.5}),
    "qwen2_moe": ("Qwen2Moe", _qwen2_moe),
    "qwen3_moe": ("Qwen3Moe", lambda r: _common(r) | _qwen_moe(r) | _qwen_window(r)),
    "olmo2": ("Olmo2", lambda r: _square(_common(r)) | _rope(r) | {"attention_bias": r.random() < 0.5}),
    "olmo3": ("Olmo3", _olmo3),
    "smollm3": ("SmolLM3", _smollm3),
    "gemma": ("Gemma", _gemma),
    "gemma2": ("Gemma2", _gemma2),
    "gemma3": ("Gemma3Text", _gemma3),
    "glm": ("Glm", _glm),
    "glm4": ("Glm4", _glm),
    "ernie45": ("Ernie4_5", lambda r: _common(r) | _rope(r) | {"use_bias": r.random() < 0.7}),
    "ernie45_moe": ("Ernie4_5_Moe", _ernie_moe),
}
_MODELS = {"Gemma3Text": "Gemma3"}
"""Where the model is not named as its configuration."""


def main() -> None:
    """Write every family, or those named on the command line; the defaults of all."""
    warnings.filterwarnings("ignore")
    OUT.mkdir(exist_ok=True)
    for family in sys.argv[1:] or FAMILIES:
        tensors: dict[str, torch.Tensor] = {}
        cases = [_case(family, number, tensors) for number in range(CASES)]
        save_file(tensors, OUT / f"{family}.safetensors", {"cases": json.dumps(cases)})
        print(family, [round(float(value.std()), 2) for name, value in tensors.items() if "logits" in name][::3])
    nothing = transformers.PretrainedConfig().to_dict()
    kept = {"tie_word_embeddings"}
    defaults = {
        f"{_MODELS.get(name, name)}ForCausalLM": {
            key: value
            for key, value in getattr(transformers, f"{name}Config")().to_dict().items()
            if key in kept or key not in nothing
        }
        for name, _ in FAMILIES.values()
    }
    (OUT / "config_defaults.json").write_text(json.dumps(defaults, indent=1, sort_keys=True) + "\n")


def _case(family: str, number: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One random config: its logits into `tensors`, what is known of it as JSON."""
    name, recipe = FAMILIES[family]
    seed = 1000 * number + list(FAMILIES).index(family)
    config = getattr(transformers, f"{name}Config")(**recipe(random.Random(seed)))  # noqa: S311
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{_MODELS.get(name, name)}ForCausalLM")(config).float().eval()
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del own["lm_head.weight"]
    values = random_tensors(own, seed, unit_norms=family.startswith("gemma"))
    model.load_state_dict({key: torch.from_numpy(value) for key, value in values.items()}, strict=False)
    model.tie_weights()
    for length in LENGTHS:
        ids = torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed + length))
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        tensors[f"{number}.ids.{length}"], tensors[f"{number}.logits.{length}"] = ids.int(), logits.clone()
    with tempfile.TemporaryDirectory() as into:
        model.save_pretrained(into)
        said = json.loads((Path(into) / "config.json").read_text())
        with safe_open(Path(into) / "model.safetensors", "pt") as file:
            stored = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return {"config": said, "seed": seed, "module": own, "stored": stored}


if __name__ == "__main__":
    main()

"""Every key of transformers' configuration classes: honoured, refused by its name, or known to change no logits."""

import json
from typing import Any

import pytest

from tests.family_cases import FAMILY_FILES
from weight_manager.families import FAMILIES, decoder_spec

DEFAULTS: dict[str, dict[str, Any]] = json.loads((FAMILY_FILES / "config_defaults.json").read_text())
HARMLESS = {
    "model_type": "the architecture names the family",
    "bos_token_id": "prompts come as tokens or through the tokenizer's own files",
    "eos_token_id": "ends come from generation_config.json and the tokenizer (worker/end_tokens.py)",
    "pad_token_id": "nothing is padded",
    "initializer_range": "of training",
    "use_cache": "of generate",
    "attention_dropout": "of training",
    "embd_pdrop": "of training",
    "resid_pdrop": "of training",
    "residual_dropout": "of training",
    "output_router_logits": "of training",
    "router_aux_loss_coef": "of training",
    "pretraining_tp": "transformers does not read it any more",
    "_sliding_window_pattern": "what layer_types was made of, and is there",
}
WHERE_IT_IS_READ: dict[tuple[str, str], dict[str, Any]] = {}
for _arch in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM"):
    WHERE_IT_IS_READ[_arch, "max_window_layers"] = {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": None,
    }
    WHERE_IT_IS_READ[_arch, "sliding_window"] = WHERE_IT_IS_READ[_arch, "max_window_layers"] | {"max_window_layers": 1}
    WHERE_IT_IS_READ[_arch, "use_sliding_window"] = {"sliding_window": 5, "layer_types": None, "max_window_layers": 1}
for _arch in ("Qwen3MoeForCausalLM",):
    WHERE_IT_IS_READ[_arch, "sliding_window"] = {"use_sliding_window": True}
    WHERE_IT_IS_READ[_arch, "use_sliding_window"] = {"sliding_window": 5}
WHERE_IT_IS_READ["SmolLM3ForCausalLM", "sliding_window"] = {"use_sliding_window": True, "layer_types": None}
WHERE_IT_IS_READ["SmolLM3ForCausalLM", "use_sliding_window"] = {"sliding_window": 5, "layer_types": None}
WHERE_IT_IS_READ["SmolLM3ForCausalLM", "no_rope_layer_interval"] = {"no_rope_layers": None}
for _arch in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
    WHERE_IT_IS_READ[_arch, "intermediate_size"] = {"mlp_only_layers": [1]}
WHERE_IT_IS_READ["Ernie4_5_MoeForCausalLM", "moe_layer_end_index"] = {}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
WHERE_IT_IS_READ["Phi3ForCausalLM", "original_max_position_embeddings"] = {"rope_parameters": LONGROPE}

KEYS = [(architecture, key) for architecture, values in DEFAULTS.items() for key in values]


def spec_or_error(architecture: str, values: dict[str, Any]) -> object:
    try:
        return decoder_spec({"architectures": [architecture]} | values)
    except ValueError as error:
        return str(error)


def others(value: object) -> list[object]:
    """Values of the same kind that mean something else."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value + 1, max(value // 2, 1)]
    if isinstance(value, float):
        return [value * 1.5]
    if isinstance(value, str):
        return ["relu", "gelu"]
    if isinstance(value, list):
        return [["sliding_attention"] * len(value), [0] * max(len(value), 1), [1] * max(len(value), 1)]
    if isinstance(value, dict):
        return [{"rope_type": "linear", "factor": 2.0, "rope_theta": 12345.0}, {"rope_type": "of its own"}]
    return [True, 3]


@pytest.mark.parametrize(("architecture", "key"), KEYS)
def test_a_key_that_changes_is_seen(architecture: str, key: str) -> None:
    """A spec that differs, or a refusal that names the key; else it must be among those that change no logits."""
    values = DEFAULTS[architecture] | WHERE_IT_IS_READ.get((architecture, key), {})
    before = spec_or_error(architecture, values)
    assert not isinstance(before, str), before
    seen = []
    for other in others(values[key]):
        after = spec_or_error(architecture, values | {key: other})
        if isinstance(after, str):
            assert key in after, f"{key}={other!r} is refused without its name: {after}"
        seen.append(after != before)
    assert any(seen) != (key in HARMLESS), f"{key} ({values[key]!r}) of {architecture}"


@pytest.mark.parametrize(("architecture", "key"), KEYS)
def test_a_key_that_is_absent_means_what_it_does_to_transformers(architecture: str, key: str) -> None:
    """Or is asked for by its name: a small model whose config.json was written by hand."""
    values = DEFAULTS[architecture]
    without = spec_or_error(architecture, {name: value for name, value in values.items() if name != key})
    if isinstance(without, str):
        assert key in without
    else:
        assert without == spec_or_error(architecture, values)


def test_every_family_of_transformers_is_among_them() -> None:
    """Others are known under transformers' names to nobody: remote code, or another name of one that is."""
    assert set(FAMILIES) - set(DEFAULTS) == {
        "LLaMAForCausalLM",
        "InternLMForCausalLM",
        "InternLM3ForCausalLM",
        "Ministral3ForCausalLM",
    }

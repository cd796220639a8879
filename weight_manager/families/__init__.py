"""Decoder families served, one file each: HF config.json -> `DecoderSpec` -> `Manifest`.

A family's file reads config.json, with the family's own defaults, and is the only one that does. What the engine
computes is the spec; which tensors it is computed from follows from the spec, by `parameters.py`. No Paddle here: the
store needs the manifest too.
"""

from rollout_client.protocol import Dtype
from weight_manager.families import (
    ernie45,
    ernie45_moe,
    gemma,
    glm,
    llama,
    mistral,
    olmo,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from weight_manager.families.config_values import Config
from weight_manager.families.parameters import parameters
from weight_manager.families.spec import DecoderSpec
from weight_manager.layout import Manifest

FAMILIES = {
    "LlamaForCausalLM": llama.decoder_spec,
    "LLaMAForCausalLM": llama.decoder_spec,
    "InternLMForCausalLM": llama.internlm,
    "InternLM3ForCausalLM": llama.internlm3,
    "SeedOssForCausalLM": llama.seed_oss,
    "MistralForCausalLM": mistral.mistral,
    "MinistralForCausalLM": mistral.ministral,
    "Ministral3ForCausalLM": mistral.ministral3,
    "Qwen2ForCausalLM": qwen2.decoder_spec,
    "Qwen2MoeForCausalLM": qwen2_moe.decoder_spec,
    "Qwen3ForCausalLM": qwen3.decoder_spec,
    "Qwen3MoeForCausalLM": qwen3_moe.decoder_spec,
    "Phi3ForCausalLM": phi3.decoder_spec,
    "Olmo2ForCausalLM": olmo.olmo2,
    "Olmo3ForCausalLM": olmo.olmo3,
    "SmolLM3ForCausalLM": smollm3.decoder_spec,
    "GemmaForCausalLM": gemma.gemma,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "GlmForCausalLM": glm.glm,
    "Glm4ForCausalLM": glm.glm4,
    "Ernie4_5ForCausalLM": ernie45.decoder_spec,
    "Ernie4_5_MoeForCausalLM": ernie45_moe.decoder_spec,
}


_OF_NO_FAMILY = {
    "kv_lora_rank": "multi-head latent attention (DeepSeek)",
    "text_config": "a model of more than text",
    "quantization_config": "quantised weights: a push has float32, bfloat16 or float16",
}
"""Keys of checkpoints that are not served whatever their architecture is -> what they mean."""

_REPEATED = ("num_hidden_layers", "num_experts", "num_local_experts", "moe_num_experts")
_MOST = 4096
"""Most layers, and experts of a layer: they are objects here before any weight of theirs is looked for."""


def decoder_spec(config: Config) -> DecoderSpec:
    """The decoder this HF config describes. Raises ValueError for what is not served, naming the key."""
    for key, meaning in _OF_NO_FAMILY.items():
        if config.get(key) is not None:
            raise ValueError(f"config.json: {key} is not served: {meaning}")
    named = config.get("architectures") or [None]
    architecture = named[0] if isinstance(named, list) else named
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ValueError(f"architecture {architecture!r} is not served; known: {', '.join(FAMILIES)}")
    for key in _REPEATED:
        times = config.get(key)
        if isinstance(times, int) and times > _MOST:
            raise ValueError(f"config.json: {key} is {times:.6g}, and no model has more than {_MOST}")
    try:
        return FAMILIES[architecture](config)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"config.json: a value is of another kind than transformers writes: {error}") from error


def manifest_for(config: Config, dtype: Dtype) -> Manifest:
    """Everything the model of this HF config serves, in layout order. Raises as `decoder_spec` does."""
    spec = decoder_spec(config)
    return Manifest(config["architectures"][0], dtype, tuple(parameters(spec)), spec.stacked)

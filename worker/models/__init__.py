"""Decoder families served: HF config.json -> `DecoderSpec`, one file per family over one shared decoder."""

from typing import Any

from worker.models import ernie45, ernie45_moe, llama, qwen2, qwen3, qwen3_moe
from worker.models.spec import DecoderSpec

FAMILIES = {
    "LlamaForCausalLM": llama.decoder_spec,
    "Qwen2ForCausalLM": qwen2.decoder_spec,
    "Qwen3ForCausalLM": qwen3.decoder_spec,
    "Qwen3MoeForCausalLM": qwen3_moe.decoder_spec,
    "Ernie4_5ForCausalLM": ernie45.decoder_spec,
    "Ernie4_5_MoeForCausalLM": ernie45_moe.decoder_spec,
}


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    """The decoder this HF config describes. Raises ValueError for what is not served, naming the key."""
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in FAMILIES:
        raise ValueError(f"architecture {architecture!r} is not served; known: {', '.join(FAMILIES)}")
    return FAMILIES[architecture](config)

"""The model of these tests: a Llama of two layers, whole versions of it, and the digest each must have."""

import numpy as np
import xxhash

from rollout_client.peft import adapter_config, adapter_tensors
from rollout_client.protocol import Part
from weight_manager.adapters.plan import AdapterPlanner, adapter_layout
from weight_manager.families import manifest_for
from weight_manager.layout import make_layout, version_digest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}
LAYOUT = make_layout(manifest_for(CONFIG, "float32"), 1)
Weights = dict[str, np.ndarray]


def weights(seed: int) -> Weights:
    """A whole version."""
    rng = np.random.default_rng(seed)
    return {p.name: rng.standard_normal(p.shape, dtype=np.float32) for p in LAYOUT.manifest.parameters}


ADAPTER_CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def adapter(seed: int, rank: int = 4) -> Weights:
    """A whole version of an adapter with that config, as PEFT names it."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for p in LAYOUT.manifest.parameters:
        if p.name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
            module = "base_model.model." + p.name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = rng.standard_normal((rank, p.shape[1]), dtype=np.float32)
            tensors[f"{module}.lora_B.weight"] = rng.standard_normal((p.shape[0], rank), dtype=np.float32)
    return tensors


def adapter_digest(tensors: Weights, config: dict[str, object] | None = None) -> str:
    """What the store must call it: computed here from the tensors alone."""
    named = adapter_tensors(tensors)
    parts = [Part(name, "float32", value.shape) for name, value in named]
    shape = AdapterPlanner(LAYOUT).shape(adapter_config(config or ADAPTER_CONFIG), parts, 64)
    layout = adapter_layout(shape, LAYOUT)
    return version_digest(layout, [xxhash.xxh3_64_intdigest(dict(named)[r.name].data) for r in layout.regions])


def digest_of(tensors: Weights) -> str:
    """What the store must call this version: computed here from the tensors alone (tp 1: a region is a tensor)."""
    digests = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(tensors[r.name]).data) for r in LAYOUT.regions]
    return version_digest(LAYOUT, digests)

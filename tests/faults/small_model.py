"""The model of these tests: a Llama of two layers, whole versions of it, and the digest each must have."""

import numpy as np
import xxhash

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


def digest_of(tensors: Weights) -> str:
    """What the store must call this version: computed here from the tensors alone (tp 1: a region is a tensor)."""
    digests = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(tensors[r.name]).data) for r in LAYOUT.regions]
    return version_digest(LAYOUT, digests)

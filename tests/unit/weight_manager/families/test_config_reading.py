"""What config.json says in odd ways: read as it was meant, or refused by its key."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from weight_manager.families import decoder_spec, manifest_for
from weight_manager.families.rope import NEEDED
from worker.models.rope import rope_table

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
TWO = {"full_attention": FULL, "sliding_attention": FULL | {"rope_theta": 10.0}}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"rope_scaling": {"type": "linear", "factor": "2.0"}}, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": "4", "attention_factor": "0.5", "beta_fast": "16"}},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "beta_fast": 16}},
        ),
        (
            {"rope_scaling": LLAMA3 | {"factor": "8.0", "original_max_position_embeddings": "64"}},
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}},
        ),
        ({"rope_theta": "500000.0"}, {"rope_theta": 500000.0}),
        ({"rope_parameters": {"full_attention": FULL}}, {"rope_parameters": FULL}),
        ({"rope_parameters": TWO}, {"rope_parameters": FULL}),
        (
            {"rope_parameters": TWO, "layer_types": ["full_attention", "full_attention"]},
            {"rope_parameters": FULL},
        ),
        ({"rope_parameters": {"rope_type": None, "factor": None}}, {}),
        ({"rope_scaling": None, "rope_theta": None, "partial_rotary_factor": None}, {}),
        ({"rms_norm_eps": "1e-05"}, {"rms_norm_eps": 1e-5}),
    ],
)
def test_what_has_one_meaning_is_read(said: dict[str, Any], meant: dict[str, Any]) -> None:
    assert decoder_spec(SMALL | said) == decoder_spec(SMALL | meant)


BAD = [
    ({"rms_norm_eps": None}, "rms_norm_eps must be a number, got None"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, got 'small'"),
    ({"rms_norm_eps": True}, "rms_norm_eps must be a number, got True"),
    ({"max_position_embeddings": None}, "max_position_embeddings must be a number, got None"),
    ({"rope_theta": [1]}, r"rope_theta must be a number, got \[1\]"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling: rope type 'linear' needs factor"),
    ({"rope_scaling": {"type": "linear", "factor": None}}, "rope_scaling: rope type 'linear' needs factor"),
    ({"rope_scaling": {"type": "linear", "factor": "two"}}, "rope_scaling.factor must be a number, got 'two'"),
    ({"rope_scaling": {"type": "linear", "factor": [2]}}, r"rope_scaling.factor must be a number, got \[2\]"),
    (
        {"rope_parameters": {"sliding_attention": FULL}},
        "rope_parameters is by type of layer, and has nothing for full_att",
    ),
    (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has 'sliding_attention', which is not served",
    ),
]


@pytest.mark.parametrize(("said", "error"), BAD)
def test_what_has_none_is_refused_by_key(said: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match="config.json: " + error):
        decoder_spec(SMALL | said)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, got '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"head_dim": -1}, "head_dim must be a positive integer, got -1"),
        ({"intermediate_size": None}, "intermediate_size must be a positive integer, got None"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: rope type 'linear' needs factor"),
    ],
)
def test_store_and_engine_refuse_the_same(said: dict[str, Any], error: str) -> None:
    """The store would serve bytes otherwise that no rank can compute with, and the other way round."""
    with pytest.raises(ValueError, match="config.json: " + error):
        decoder_spec(SMALL | said)
    with pytest.raises(ValueError, match="config.json: " + error):
        manifest_for(SMALL | said, "float32")


@pytest.mark.parametrize("kind", NEEDED)
def test_every_rope_type_that_is_read_can_be_computed(kind: str) -> None:
    scaling = {"rope_type": kind, **{name: 4.0 - index for index, name in enumerate(NEEDED[kind])}}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    if "high_freq_factor" in scaling:
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    cos, sin = rope_table(decoder_spec(SMALL | {"rope_scaling": scaling}).ropes[0], 8)
    assert cos.shape == sin.shape == (8, 4)
    assert np.isfinite(cos).all()


def test_reading_a_config_loads_neither_paddle_nor_numpy() -> None:
    code = "import sys, weight_manager.families; sys.exit(any(name in sys.modules for name in ('paddle', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""What the GPU engine has no kernels for is refused when it starts, in words, before a device is touched."""

import json
from pathlib import Path

import pytest

from tests.family_cases import FAMILIES, FamilyCase, family_cases
from weight_manager.families import decoder_spec, manifest_for
from weight_manager.layout import make_layout
from worker.config import WorkerConfig
from worker.gpu.engine import GpuEngine
from worker.gpu.served import require_served

SAID = {
    "mistral": "sliding windows",
    "ministral": "sliding windows",
    "qwen2": "sliding windows",
    "qwen3": "sliding windows",
    "qwen3_moe": "sliding windows",
    "qwen2_moe": "a shared expert with a gate",
    "phi3": "heads that are rotated in part",
    "olmo2": "norms of what layers add",
    "olmo3": "norms of q and k over all heads",
    "smollm3": "layers that are not rotated",
    "gemma": "norms stored as distances from one",
    "gemma2": "capped scores or logits",
    "gemma3": "layers that are rotated differently",
    "glm": "heads that are rotated in part",
    "glm4": "norms of what layers add",
    "ernie45_moe": "a bias of the head",
}
SERVED = {"llama", "seed_oss", "ernie45"}
"""Families of which every random config is served there."""


def refusal(case: FamilyCase) -> str:
    try:
        require_served(decoder_spec(case.config))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_or_refused_in_words(family: str) -> None:
    said = [refusal(case) for case in family_cases(family)]
    if family in SERVED:
        assert said == [""] * 5
    else:
        assert any(SAID[family] in one for one in said), said
        assert all(
            one.startswith("device gpu: ") and one.endswith("device cpu serves this checkpoint") for one in said if one
        )


def test_plain_configs_of_families_with_windows_are_served() -> None:
    plain = {"sliding_window": None, "layer_types": None, "use_sliding_window": False}
    for family in ("mistral", "ministral", "qwen2", "qwen3", "qwen3_moe"):
        case = family_cases(family)[0]
        require_served(decoder_spec(case.config | plain))


def test_the_engine_refuses_before_it_looks_for_a_device(tmp_path: Path) -> None:
    """There is none on the machine of this test: what it says is about the checkpoint."""
    case = family_cases("gemma2")[0]
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    config = WorkerConfig(model_dir=tmp_path, device="gpu")
    with pytest.raises(ValueError, match=r"device gpu: .*scaled embeddings"):
        GpuEngine(config, make_layout(manifest_for(case.config, "float32"), 1), 0, 0)

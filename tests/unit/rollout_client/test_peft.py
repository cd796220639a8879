import dataclasses
import math
from types import SimpleNamespace

import msgspec
import pytest

from rollout_client.peft import AdapterConfig, adapter_config, adapter_tensors, check_name

PREFIX = "base_model.model.model.layers.0.self_attn"


@dataclasses.dataclass
class LoraConfig:
    """The fields of peft.LoraConfig that are read, as it has them."""

    peft_type: str = "LORA"
    r: int = 8
    lora_alpha: int = 16
    target_modules: set[str] | None = None
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: dict[str, int] = dataclasses.field(default_factory=dict)


def test_a_config_is_peft_s_object_its_file_or_ours():
    ours = AdapterConfig(8, 16.0, target_modules=["k_proj", "q_proj"])
    assert adapter_config(LoraConfig(target_modules={"q_proj", "k_proj"})) == ours
    assert adapter_config({"r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "q_proj"], "task_type": "X"}) == ours
    assert adapter_config(ours) is ours


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"r": 0}, "r is 0"),
        ({"r": "eight"}, "`int`"),
        ({"lora_alpha": math.inf}, "lora_alpha inf"),
        ({"lora_alpha": 1e39}, "lora_alpha 1e\\+39"),
        ({"lora_alpha": math.nan}, "lora_alpha nan"),
        ({"rank_pattern": {"(": 4}}, "pattern"),
    ],
)
def test_what_b_times_a_cannot_say_is_refused_in_words(fields, named):
    with pytest.raises(ValueError, match=named):
        adapter_config({"r": 8, "lora_alpha": 16} | fields)


def test_what_is_no_config_is_a_type_error():
    with pytest.raises(TypeError, match=r"adapter_config\.json"):
        adapter_config("policy")


@pytest.mark.parametrize("one", [LoraConfig(), {"r": 8, "lora_alpha": 16}], ids=["object", "mapping"])
def test_of_a_models_whole_peft_config_one_is_to_be_chosen(one):
    with pytest.raises(ValueError, match=r"an adapter's name -> config: pass peft_config\['default'\]$"):
        adapter_config({"default": one})
    with pytest.raises(ValueError, match=r"pass peft_config\['a'\] or peft_config\['b'\]$"):
        adapter_config({"a": one, "b": one})


def test_a_peft_model_in_place_of_its_config_is_told_where_that_is():
    model = SimpleNamespace(peft_config={"default": LoraConfig()})  # stands for a PeftModel
    with pytest.raises(TypeError, match=r"SimpleNamespace is no adapter config: pass its peft_config\['default'\]$"):
        adapter_config(model)


def test_scale_and_rank_follow_peft():
    config = AdapterConfig(16, 32.0, rank_pattern={"layers.1.self_attn.q_proj": 4}, alpha_pattern={"o_proj": 8})
    assert config.scale("model.layers.0.self_attn.q_proj") == 2.0
    assert config.rank("model.layers.1.self_attn.q_proj") == 4
    assert config.rank("model.layers.11.self_attn.q_proj") == 16
    assert config.scale("model.layers.1.self_attn.q_proj") == 8.0
    assert config.scale("model.layers.1.self_attn.o_proj") == 0.5
    assert AdapterConfig(16, 32.0, use_rslora=True).scale("x") == 8.0


@pytest.mark.parametrize(
    ("config", "adapted"),
    [
        (AdapterConfig(1, 1, target_modules=["q_proj"]), True),
        (AdapterConfig(1, 1, target_modules=["proj"]), False),
        (AdapterConfig(1, 1, target_modules=r".*self_attn\.(q|k)_proj"), True),
        (AdapterConfig(1, 1, target_modules=["q_proj"], exclude_modules=["layers.3.self_attn.q_proj"]), False),
        (AdapterConfig(1, 1, target_modules=["q_proj"], layers_to_transform=[2, 3]), True),
        (AdapterConfig(1, 1, target_modules=["q_proj"], layers_to_transform=2), False),
        (AdapterConfig(1, 1, target_modules="all-linear"), False),
        (AdapterConfig(1, 1), False),
    ],
)
def test_which_modules_a_config_speaks_of(config, adapted):
    assert config.targets("model.layers.3.self_attn.q_proj") is adapted


@pytest.mark.parametrize(
    "names",
    [
        (f"{PREFIX}.q_proj.lora_A.weight", f"{PREFIX}.q_proj.lora_B.weight"),
        (f"{PREFIX}.q_proj.lora_A.default.weight", f"{PREFIX}.q_proj.lora_B.default.weight"),
        (f"module.{PREFIX}.q_proj.lora_A.weight", f"_orig_mod.{PREFIX}.q_proj.lora_B.weight"),
        ("model.layers.0.self_attn.q_proj.lora_A", "model.layers.0.self_attn.q_proj.lora_B"),
    ],
)
def test_every_form_of_a_state_dict_has_one_name_for_a_tensor(names):
    found = adapter_tensors({name: number for number, name in enumerate(names)})
    assert found == [("model.layers.0.self_attn.q_proj.lora_A", 0), ("model.layers.0.self_attn.q_proj.lora_B", 1)]


def test_of_a_whole_model_the_base_stays_and_one_adapter_is_chosen():
    whole = {
        f"{PREFIX}.q_proj.base_layer.weight": 0,
        "base_model.model.model.norm.weight": 0,
        f"{PREFIX}.q_proj.lora_A.one.weight": 1,
        f"{PREFIX}.q_proj.lora_A.two.weight": 2,
    }
    assert [tensor for _, tensor in adapter_tensors(whole, "two")] == [2]
    with pytest.raises(ValueError, match="say which: one, two"):
        adapter_tensors(whole)
    with pytest.raises(ValueError, match="no adapter 'three'"):
        adapter_tensors(whole, "three")


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}.q_proj.lora_magnitude_vector.weight",
        "base_model.model.lm_head.modules_to_save.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.lm_head.weight",
    ],
)
def test_what_else_was_trained_is_not_lost_in_silence(name):
    with pytest.raises(ValueError, match=name):
        adapter_tensors({f"{PREFIX}.q_proj.lora_A.weight": 0, name: 1})


def test_a_state_dict_without_an_adapter_is_refused():
    with pytest.raises(ValueError, match="no LoRA tensors"):
        adapter_tensors({"model.norm.weight": 0})


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "a" * 129, "a b", "ä"])
def test_names_that_can_be_no_file_and_no_model_are_refused(name):
    with pytest.raises(ValueError, match="cannot be an adapter's name"):
        check_name(name)
    check_name("policy-a.v2_x")


NO_CONFIGS = {
    "r of 0": {"r": 0},
    "r below": {"r": -1},
    "r beyond floats": {"r": 10**400},
    "r in a pattern": {"rank_pattern": {"q_proj": 0}},
    "alpha beyond floats": {"lora_alpha": 10**400},
    "pattern": {"rank_pattern": {"(": 4}},
    "pattern too deep": {"alpha_pattern": {"(" * 5000 + ")" * 5000: 4}},
    "pattern beyond the engine": {"rank_pattern": {"a{99999999999}": 4}},
    "patterns too long": {"rank_pattern": {"a" * 40000: 4}, "target_modules": "a" * 40000},
    "targets": {"target_modules": "("},
    "exceptions": {"target_modules": ["q_proj"], "exclude_modules": "["},
}


@pytest.mark.parametrize("fields", NO_CONFIGS.values(), ids=NO_CONFIGS)
def test_no_config_that_cannot_be_computed_with_comes_to_be(fields):
    """Neither of a trainer's object nor off the wire, where who sent it need not have looked."""
    fields = {"r": 8, "lora_alpha": 16} | fields
    with pytest.raises(ValueError, match="config"):
        adapter_config(fields)
    with pytest.raises(msgspec.ValidationError, match=r"config|out of range"):
        msgspec.convert(fields, AdapterConfig)


@pytest.mark.parametrize(
    "pattern", [r".*\.layers\.(\d+)\.(self_attn|mlp)\.(q|k)_proj", r"(.*\.)?(q_proj)$", r"(model\.)+[(*+)]+q"]
)
def test_patterns_that_end_are_taken(pattern):
    assert AdapterConfig(8, 16, target_modules=pattern).target_modules == pattern

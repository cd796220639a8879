"""What PEFT trains and saves -> what an adapter's push sends: a checked config, and A and B by module.

PEFT is never imported: a config is its object, a mapping, or what adapter_config.json holds; a state dict is what
`get_peft_model_state_dict` returns or `adapter_model.safetensors` holds, or a model's own `state_dict()`.
Whatever would change the served function and cannot be served is refused here, in words.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
A, B = "lora_A", "lora_B"
_WHAT = "the adapter's config: "
_MAX_RANK = 1 << 20
"""No matrix has so many rows; what a service takes is less (max_adapter_rank)."""
_MAX_PATTERNS = 1 << 16
"""Characters, which are compiled in a second or two at the worst. Modules named one by one take 50 each."""
_MAX_ALPHA = 1e30
"""B A is multiplied in float32, where what is much more makes infinities."""
_WRAPPERS = frozenset(
    ("base_model", "pretrained_model", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
)
_LORA = re.compile(r"(?P<module>.+)\.(?P<which>lora_A|lora_B)(?:\.(?P<adapter>[^.]+))?\.weight")
_LORA_BARE = re.compile(r"(?P<module>.+)\.(?P<which>lora_A|lora_B)")
_BASE = re.compile(r".+\.base_layer\.(weight|bias)")
# Of a LoraConfig, what must be as here for B @ A * scale to be all that the adapter does.
_MUST_BE_UNSET = {
    "use_dora": "DoRA",
    "lora_bias": "a bias on lora_B (lora_bias)",
    "modules_to_save": "whole modules trained beside it (modules_to_save)",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "fan_in_fan_out": "weights stored transposed (fan_in_fan_out)",
    "use_qalora": "QA-LoRA",
    "layer_replication": "replicated layers (layer_replication)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "use_bdlora": "BD-LoRA",
    "monteclora_config": "MonteCLoRA",
}


class AdapterConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """What of a LoraConfig decides what an adapter computes: W x + scale B A x. Patterns match as PEFT's do, and may
    take for ever at that: who asks about modules on behalf of others bounds the time.

    Raises ValueError (off the wire ValidationError) for numbers and patterns with which nothing can be computed.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}  # regular expression at the end of a module's name -> r
    alpha_pattern: dict[str, float] = {}
    target_modules: list[str] | str | None = None  # ends of names, or one expression for whole names; None: not said
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None

    def __post_init__(self) -> None:
        ranks = (self.r, *self.rank_pattern.values())
        alphas = (self.lora_alpha, *self.alpha_pattern.values())
        if min(ranks) < 1 or max(ranks) > _MAX_RANK or not all(abs(alpha) <= _MAX_ALPHA for alpha in alphas):
            said = f"r is {_short(ranks)}, lora_alpha {_short(alphas)}"
            raise ValueError(f"{_WHAT}{said}: ranks are 1 to {_MAX_RANK}, alphas at most {_MAX_ALPHA:g}")
        whole = [names for names in (self.target_modules, self.exclude_modules) if isinstance(names, str)]
        patterns = (*self.rank_pattern, *self.alpha_pattern, *whole)
        if (length := sum(map(len, patterns))) > _MAX_PATTERNS:
            raise ValueError(f"{_WHAT}its patterns have {length} characters, at most {_MAX_PATTERNS} are taken")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{_WHAT}{pattern[:256]!r} is no pattern of module names: {error}") from None

    def targets(self, module: str) -> bool:
        """Whether PEFT adapts a module of this name; False where `target_modules` does not say."""
        if self.target_modules is None or self.target_modules == "all-linear":
            return False
        if not _listed(self.target_modules, module) or _listed(self.exclude_modules or [], module):
            return False
        if self.layers_to_transform is None:
            return True
        layers = self.layers_to_transform
        index = re.match(r".*\.[^.]*\.(\d+)\.", module)
        return index is not None and int(index[1]) in ([layers] if isinstance(layers, int) else layers)

    def rank(self, module: str) -> int:
        """The rank (PEFT's r) of a module's adapter."""
        return _of_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What B A is multiplied by: alpha / r, of rsLoRA alpha / sqrt(r)."""
        alpha, r = _of_pattern(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(r) if self.use_rslora else alpha / r


def adapter_config(config: Any) -> AdapterConfig:
    """The config of a peft.LoraConfig, a mapping (adapter_config.json) or an AdapterConfig.

    Raises ValueError listing everything that cannot be served, TypeError for what is no config.
    """
    if isinstance(config, AdapterConfig):
        return config
    fields = _fields(config)
    if fields and "r" not in fields and all(_is_config(value) for value in fields.values()):
        raise ValueError(f"{_WHAT}this is a model's whole peft_config, an adapter's name -> config: {_one_of(fields)}")
    problems = [why for key, why in _MUST_BE_UNSET.items() if fields.get(key) not in (None, False, [], {}, ())]
    kind = fields.get("peft_type", "LORA")
    if getattr(kind, "value", kind) != "LORA":
        problems.append(f"peft_type {getattr(kind, 'value', kind)}")
    if fields.get("bias", "none") != "none":
        problems.append(f"trained biases (bias={fields['bias']!r})")
    if problems:
        raise ValueError(f"an adapter with {', '.join(problems)} cannot be served: plain LoRA can")
    known = {name: fields[name] for name in AdapterConfig.__struct_fields__ if fields.get(name) is not None}
    for name in ("target_modules", "exclude_modules"):  # PEFT keeps sets
        if isinstance(known.get(name), set | frozenset | tuple):
            known[name] = sorted(known[name])
    try:
        return msgspec.convert(known, AdapterConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{_WHAT}{str(error).removeprefix(_WHAT)}") from None


def adapter_tensors(
    named: Mapping[str, T] | Iterable[tuple[str, T]], adapter: str | None = None
) -> list[tuple[str, T]]:
    """(name, tensor) of each A and B, names without wrappers: ``model.layers.0.self_attn.q_proj.lora_A``.

    adapter: which of several adapters in a model's own state dict; None = the only one. Of such a dict the base's
    tensors are left out. Raises ValueError naming what else is there, since it was trained and would be lost.
    """
    items = list(named.items() if isinstance(named, Mapping) else named)
    return [(name, items[number][1]) for number, name in _chosen(tuple(name for name, _ in items), adapter)]


def check_name(name: str) -> None:
    """Raises ValueError for what cannot be an adapter's name: it becomes a model's name, and part of a file's."""
    if not ADAPTER_NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be an adapter's name: letters, digits, '.', '_' and '-', 128 at most")


@lru_cache(maxsize=8)
def _chosen(names: tuple[str, ...], adapter: str | None) -> list[tuple[int, str]]:
    """Of `adapter_tensors`: the number of each, and its name. State dicts come with the same names again and again."""
    parsed = [_parsed(name) for name in names]
    adapters = {one[0] for one in parsed if one is not None}
    if not adapters:
        raise ValueError("no LoRA tensors (….lora_A.weight and ….lora_B.weight) are in this state dict")
    if adapter is None and len(adapters) > 1:
        raise ValueError(f"several adapters are in this state dict, say which: {', '.join(sorted(adapters))}")
    if adapter is not None and "" not in adapters:
        if adapter not in adapters:
            raise ValueError(f"no adapter {adapter!r} is in this state dict, only {', '.join(sorted(adapters))}")
        adapters = {adapter}
    others = [name for name, one in zip(names, parsed, strict=True) if one is None]
    _check_others(others, whole_model=any(_BASE.fullmatch(name) for name in others))
    return [(number, one[1]) for number, one in enumerate(parsed) if one is not None and one[0] in adapters]


def _check_others(others: list[str], *, whole_model: bool) -> None:
    """Everything that is neither A nor B. whole_model: the base's own tensors are among them, and stay as they are."""
    trained = [name for name in others if not whole_model or "lora_" in name or "modules_to_save" in name]
    if trained:
        shown = ", ".join(sorted(trained)[:20]) + (f" and {len(trained) - 20} more" if len(trained) > 20 else "")
        raise ValueError(f"not part of a plain LoRA adapter, and cannot be served: {shown}")


@lru_cache(maxsize=1 << 16)
def _parsed(name: str) -> tuple[str, str] | None:
    """(adapter, name without wrappers) of an A or B; None for anything else. The same names come with every push."""
    match = _LORA.fullmatch(name) or _LORA_BARE.fullmatch(name)
    if match is None:
        return None
    return match.groupdict().get("adapter") or "", f"{_unwrapped(match['module'])}.{match['which']}"


def _unwrapped(module: str) -> str:
    path = [segment for segment in module.split(".") if segment not in _WRAPPERS]
    while path[:2] == ["model", "model"]:  # PEFT's own, before the model's
        path = path[1:]
    return ".".join(path)


def _fields(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    kind, held = type(config).__name__, getattr(config, "peft_config", None)
    if isinstance(held, Mapping):
        raise TypeError(f"{kind} is no adapter config: {_one_of(held, 'its peft_config')}")
    raise TypeError(f"{kind} is no adapter config: a peft.LoraConfig or its adapter_config.json")


def _is_config(value: Any) -> bool:
    return isinstance(value.get("r") if isinstance(value, Mapping) else getattr(value, "r", None), int)


def _one_of(configs: Mapping[str, Any], whose: str = "peft_config") -> str:
    """What to pass in place of all configs of a model, by adapter."""
    return "pass " + " or ".join(f"{whose}[{name!r}]" for name in configs)


def _short(numbers: Sequence[float]) -> str:
    return ", ".join(str(number)[:32] for number in numbers[:8])


def _listed(names: list[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _of_pattern(patterns: Mapping[str, T], module: str, otherwise: T) -> T:
    """The value of the first pattern that the module's name ends with, after a dot or as a whole."""
    for pattern, value in patterns.items():
        if _ending(pattern).match(module):
            return value
    return otherwise


@lru_cache(maxsize=4096)
def _ending(pattern: str) -> re.Pattern[str]:
    """What matches module names that end with it."""
    return re.compile(rf"(.*\.)?({pattern})$")

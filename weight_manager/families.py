"""HF config.json -> Manifest: which tensors each model family serves and how they split over ranks.

Names, shapes and defaults are those of the checkpoints on the hub (experts are separate 2-D tensors
there). A key absent from the config takes the family's own default. Attention splits by whole KV heads,
the query heads that read a KV head stay with it; so any tp up to the number of KV heads works, evenly
or not. No Paddle here: the store computes the manifest too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from weight_manager.manifest import Dtype, Manifest, Parameter

Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """What differs between decoder families. bias flags: config key, or a constant."""

    qkv_bias: str | bool = False
    out_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: bool = False
    tied: bool = False  # default of tie_word_embeddings
    head_dim: int | None = None  # default of head_dim; None = hidden_size / num_attention_heads
    experts: Callable[[Config, int], "Experts | None"] | None = None
    mtp: bool = False  # the config may ask for a layer that predicts one token further (num_nextn_predict_layers)


@dataclass(frozen=True)
class Experts:
    """The expert MLP of one layer. shared: intermediate size of the always-on expert, 0 = none."""

    count: int
    intermediate: int
    shared: int = 0
    correction_bias: bool = False


def _qwen3_experts(config: Config, layer: int) -> Experts | None:
    step = int(config.get("decoder_sparse_step", 1))
    dense = layer in (config.get("mlp_only_layers") or []) or (layer + 1) % step != 0
    count = "num_experts" if "num_experts" in config else "num_local_experts"  # transformers 5 saves the latter
    return None if dense else Experts(_int(config, count), _int(config, "moe_intermediate_size"))


def _ernie_experts(config: Config, layer: int) -> Experts | None:
    first, last = int(config.get("moe_layer_start_index", 1)), int(config.get("moe_layer_end_index", -1))
    last = _int(config, "num_hidden_layers") - 1 if last < 0 else last
    if not first <= layer <= last or (layer + 1) % int(config.get("moe_layer_interval", 1)) != 0:
        return None
    size = _int(config, "moe_intermediate_size")
    shared = size * int(config.get("moe_num_shared_experts", 0))
    return Experts(_int(config, "moe_num_experts"), size, shared, correction_bias=True)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, head_dim=128),
    "Qwen3MoeForCausalLM": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, experts=_qwen3_experts
    ),
    "Ernie4_5ForCausalLM": Family(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", tied=True, head_dim=128, mtp=True
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", tied=True, experts=_ernie_experts, mtp=True
    ),
}


def manifest_for(config: Config, dtype: Dtype) -> Manifest:
    """Everything the model of this HF config serves, in layout order.

    Raises ValueError for an architecture that is not served, or naming the config key that is missing
    or does not fit.
    """
    architectures = config.get("architectures") or [None]
    family = FAMILIES.get(architectures[0])
    if family is None:
        raise ValueError(f"architecture {architectures[0]!r} is not served; known: {', '.join(FAMILIES)}")
    return Manifest(architectures[0], dtype, tuple(_parameters(config, family)))


def _parameters(config: Config, family: Family) -> Iterator[Parameter]:
    vocab, hidden = _int(config, "vocab_size"), _int(config, "hidden_size")
    tied = bool(config.get("tie_word_embeddings", family.tied))
    aliases = ("lm_head.weight",) if tied else ()
    yield Parameter("model.embed_tokens.weight", (vocab, hidden), split=0, even=True, aliases=aliases)
    for layer in range(_int(config, "num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        yield Parameter(f"{prefix}.input_layernorm.weight", (hidden,))
        yield from _attention(config, family, f"{prefix}.self_attn", hidden)
        yield Parameter(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        experts = family.experts(config, layer) if family.experts else None
        mlp_bias = _flag(config, family.mlp_bias)
        if experts is None:
            yield from _mlp(f"{prefix}.mlp", hidden, _int(config, "intermediate_size"), mlp_bias)
        else:
            yield from _experts(f"{prefix}.mlp", hidden, experts, mlp_bias)
    yield Parameter("model.norm.weight", (hidden,))
    if not tied:
        yield Parameter("lm_head.weight", (vocab, hidden), split=0, even=True)
    if family.mtp and config.get("num_nextn_predict_layers"):
        yield from _mtp(config, family, hidden)


def _mtp(config: Config, family: Family, hidden: int) -> Iterator[Parameter]:
    """ERNIE's layer that predicts one token further; it reads the model's own embedding, last norm and head."""
    if _int(config, "num_nextn_predict_layers") != 1:
        raise ValueError("config.json: num_nextn_predict_layers above 1 is not served")
    yield Parameter("model.mtp_emb_norm.0.weight", (hidden,))
    yield Parameter("model.mtp_hidden_norm.0.weight", (hidden,))
    yield Parameter("model.mtp_linear_proj.0.weight", (hidden, 2 * hidden))
    if _flag(config, family.out_bias):
        yield Parameter("model.mtp_linear_proj.0.bias", (hidden,))
    prefix = "model.mtp_block.0"
    yield Parameter(f"{prefix}.input_layernorm.weight", (hidden,))
    yield from _attention(config, family, f"{prefix}.self_attn", hidden)
    yield Parameter(f"{prefix}.post_attention_layernorm.weight", (hidden,))
    yield from _mlp(f"{prefix}.mlp", hidden, _int(config, "intermediate_size"), _flag(config, family.mlp_bias))


def _attention(config: Config, family: Family, prefix: str, hidden: int) -> Iterator[Parameter]:
    heads = _int(config, "num_attention_heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    dim = int(config.get("head_dim") or family.head_dim or hidden // heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    group = heads // kv_heads
    for kind in ("weight", "bias") if _flag(config, family.qkv_bias) else ("weight",):
        for member, rows in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
            yield Parameter(
                f"{prefix}.{member}_proj.{kind}",
                (rows, hidden) if kind == "weight" else (rows,),
                split=0,
                heads=kv_heads,
                group=group if member == "q" else 0,
                fused=f"{prefix}.qkv_proj.{kind}",
            )
    yield Parameter(f"{prefix}.o_proj.weight", (hidden, heads * dim), split=1, heads=kv_heads, group=group)
    if _flag(config, family.out_bias):
        yield Parameter(f"{prefix}.o_proj.bias", (hidden,))
    if family.qk_norm:
        yield Parameter(f"{prefix}.q_norm.weight", (dim,))
        yield Parameter(f"{prefix}.k_norm.weight", (dim,))


def _mlp(prefix: str, hidden: int, size: int, bias: bool) -> Iterator[Parameter]:
    for kind in ("weight", "bias") if bias else ("weight",):
        shape = (size, hidden) if kind == "weight" else (size,)
        for member in ("gate", "up"):
            yield Parameter(f"{prefix}.{member}_proj.{kind}", shape, split=0, fused=f"{prefix}.gate_up_proj.{kind}")
    yield Parameter(f"{prefix}.down_proj.weight", (hidden, size), split=1)
    if bias:
        yield Parameter(f"{prefix}.down_proj.bias", (hidden,))


def _experts(prefix: str, hidden: int, experts: Experts, bias: bool) -> Iterator[Parameter]:
    """Router and experts: fused groups over all experts, [count * 2 * size, hidden] and [count * hidden, size]."""
    yield Parameter(f"{prefix}.gate.weight", (experts.count, hidden))
    if experts.correction_bias:
        yield Parameter(f"{prefix}.moe_statics.e_score_correction_bias", (1, experts.count))
    for expert in range(experts.count):
        for p in _mlp(f"{prefix}.experts.{expert}", hidden, experts.intermediate, bias):
            member = p.name.removeprefix(f"{prefix}.experts.{expert}.")
            group = member if member.startswith("down") else "gate_up_proj." + member.rsplit(".", 1)[1]
            yield Parameter(p.name, p.shape, split=p.split, fused=f"{prefix}.experts.{group}")
    if experts.shared:
        yield from _mlp(f"{prefix}.shared_experts", hidden, experts.shared, bias)


def _int(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _flag(config: Config, key: str | bool) -> bool:
    return key if isinstance(key, bool) else bool(config.get(key, False))

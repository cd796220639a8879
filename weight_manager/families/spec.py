"""What a decoder is made of, as data: every family becomes one `DecoderSpec`.

The engine's forward pass reads it, and so does the list of tensors that are served (parameters.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from weight_manager.families.config_values import Config, count, number
from weight_manager.families.rope import RopeSpec, rope_spec

Activation = Literal["silu", "gelu_tanh"]
FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers, as config.json has them in ``layer_types``."""
_ACTIVATIONS: dict[object, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class MoeSpec:
    """One expert layer.

    intermediate: rows of one expert's gate. normalise: top-k weights are divided by their sum (at least norm_min).
    correction_bias: a learned bias moves the choice of experts but not their weights. shared: rows of the gate of an
    always-on expert that is added, 0 = there is none; shared_name: of its module. shared_gate: what it adds is weighted
    by the sigmoid of a row of its own (Qwen2-MoE).
    """

    experts: int
    intermediate: int
    top_k: int
    normalise: bool
    norm_min: float = 0.0
    correction_bias: bool = False
    shared: int = 0
    shared_name: str = "shared_experts"
    shared_gate: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """What the tokens of one layer see. rope: None = their positions are not rotated into them (NoPE).

    window: a token sees itself and the window - 1 tokens before it; 0 = all before it.
    """

    rope: RopeSpec | None
    window: int = 0


@dataclass(frozen=True)
class Norms:
    """Where a layer has RMS norms, as the checkpoint names them; None = there is none in that place.

    before_*: of what attention or MLP read. after_*: of what they add to the residual stream.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder with grouped-query attention and gated MLPs.

    intermediate: rows of a dense MLP's gate, 0 = every layer has experts. qkv_bias, out_bias, mlp_bias, head_bias:
    which matrices come with biases. attention, moe: per layer; moe None = dense MLP. mtp: there is a further, dense
    layer, which drafts tokens.
    stacked: projections that the family's modules hold as one tensor, `Manifest.stacked`.
    qk_norm: q and k are RMS-normed before they are rotated, head by head or over the whole projection.
    unit_norms: a norm's weight is stored as its distance from one. scale: of scores. score_cap, logit_cap: c of
    c * tanh(x / c), 0 = none. embed_scale: of looked-up embeddings.
    """

    vocab_size: int
    hidden_size: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    qk_norm: Literal["", "heads", "whole"]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    attention: tuple[AttentionSpec, ...]
    max_positions: int
    moe: tuple[MoeSpec | None, ...]
    mtp: bool = False
    head_bias: bool = False
    stacked: tuple[str, ...] = ()
    norms: Norms = Norms()
    unit_norms: bool = False
    activation: Activation = "silu"
    scale: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embed_scale: float = 1.0

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.moe)

    def attention_of(self, layer: int) -> AttentionSpec:
        """The attention of a layer. The drafting layer comes after the others and is like the last of them."""
        return self.attention[min(layer, self.layers - 1)]

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different ones of all layers, in the order in which layers first have them."""
        return tuple(dict.fromkeys(a.rope for a in self.attention if a.rope is not None))


def spec_from(
    config: Config,
    *,
    theta: float,
    eps: float,
    positions: int = 2048,
    tied: bool = False,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    activation: str = "hidden_act",
    types: Sequence[str] | None = None,
    window: int = 0,
    rotated: Sequence[bool] | None = None,
    partial: float | None = None,
    interleaved: bool = False,
    qk_norm: Literal["", "heads", "whole"] = "",
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    moe: tuple[MoeSpec | None, ...] | None = None,
    mtp: bool = False,
    head_bias: bool = False,
    stacked: tuple[str, ...] = (),
    norms: Norms = Norms(),
    unit_norms: bool = False,
    query_scalar: float | None = None,
    score_cap: float = 0.0,
    logit_cap: float = 0.0,
    scaled_embeddings: bool = False,
) -> DecoderSpec:
    """The common part of all families. theta, eps, positions, tied, head_dim, kv_heads: its defaults for absent keys.

    head_dim None: hidden_size / num_attention_heads. kv_heads None: as many as there are heads. activation: the key
    that names it. types: of every layer, FULL or SLIDING; None = all are FULL, and ``layer_types`` must not say
    otherwise. window: of SLIDING layers. rotated: which layers have rope, None = all. partial: the family's default of
    ``partial_rotary_factor``, None = it rotates whole heads only. moe None: no layer has experts. query_scalar: scores
    are divided by its square root, None = by that of the head's width. The rest is as in `DecoderSpec`.

    Raises ValueError for a config that asks for something no family here computes.
    """
    acts = _activation(config, activation)
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    shared = _kv_heads(config, heads, kv_heads)
    dim = count(config, "head_dim") if config.get("head_dim") is not None else head_dim or hidden // heads
    layers = count(config, "num_hidden_layers")
    moe = moe if moe is not None else (None,) * layers
    trained = int(number(config, "max_position_embeddings", positions))
    kinds = _types(config, layers) if types is None else tuple(types)
    ropes = {
        kind: rope_spec(
            config, dim, theta=theta, positions=trained, interleaved=interleaved, partial=partial, layer_type=kind
        )
        for kind in dict.fromkeys(kinds)
    }
    return DecoderSpec(
        vocab_size=count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate=count(config, "intermediate_size") if mtp or None in moe else 0,
        heads=heads,
        kv_heads=shared,
        head_dim=dim,
        eps=number(config, "rms_norm_eps", eps),
        tied=bool(config.get("tie_word_embeddings", tied)),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        attention=tuple(
            AttentionSpec(ropes[kind] if rotated is None or rotated[layer] else None, window if kind == SLIDING else 0)
            for layer, kind in enumerate(kinds)
        ),
        max_positions=trained,
        moe=moe,
        mtp=mtp,
        head_bias=head_bias,
        stacked=stacked,
        norms=norms,
        unit_norms=unit_norms,
        activation=acts,
        scale=(dim if query_scalar is None else query_scalar) ** -0.5,
        score_cap=score_cap,
        logit_cap=logit_cap,
        embed_scale=hidden**0.5 if scaled_embeddings else 1.0,
    )


def layer_types(config: Config, default: Callable[[int], str], window: int) -> tuple[str, ...]:
    """Every layer's type: ``layer_types``, or where that is absent or null what the family's rule says of each index.

    window: 0 = there is none. Raises ValueError for another type, or a sliding one where there is no window.
    """
    layers, found = count(config, "num_hidden_layers"), config.get("layer_types")
    if found is None:
        found = [default(layer) for layer in range(layers)]
    if not isinstance(found, list) or len(found) != layers:
        raise ValueError(
            f"config.json: layer_types must have a type for each of num_hidden_layers {layers}, got {found!r}"
        )
    for kind in found:
        if kind not in {FULL, SLIDING}:
            raise ValueError(f"config.json: layer_types has {kind!r}, which is not served")
    if SLIDING in found and not window:
        raise ValueError("config.json: layer_types has 'sliding_attention', but sliding_window says that there is none")
    return tuple(found)


def _kv_heads(config: Config, heads: int, default: int | None) -> int:
    found = heads
    if config.get("num_key_value_heads") is not None:
        found = count(config, "num_key_value_heads")
    elif "num_key_value_heads" not in config and default is not None:
        found = default
    if heads % found:
        raise ValueError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {found}")
    return found


def _types(config: Config, layers: int) -> tuple[str, ...]:
    """All FULL, of a family that has no others. Raises ValueError when the config wants some."""
    for kind in config.get("layer_types") or []:
        if kind != FULL:
            raise ValueError(f"config.json: layer_types has {kind!r}, which is not served")
    if config.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window is not served")
    return (FULL,) * layers


def _activation(config: Config, key: str) -> Activation:
    default = "silu" if key == "hidden_act" else "gelu_pytorch_tanh"
    said = config.get(key, default)
    if said not in _ACTIVATIONS:
        raise ValueError(f"config.json: {key} {said!r} is not served, only {' and '.join(map(str, _ACTIVATIONS))} are")
    return _ACTIVATIONS[said]

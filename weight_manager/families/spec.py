"""What a decoder is made of, as data: every family becomes one `DecoderSpec`.

The engine's forward pass reads it, and so does the list of tensors that are served (parameters.py).
"""

from dataclasses import dataclass

from weight_manager.families.config_values import Config, count, number
from weight_manager.families.rope import RopeSpec, rope_spec


@dataclass(frozen=True)
class MoeSpec:
    """One expert layer.

    intermediate: rows of one expert's gate. normalise: top-k weights are divided by their sum (at least norm_min).
    correction_bias: a learned bias moves the choice of experts but not their weights. shared: rows of the gate of an
    always-on expert that is added, 0 = there is none.
    """

    experts: int
    intermediate: int
    top_k: int
    normalise: bool
    norm_min: float = 0.0
    correction_bias: bool = False
    shared: int = 0


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm decoder with grouped-query attention, rotary positions and gated MLPs.

    intermediate: rows of a dense MLP's gate, 0 = every layer has experts. qkv_bias, out_bias, mlp_bias: which matrices
    come with biases. moe: per layer, None = dense MLP. mtp: there is a further, dense layer, which drafts tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    rope: RopeSpec
    max_positions: int
    moe: tuple[MoeSpec | None, ...]
    mtp: bool = False

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.moe)


def spec_from(
    config: Config,
    *,
    theta: float,
    eps: float,
    tied: bool = False,
    head_dim: int | None = None,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    interleaved: bool = False,
    moe: tuple[MoeSpec | None, ...] | None = None,
    mtp: bool = False,
) -> DecoderSpec:
    """The common part of all families. theta, eps, tied, head_dim: the family's defaults for absent keys.

    head_dim None: hidden_size / num_attention_heads. moe None: no layer has experts. The rest is as in `DecoderSpec`.

    Raises ValueError for a config that asks for something no family here computes.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {config['hidden_act']!r} is not served, only silu is")
    if config.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window is not served")
    for kind in config.get("layer_types") or []:
        if kind != "full_attention":
            raise ValueError(f"config.json: layer_types has {kind!r}, which is not served")
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    dim = count(config, "head_dim") if config.get("head_dim") is not None else head_dim or hidden // heads
    moe = moe if moe is not None else (None,) * count(config, "num_hidden_layers")
    positions = int(number(config, "max_position_embeddings", 2048))
    return DecoderSpec(
        vocab_size=count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate=count(config, "intermediate_size") if mtp or None in moe else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        eps=number(config, "rms_norm_eps", eps),
        tied=bool(config.get("tie_word_embeddings", tied)),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        rope=rope_spec(config, dim, theta=theta, positions=positions, interleaved=interleaved),
        max_positions=positions,
        moe=moe,
        mtp=mtp,
    )

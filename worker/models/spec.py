"""What a decoder is made of, as data: every family becomes one `DecoderSpec`, read by one forward pass."""

from dataclasses import dataclass
from typing import Any

from worker.models.config_values import number
from worker.models.rope import RopeSpec, rope_spec

Config = dict[str, Any]


@dataclass(frozen=True)
class MoeSpec:
    """Routing of one expert layer.

    normalise: top-k weights are divided by their sum (at least norm_min). correction_bias: a learned bias
    moves the choice of experts but not their weights. shared: an always-on expert is added.
    """

    experts: int
    top_k: int
    normalise: bool
    norm_min: float = 0.0
    correction_bias: bool = False
    shared: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm decoder with grouped-query attention, rotary positions and gated MLPs.

    Biases are not listed: a layer has those its weights come with. moe: per layer, None = dense MLP. mtp: the
    checkpoint has a further, dense layer that drafts tokens (`decoder.draft_hidden`).
    """

    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    qk_norm: bool
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
    interleaved: bool = False,
    moe: tuple[MoeSpec | None, ...] | None = None,
    mtp: bool = False,
) -> DecoderSpec:
    """The common part of all families. theta, eps, tied, head_dim: the family's defaults for absent keys.

    Raises ValueError for a config that asks for something no family here computes.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {config['hidden_act']!r} is not served, only silu is")
    if config.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window is not served")
    for kind in config.get("layer_types") or []:
        if kind != "full_attention":
            raise ValueError(f"config.json: layer_types has {kind!r}, which is not served")
    heads = int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or head_dim or config["hidden_size"] // heads)
    positions = int(number(config, "max_position_embeddings", 2048))
    return DecoderSpec(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=dim,
        eps=number(config, "rms_norm_eps", eps),
        tied=bool(config.get("tie_word_embeddings", tied)),
        qk_norm=qk_norm,
        rope=rope_spec(config, dim, theta=theta, positions=positions, interleaved=interleaved),
        max_positions=positions,
        moe=moe if moe is not None else (None,) * int(config["num_hidden_layers"]),
        mtp=mtp,
    )

"""A decoder's weights by role: HF names are spelled here and nowhere else in the engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from weight_manager.families.spec import DecoderSpec, MoeSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Linear(Generic[T]):
    """weight: [out, in] as HF stores it. bias: [out], when the checkpoint has one."""

    weight: T
    bias: T | None


@dataclass(frozen=True)
class Mlp(Generic[T]):
    """Gated MLP; gate_up holds gate's rows, then up's."""

    gate_up: Linear[T]
    down: Linear[T]


@dataclass(frozen=True)
class Experts(Generic[T]):
    """router: [count, hidden]. gate_up: all experts' gate_up rows, one expert after the other; down likewise.

    correction: [1, count], moves the choice only. shared: the always-on expert. shared_gate: [1, hidden], of the
    sigmoid that weighs what the shared expert adds.
    """

    router: T
    correction: T | None
    gate_up: Linear[T]
    down: Linear[T]
    shared: Mlp[T] | None
    shared_gate: T | None


@dataclass(frozen=True)
class Layer(Generic[T]):
    """One decoder layer. qkv holds q's rows, then k's, then v's. attended_norm, mlp_norm: of what is added.

    q_norm, k_norm: [head_dim], or of all of this rank's heads (`DecoderSpec.qk_norm`).
    """

    input_norm: T | None
    qkv: Linear[T]
    q_norm: T | None
    k_norm: T | None
    out: Linear[T]
    attended_norm: T | None
    post_norm: T | None
    mlp: Mlp[T] | Experts[T]
    mlp_norm: T | None


@dataclass(frozen=True)
class Draft(Generic[T]):
    """The layer that predicts one token further. projection: [hidden, 2 * hidden], of embedding and hidden state."""

    embed_norm: T
    hidden_norm: T
    projection: Linear[T]
    layer: Layer[T]


@dataclass(frozen=True)
class Weights(Generic[T]):
    """Everything one rank reads in a forward pass. draft: its embedding, last norm and head are the model's own."""

    embed: T
    layers: tuple[Layer[T], ...]
    norm: T
    head: T
    head_bias: T | None
    draft: Draft[T] | None


def is_norm(name: str) -> bool:
    """Whether this tensor is the weight of an RMS norm."""
    return name.endswith("norm.weight")


def collect(spec: DecoderSpec, tensors: Mapping[str, T]) -> Weights[T]:
    """Sort a rank's tensors (canonical names and fused groups) into roles. Raises KeyError for a missing name."""

    def linear(name: str) -> Linear[T]:
        return Linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def mlp(prefix: str) -> Mlp[T]:
        return Mlp(linear(f"{prefix}.gate_up_proj"), linear(f"{prefix}.down_proj"))

    def norm(prefix: str, name: str | None) -> T | None:
        return None if name is None else tensors[f"{prefix}.{name}.weight"]

    def layer(prefix: str, moe: MoeSpec | None) -> Layer[T]:
        return Layer(
            input_norm=norm(prefix, spec.norms.before_attention),
            qkv=linear(f"{prefix}.self_attn.qkv_proj"),
            q_norm=tensors[f"{prefix}.self_attn.q_norm.weight"] if spec.qk_norm else None,
            k_norm=tensors[f"{prefix}.self_attn.k_norm.weight"] if spec.qk_norm else None,
            out=linear(f"{prefix}.self_attn.o_proj"),
            attended_norm=norm(prefix, spec.norms.after_attention),
            post_norm=norm(prefix, spec.norms.before_mlp),
            mlp=mlp(f"{prefix}.mlp")
            if moe is None
            else Experts(
                router=tensors[f"{prefix}.mlp.gate.weight"],
                correction=tensors[f"{prefix}.mlp.moe_statics.e_score_correction_bias"]
                if moe.correction_bias
                else None,
                gate_up=linear(f"{prefix}.mlp.experts.gate_up_proj"),
                down=linear(f"{prefix}.mlp.experts.down_proj"),
                shared=mlp(f"{prefix}.mlp.{moe.shared_name}") if moe.shared else None,
                shared_gate=tensors[f"{prefix}.mlp.shared_expert_gate.weight"] if moe.shared_gate else None,
            ),
            mlp_norm=norm(prefix, spec.norms.after_mlp),
        )

    embed = tensors["model.embed_tokens.weight"]
    return Weights(
        embed=embed,
        layers=tuple(layer(f"model.layers.{index}", moe) for index, moe in enumerate(spec.moe)),
        norm=tensors["model.norm.weight"],
        head=embed if spec.tied else tensors["lm_head.weight"],
        head_bias=tensors["lm_head.bias"] if spec.head_bias else None,
        draft=Draft(
            embed_norm=tensors["model.mtp_emb_norm.0.weight"],
            hidden_norm=tensors["model.mtp_hidden_norm.0.weight"],
            projection=linear("model.mtp_linear_proj.0"),
            layer=layer("model.mtp_block.0", None),
        )
        if spec.mtp
        else None,
    )

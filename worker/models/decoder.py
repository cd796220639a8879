"""The decoder of every family: its weights by role, and the forward pass, written once over a small set of operations.

HF names are spelled in `collect` and nowhere else in the engine. `Ops` is what a backend supplies: `paddle_backend`
computes at once with Paddle tensors, `onednn_backend` records a program. An operation is as large as what can be fused
(a projection adds to the residual stream itself).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy.typing as npt

from weight_manager.families.spec import DecoderSpec, MoeSpec
from worker.engine.base import Float32, ForwardBatch
from worker.models.low_rank import LowRank

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


W = TypeVar("W")
X = TypeVar("X")


class Ops(Protocol[W, X]):
    """One step's operations over its T tokens. W: a weight; X: rows [T, n] in whatever form the backend keeps."""

    def embed(self, weight: W) -> X:
        """Residual stream: the step's token ids looked up and scaled, [T, hidden]."""
        ...

    def norm(self, x: X, weight: W | None) -> X:
        """RMS norm of the residual stream; None: the stream itself, as products read it."""
        ...

    def attention(self, layer: int, h: X, qkv: Linear[W], q_norm: W | None, k_norm: W | None) -> X:
        """Project to q, k, v, rotate, write KV of all T tokens, attend: [T, heads * head_dim] of this rank.

        How this layer rotates and how far it sees is `DecoderSpec.attention_of`'s.
        """
        ...

    def gated(self, h: X, gate_up: Linear[W]) -> X:
        """activation(gate) * up."""
        ...

    def add_projected(self, x: X, y: X, linear: Linear[W], norm: W | None = None) -> X:
        """x + linear(y), summed over the ranks that hold `linear`'s columns; norm: RMS norm of what is added."""
        ...

    def add_experts(self, x: X, h: X, experts: Experts[W], moe: MoeSpec) -> X:
        """x + the routed experts' weighted outputs (+ the shared expert's), summed over ranks."""
        ...


class DraftOps(Ops[W, X], Protocol):
    """Operations of a backend that computes drafting layers, too."""

    def joined(self, x: X, norm: W, previous_norm: W) -> X:
        """x normed, and below it the hidden states before the step's tokens normed: [T, 2 * hidden]."""
        ...

    def projected(self, y: X, linear: Linear[W]) -> X:
        """linear(y), a weight that every rank holds whole, as a new residual stream."""
        ...


def hidden(ops: Ops[W, X], spec: DecoderSpec, weights: Weights[W]) -> X:
    """One forward pass up to the last layer's residual stream, over the step that `ops` was prepared for."""
    x = ops.embed(weights.embed)
    for index, layer in enumerate(weights.layers):
        x = _behind(ops, x, _attended(ops, index, x, layer), layer, spec.moe[index])
    return x


def draft_hidden(ops: DraftOps[W, X], spec: DecoderSpec, weights: Weights[W], *, only_keys: bool) -> X:
    """The drafting layer's residual stream: what it says of the token after each of the step's tokens.

    It reads a token's embedding and the hidden state (residual stream) of the token before, so it may run before the
    model itself has seen the token. Its keys and values are cached as those of layer `spec.layers`. only_keys: they
    are all that is wanted.
    """
    draft = weights.draft
    assert draft is not None
    x = ops.projected(ops.joined(ops.embed(weights.embed), draft.embed_norm, draft.hidden_norm), draft.projection)
    a = _attended(ops, spec.layers, x, draft.layer)
    return x if only_keys else _behind(ops, x, a, draft.layer, None)


def _attended(ops: Ops[W, X], index: int, x: X, layer: Layer[W]) -> X:
    return ops.attention(index, ops.norm(x, layer.input_norm), layer.qkv, layer.q_norm, layer.k_norm)


def _behind(ops: Ops[W, X], x: X, a: X, layer: Layer[W], moe: MoeSpec | None) -> X:
    """A layer behind its attention: the residual stream with what the MLP or the experts add. a: what attention has
    added to.
    """
    x = ops.add_projected(x, a, layer.out, layer.attended_norm)
    h = ops.norm(x, layer.post_norm)
    if isinstance(layer.mlp, Mlp):
        return ops.add_projected(x, ops.gated(h, layer.mlp.gate_up), layer.mlp.down, layer.mlp_norm)
    assert moe is not None
    assert layer.mlp_norm is None, "no family has a norm behind its experts"
    return ops.add_experts(x, h, layer.mlp, moe)


class Backend(Protocol):
    """A way to compute a decoder on one rank: the parts of `Engine` that depend on it."""

    @property
    def low_rank(self) -> LowRank:
        """What adds adapters' updates to its products."""
        ...

    @property
    def residual(self) -> npt.NDArray[Any]:
        """The last step's residual stream: the same on every rank, in whatever layout."""
        ...

    def prepare(self, views: Mapping[str, npt.NDArray[Any]]) -> object:
        """A handle on these weights for `bind`. May run beside `forward`. The views have been checked."""
        ...

    def bind(self, prepared: Any) -> None:
        """Compute with these weights from now on; None = with none."""
        ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the cache; idempotent."""
        ...

    def release_kv(self) -> int:
        """Free the cache; bytes freed."""
        ...

    def forward(self, batch: ForwardBatch) -> Float32 | None:
        """Logits [L, vocab] on rank 0, None elsewhere; the array is reused by the next call."""
        ...

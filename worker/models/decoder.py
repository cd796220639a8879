"""The forward pass of every family, written once over a small set of operations.

`Ops` is what a backend supplies: `paddle_backend` computes at once with Paddle tensors, `onednn_backend` records
a program. An operation is as large as what can be fused (a projection adds to the residual stream itself).
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from weight_manager.families.spec import DecoderSpec, MoeSpec
from worker.engine.base import Float32, ForwardBatch
from worker.models.low_rank import LowRank
from worker.models.weights import Experts, Layer, Linear, Mlp, Weights

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


def draft_hidden(ops: Ops[W, X], spec: DecoderSpec, weights: Weights[W], *, only_keys: bool) -> X:
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
    """What follows attention."""
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
        """Free it; bytes freed."""
        ...

    def forward(self, batch: ForwardBatch) -> Float32 | None:
        """Logits [L, vocab] on rank 0, None elsewhere; the array is reused by the next call."""
        ...

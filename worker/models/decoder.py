"""The forward pass of every family, written once over a small set of operations.

`Ops` is what a backend supplies: `paddle_ops` computes with Paddle tensors; other backends may record or
fuse, so an operation is as large as what can be fused (a projection adds to the residual stream itself).
"""

from typing import Protocol, TypeVar

from worker.models.spec import DecoderSpec, MoeSpec
from worker.models.weights import Experts, Linear, Mlp, Weights

W = TypeVar("W")
X = TypeVar("X")


class Ops(Protocol[W, X]):
    """One step's operations over its T tokens. W: a weight; X: rows [T, n] in whatever form the backend keeps."""

    def embed(self, weight: W) -> X:
        """Residual stream: the step's token ids looked up, [T, hidden]."""
        ...

    def norm(self, x: X, weight: W) -> X:
        """RMS norm of the residual stream."""
        ...

    def attention(self, layer: int, h: X, qkv: Linear[W], q_norm: W | None, k_norm: W | None) -> X:
        """Project to q, k, v, rotate, write KV of all T tokens, attend: [T, heads * head_dim] of this rank."""
        ...

    def gated(self, h: X, gate_up: Linear[W]) -> X:
        """silu(gate) * up."""
        ...

    def add_projected(self, x: X, y: X, linear: Linear[W]) -> X:
        """x + linear(y), summed over the ranks that hold `linear`'s columns."""
        ...

    def add_experts(self, x: X, h: X, experts: Experts[W], moe: MoeSpec) -> X:
        """x + the routed experts' weighted outputs (+ the shared expert's), summed over ranks."""
        ...

    def logits(self, x: X, norm: W, head: W) -> X:
        """Logits of the wanted rows: [L, vocab] on rank 0."""
        ...


def decode(ops: Ops[W, X], spec: DecoderSpec, weights: Weights[W]) -> X:
    """One forward pass over the step that `ops` was prepared for."""
    x = ops.embed(weights.embed)
    for index, layer in enumerate(weights.layers):
        h = ops.norm(x, layer.input_norm)
        a = ops.attention(index, h, layer.qkv, layer.q_norm, layer.k_norm)
        x = ops.add_projected(x, a, layer.out)
        h = ops.norm(x, layer.post_norm)
        if isinstance(layer.mlp, Mlp):
            x = ops.add_projected(x, ops.gated(h, layer.mlp.gate_up), layer.mlp.down)
        else:
            moe = spec.moe[index]
            assert moe is not None
            x = ops.add_experts(x, h, layer.mlp, moe)
    return ops.logits(x, weights.norm, weights.head)

"""The forward pass of every family, written once over a small set of operations.

`Ops` is what a backend supplies: `paddle_backend` computes at once with Paddle tensors, `onednn_backend` records
a program. An operation is as large as what can be fused (a projection adds to the residual stream itself).
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from worker.engine.base import Float32, ForwardBatch
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


def hidden(ops: Ops[W, X], spec: DecoderSpec, weights: Weights[W]) -> X:
    """One forward pass up to the last layer's residual stream, over the step that `ops` was prepared for."""
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
    return x


class Backend(Protocol):
    """A way to compute a decoder on one rank: the parts of `Engine` that depend on it."""

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

"""The trainer's own Llama: a function of named weights, so that any version can be run at any time.

Weights are a flat dict of HF names and HF shapes (Linear = [out, in]): what is trained is what is pushed.
The embedding is tied to the output head. Sequences have one length here, so no padding and no mask but the causal one.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812 (its usual name)

from examples.grpo_paddle.shape import EMBED, Shape, sizes
from examples.grpo_paddle.task import Ids


def initial_weights(shape: Shape, seed: int) -> dict[str, Any]:
    """Trainable float32 parameters by HF name: normal(0, 0.05), norms at one."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, size in sizes(shape).items():
        value = np.ones(size) if len(size) == 1 else rng.normal(0, 0.05, size)
        weights[name] = paddle.to_tensor(value.astype(np.float32), stop_gradient=False)
    return weights


class Operators(Protocol):
    """What a forward pass asks of its weights."""

    def embed(self, name: str, ids: Any) -> Any:
        """[..., T] ids -> [..., T, hidden]."""
        ...

    def linear(self, name: str, x: Any) -> Any:
        """[..., in] -> [..., out]."""
        ...

    def norm(self, name: str, x: Any, eps: float) -> Any:
        """RMS norm over the last axis."""
        ...


class OneVersion:
    """Every position uses the same weights."""

    def __init__(self, weights: Mapping[str, Any]):
        self._weights = weights

    def embed(self, name: str, ids: Any) -> Any:
        """See `Operators`."""
        return F.embedding(ids, self._weights[name])

    def linear(self, name: str, x: Any) -> Any:
        """See `Operators`."""
        return paddle.matmul(x, self._weights[name], transpose_y=True)

    def norm(self, name: str, x: Any, eps: float) -> Any:
        """See `Operators`."""
        return x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self._weights[name]


class MixedVersions:
    """Each position uses the weights of its own version, as a KV cache kept over an update does."""

    def __init__(self, versions: list[Mapping[str, Any]], owner: Ids):
        """owner: [B, T], for every position the index into versions of the weights that computed it."""
        flat = owner.reshape(-1)
        order = np.argsort(flat, kind="stable")
        self._parts = [OneVersion(weights) for weights in versions]
        self._sizes = np.bincount(flat, minlength=len(versions)).tolist()
        self._order, self._back = paddle.to_tensor(order), paddle.to_tensor(np.argsort(order))

    def _each(self, x: Any, work: Callable[[OneVersion, Any], Any]) -> Any:
        """Positions sorted by version, each run of them to its own weights, and back in place."""
        batch, length = x.shape[:2]
        rows = paddle.index_select(x.reshape([batch * length, *x.shape[2:]]), self._order)
        pieces = zip(self._parts, paddle.split(rows, self._sizes), strict=True)
        done = paddle.concat([work(part, piece) for part, piece in pieces])
        return paddle.index_select(done, self._back).reshape([batch, length, -1])

    def embed(self, name: str, ids: Any) -> Any:
        """See `Operators`."""
        return self._each(ids, lambda part, x: part.embed(name, x))

    def linear(self, name: str, x: Any) -> Any:
        """See `Operators`."""
        return self._each(x, lambda part, x: part.linear(name, x))

    def norm(self, name: str, x: Any, eps: float) -> Any:
        """See `Operators`."""
        return self._each(x, lambda part, x: part.norm(name, x, eps))


def _constants(shape: Shape, batch: int, length: int) -> tuple[Any, Any, Any]:
    """Cosines, sines [B, heads, T, head_dim] (half-split layout) and the causal mask [B, heads, T, T].

    Whole rather than broadcast, which this build of Paddle does many times slower.
    """
    half = np.arange(0, shape.head_dim, 2) / shape.head_dim
    angles = np.outer(np.arange(length), shape.rope_theta**-half)
    angles = np.concatenate([angles, angles], axis=-1)
    causal = np.triu(np.full((length, length), -1e9), 1)

    def whole(values: Any) -> Any:
        tiled = np.broadcast_to(values.astype(np.float32), (batch, shape.heads, *values.shape))
        return paddle.to_tensor(np.ascontiguousarray(tiled))

    return whole(np.cos(angles)), whole(np.sin(angles)), whole(causal)


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    first, second = paddle.chunk(x, 2, axis=-1)
    return x * cos + paddle.concat([-second, first], axis=-1) * sin


def forward(ops: Operators, shape: Shape, ids: Any) -> Any:
    """Logits [B, T, vocab] of ids [B, T]."""
    batch, length = ids.shape
    cos, sin, causal = _constants(shape, batch, length)

    def split_heads(x: Any) -> Any:
        return x.reshape([batch, length, shape.heads, shape.head_dim]).transpose([0, 2, 1, 3])

    x = ops.embed(EMBED, ids)
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        h = ops.norm(layer + "input_layernorm.weight", x, shape.eps)
        q, k, v = (split_heads(ops.linear(layer + f"self_attn.{p}_proj.weight", h)) for p in "qkv")
        scores = paddle.matmul(_rotate(q, cos, sin), _rotate(k, cos, sin), transpose_y=True) * shape.head_dim**-0.5
        mixed = paddle.matmul(F.softmax(scores + causal, axis=-1), v)
        mixed = mixed.transpose([0, 2, 1, 3]).reshape([batch, length, shape.hidden])
        x = x + ops.linear(layer + "self_attn.o_proj.weight", mixed)
        h = ops.norm(layer + "post_attention_layernorm.weight", x, shape.eps)
        gate = ops.linear(layer + "mlp.gate_proj.weight", h)
        up = ops.linear(layer + "mlp.up_proj.weight", h)
        x = x + ops.linear(layer + "mlp.down_proj.weight", F.silu(gate) * up)
    return ops.linear(EMBED, ops.norm("model.norm.weight", x, shape.eps))


def token_logprobs(ops: Operators, shape: Shape, ids: Any, first: int) -> Any:
    """[B, T - first]: the logprob of each token from position `first` on, given those before it."""
    logits = forward(ops, shape, ids[:, :-1])[:, first - 1 :]
    return -F.cross_entropy(logits, ids[:, first:].unsqueeze(-1), reduction="none").squeeze(-1)

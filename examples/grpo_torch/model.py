"""The demo's Llama in torch: a function of named weights, trained and pushed under their HF names."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from examples.grpo_paddle.shape import EMBED, Shape, sizes

Weights = Mapping[str, Any]


def initial_weights(shape: Shape, seed: int, device: Any) -> dict[str, Any]:
    """Trainable float32 parameters by HF name: normal(0, 0.05), norms at one."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, size in sizes(shape).items():
        value = np.ones(size) if len(size) == 1 else rng.normal(0, 0.05, size)
        weights[name] = torch.tensor(value, dtype=torch.float32, device=device, requires_grad=True)
    return weights


def forward(weights: Weights, shape: Shape, ids: Any) -> Any:
    """Logits [B, T, vocab] of ids [B, T]."""
    batch, length = ids.shape
    half = torch.arange(0, shape.head_dim, 2, device=ids.device) / shape.head_dim
    angles = torch.outer(torch.arange(length, device=ids.device), shape.rope_theta**-half)
    cos, sin = (f(torch.cat([angles, angles], dim=-1)) for f in (torch.cos, torch.sin))

    def norm(name: str, x: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.eps) * weights[name]

    def heads(x: Any) -> Any:
        return x.view(batch, length, shape.heads, shape.head_dim).transpose(1, 2)

    def rotate(x: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    x = F.embedding(ids, weights[EMBED])
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        h = norm(layer + "input_layernorm.weight", x)
        q, k, v = (heads(F.linear(h, weights[layer + f"self_attn.{p}_proj.weight"])) for p in "qkv")
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, shape.hidden)
        x = x + F.linear(mixed, weights[layer + "self_attn.o_proj.weight"])
        h = norm(layer + "post_attention_layernorm.weight", x)
        inner = F.silu(F.linear(h, weights[layer + "mlp.gate_proj.weight"]))
        inner = inner * F.linear(h, weights[layer + "mlp.up_proj.weight"])
        x = x + F.linear(inner, weights[layer + "mlp.down_proj.weight"])
    return F.linear(norm("model.norm.weight", x), weights[EMBED])


def token_logprobs(weights: Weights, shape: Shape, ids: Any, first: int) -> Any:
    """[B, T - first]: the logprob of each token from position `first` on, given those before it."""
    logits = forward(weights, shape, ids[:, :-1])[:, first - 1 :]
    return -F.cross_entropy(logits.transpose(1, 2), ids[:, first:], reduction="none")

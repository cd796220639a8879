"""This rank's part of a decoder under tensor parallelism."""

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from weight_manager.families.spec import DecoderSpec
from weight_manager.layout import VIEW_DTYPE, Manifest, Parameter, piece


@dataclass(frozen=True)
class Shard:
    """heads, kv_heads: of this rank. sharers: ranks that hold each KV head. vocab: its rows of the embedding and the
    head, [start, end). whole: names of tensors that every rank holds whole.
    """

    rank: int
    tp: int
    heads: int
    kv_heads: int
    sharers: int
    vocab: tuple[int, int]
    shapes: dict[str, tuple[int, ...]]
    whole: frozenset[str]

    def check(self, name: str, view: npt.NDArray[Any], dtype: str) -> None:
        """Raises ValueError naming the tensor when a view is not what this rank computes with."""
        expected = self.shapes[name]
        if view.shape != expected or view.dtype != VIEW_DTYPE[dtype]:
            raise ValueError(f"{name}: expected {expected} {VIEW_DTYPE[dtype]}, got {view.shape} {view.dtype}")


def shard_of(spec: DecoderSpec, manifest: Manifest, rank: int, tp: int) -> Shard:
    """What `rank` of `tp` reads: every parameter's and fused group's shape, and what follows from them."""
    shapes: dict[str, tuple[int, ...]] = {}
    starts: dict[str, int] = {}
    everywhere = set()
    for p in manifest.parameters:
        whole = p.split is None or (p.even and p.shape[p.split] % tp)
        if whole:
            everywhere.add(p.name)
        start, shape = piece(Parameter(p.name, p.shape) if whole else p, tp, rank)
        shapes[p.name], starts[p.name] = shape, start[0]
        if p.fused:
            rows = shapes.get(p.fused, (0,))[0]
            shapes[p.fused] = (rows + shape[0], *shape[1:])
    attention = "model.layers.0.self_attn"
    low, rows = starts["model.embed_tokens.weight"], shapes["model.embed_tokens.weight"][0]
    return Shard(
        rank=rank,
        tp=tp,
        heads=shapes[f"{attention}.q_proj.weight"][0] // spec.head_dim,
        kv_heads=shapes[f"{attention}.k_proj.weight"][0] // spec.head_dim,
        sharers=max(1, tp // spec.kv_heads),
        vocab=(low, low + rows),
        shapes=shapes,
        whole=frozenset(everywhere),
    )

"""What is served, and where it lies in a slot: parameters -> layout. Pure data and pure functions.

A `Parameter` is one HF tensor (or alias group). A `Layout` places every rank's piece of every parameter
in one slot, so that each rank's views are contiguous: tensors split on axis 0 lie in rank order, tensors
split on axis 1 are stored rank-major. Members of a fused group (qkv, gate_up) are neighbours per rank, so
one matmul reads them. The layout depends on (manifest, tp) only; store and ranks compute it alone and
compare digests.
"""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16"]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGN = 64
"""Bytes. Every group starts on a cache line, whatever came before it."""


@dataclass(frozen=True)
class Parameter:
    """One served tensor.

    name: canonical HF name. shape: of the whole tensor, HF layout (Linear = [out, in]).
    split: tensor-parallel axis, None = every rank reads the whole tensor. Pieces are as equal as they can be.
    heads: when set, axis `split` counts this many units (KV heads); a unit is never cut while tp <= heads, and
        once tp exceeds them (then a multiple of them) the ranks that share a unit each hold a copy of it.
    group: query heads per unit. Set on what belongs to the query heads: once tp exceeds `heads`, the ranks
        that share a unit divide its query heads instead of copying them.
    even: every rank reads the whole tensor when tp does not divide the axis (vocabularies: equal logits pieces).
    aliases: other names of the same bytes (tied lm_head); a push may use any one of them.
    fused: name of the fused group it belongs to; members are placed in the order they are listed.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    heads: int | None = None
    group: int = 0
    even: bool = False
    aliases: tuple[str, ...] = ()
    fused: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The parameters a model serves, in layout order. dtype: the served dtype of all of them.

    stacked: projections that its torch modules hold as one tensor, a fused group's members in order (stacks.py).
    """

    model: str  # architecture, e.g. "LlamaForCausalLM"
    dtype: Dtype
    parameters: tuple[Parameter, ...]
    stacked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Region:
    """Bytes of one parameter in a slot. rank -1: read by every rank.

    offset: bytes from the start of the slot. start/shape: the box of the whole tensor it holds, stored in C order.
    """

    name: str
    rank: int
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where everything lies. slot_bytes is a multiple of the page size; digest names the whole layout."""

    manifest: Manifest
    tp: int
    regions: tuple[Region, ...]
    slot_bytes: int
    digest: str

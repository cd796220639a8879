"""The program of a step of few tokens: compiled products that read each weight once at the memory's speed."""

from collections.abc import Callable, Sequence

import numpy as np

from weight_manager.families.spec import DecoderSpec, MoeSpec
from worker.cpu.native import Native
from worker.cpu.onednn import SUM, PostOp
from worker.models.compiled_program import CompiledProgram
from worker.models.decoder import Experts, Linear, Mlp
from worker.models.few_product import ADD, GATED, GATED_GELU, SET, FewProduct, recorded
from worker.models.native_attention import NativeAttention
from worker.models.onednn_program import Parts, Rows
from worker.models.onednn_weights import NamedSlot
from worker.models.shard import Shard

PartOf = Callable[[NamedSlot], int]
"""Columns in a part of the product with this weight, see `few_product`."""


def fits(spec: DecoderSpec, shard: Shard, sum_parts: int = 1) -> bool:
    """Whether every product of this decoder is one that the kernel computes. sum_parts: see `Parts`."""
    inner = {shape[1] for name, shape in shard.shapes.items() if name.endswith("down_proj.weight")}
    widths = {spec.hidden_size, *(width / sum_parts for width in (shard.heads * spec.head_dim, *inner))}
    return not any(width % 16 for width in widths)


class SingleProgram(CompiledProgram):
    """`Program` for `count` tokens: the one of 1 column, or up to MOST of 16, where the others are not computed.

    Activations stay float32; RMS norms are done by their readers.
    """

    def __init__(self, parts: Parts, columns: int, native: Native, attend: NativeAttention, part_of: PartOf) -> None:
        super().__init__(parts, columns, native, attend, lambda _: None)
        self.count = 1
        self._part_of = part_of
        self._compute = np.dtype(np.float32)
        self._to_norm: dict[int, tuple[Rows, NamedSlot]] = {}
        self._written: dict[int, Rows] = {}  # what stands for x normed, where somebody else than a product reads it

    def norm(self, x: Rows, weight: NamedSlot | None) -> Rows:
        """A name for x normed: what is given here to a product is normed there."""
        if weight is None:
            return x
        h = np.empty_like(x)
        self._to_norm[id(h)] = x, weight
        self._steps.append(lambda: h is None)  # keeps the name alive, and so its id
        if self._adapters is not None:
            self._written[id(h)] = self._normed(x, weight, self._buffer("h", len(x), self._weights.matrix_dtype))
        return h

    def linear(self, weight: NamedSlot, src: Rows, dst: Rows, post: Sequence[PostOp] = ()) -> None:
        """dst = weight @ src, or added to it."""
        assert not post or list(post) == [SUM]
        self._product(ADD if post else SET, weight, None, src, dst)

    def gated(self, h: Rows, gate_up: Linear[NamedSlot]) -> Rows:
        """activation(gate) * up."""
        if self._adapters is not None:
            return super().gated(h, gate_up)
        made = self._buffer("gated", gate_up.weight.shape[0] // 2)
        mode = GATED if self._spec.activation == "silu" else GATED_GELU
        self._product(mode, gate_up.weight, gate_up.bias, h, made)
        return made

    def logits(self, h: Rows, head: NamedSlot, bias: NamedSlot | None, cap: float) -> Rows:
        """Written token by token."""
        turned = self._token_major("logits_rows", head.shape[0])
        self._product(SET, head, bias, h, turned.T)
        if cap:
            self.cap(turned, cap)
        return turned

    def add_experts(self, x: Rows, h: Rows, experts: Experts[NamedSlot], moe: MoeSpec) -> Rows:
        """Add experts as for many tokens, but from a norm that has been written: who routes reads it as it is."""
        if id(h) in self._to_norm:
            of, weight = self._to_norm[id(h)]
            h = self._normed(of, weight, self._buffer("h", len(of), self._weights.matrix_dtype))
        return super().add_experts(x, h, experts, moe)

    def _add_shared(self, into: Rows, h: Rows, wide: Rows, shared: Mlp[NamedSlot], gate: NamedSlot | None) -> None:
        """Products read `wide`, which has the same numbers; adapters h."""
        self._written[id(wide)] = h
        super()._add_shared(into, wide, wide, shared, gate)

    def _adapt(self, weight: NamedSlot, src: Rows, dst: Rows) -> None:
        super()._adapt(weight, self._written.get(id(src), src), dst)

    def _product(self, mode: int, weight: NamedSlot, bias: NamedSlot | None, src: Rows, dst: Rows) -> None:
        x, norm = self._to_norm.get(id(src), (src, None))
        product = FewProduct(
            *(self._native, mode, weight.shape[1], self._part_of(weight), x, dst),
            narrow=weight.dtype == np.uint16,
            row_step=weight.strides[0],
            eps=self._spec.eps,
        )
        self._steps.append(recorded(product, lambda: self.count, weight, bias, norm))

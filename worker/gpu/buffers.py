"""What a step computes in: where it lies on the device, and how large it is for a model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weight_manager.families.spec import DecoderSpec
from worker.gpu.driver import Driver, Handle
from worker.gpu.weights import Tensor
from worker.models.decoder import Experts, Mlp, Weights

if TYPE_CHECKING:
    from worker.gpu.operations import Heads

ROW_PADDING = 64


@dataclass(frozen=True)
class Buffers:
    """Addresses of what a step computes in, for the most rows that a step has. residual and logits are float32."""

    residual: int
    normed: int
    qkv: int
    attended: int
    gate_up: int
    activated: int
    logits: int
    scores: int  # of experts, float32, and what follows from them: worker/gpu/kernels/experts.cu
    expert_ids: int
    expert_weights: int
    expert_order: int
    expert_tiles: int
    expert_rows: int
    expert_out: int
    piece: int = 0  # this rank's columns of the logits, and all ranks', one after the other
    pieces: int = 0


def allocated(
    driver: Driver,
    stream: Handle,
    spec: DecoderSpec,
    heads: "Heads",
    weights: Weights[Tensor],
    tokens: int,
    *,
    element: int,
    logits: int,
    columns: int,
    vocab: int,
    apart: bool,
) -> Buffers:
    """Memory for steps of so many tokens, zeros. element: bytes of a number of weights and projections. logits: rows of
    them, at most; columns: that this rank computes, of `vocab`, apart from the other ranks' or all. Raises CudaError.
    """
    width = spec.hidden_size
    inner = max((_inner(layer.mlp) for layer in weights.layers), default=0)
    rows = -(-tokens // ROW_PADDING) * ROW_PADDING

    def room(across: int, size: int, what: str, count: int = rows) -> int:
        if not count * across:
            return 0
        address = driver.allocate(count * across * size, what)
        driver.fill(address, count * across * size, 0, stream)
        return address

    moe = next((moe for moe in spec.moe if moe is not None), None)
    pairs, experts = (rows * moe.top_k, moe.experts) if moe else (0, 0)
    expert_inner = max((_expert_inner(layer.mlp, experts) for layer in weights.layers), default=0)
    return Buffers(
        residual=room(width, 4, "hidden states"),
        normed=room(max(width, heads.query * heads.dim), element, "hidden states"),
        qkv=room(heads.qkv, element, "projections"),
        attended=room(max(heads.query * heads.dim, inner), element, "projections"),
        gate_up=room(2 * inner, element, "projections"),
        activated=room(inner, element, "projections"),
        logits=room(vocab, 4, "logits", 2 * logits),  # and as many edited ones
        scores=room(experts, 4, "experts"),
        expert_ids=room(1, 4, "experts", pairs),
        expert_weights=room(1, 4, "experts", pairs),
        expert_order=room(1, 4, "experts", pairs),
        expert_tiles=room(3, 4, "experts", pairs // 16 + experts),
        expert_rows=room(expert_inner, element, "experts", pairs),
        expert_out=room(width, element, "experts", pairs),
        piece=room(columns * apart, 4, "logits", logits),
        pieces=room(vocab * apart, 4, "logits", logits),
    )


def _inner(mlp: Mlp[Tensor] | Experts[Tensor]) -> int:
    dense = mlp if isinstance(mlp, Mlp) else mlp.shared
    return dense.gate_up.weight.shape[0] // 2 if dense is not None else 0


def _expert_inner(mlp: Mlp[Tensor] | Experts[Tensor], count: int) -> int:
    return mlp.gate_up.weight.shape[0] // count // 2 if isinstance(mlp, Experts) else 0

"""Before it serves, a device computes a prompt and decode steps of made-up weights, and is compared with numpy.

Every size of decode step is among them: products are computed in other ways with other numbers of rows.

A device can compute nothing and say nothing: a library without code for its kind runs no kernel and returns success.
One dense layer and one of experts are computed, in the model's own sizes.
"""

import logging
import math
import time
from dataclasses import replace

import numpy as np

from weight_manager.families.spec import DecoderSpec
from worker.engine.base import Float32, ForwardBatch, Int32
from worker.gpu.backend import GpuDecoder
from worker.gpu.driver import CudaError
from worker.gpu.reference import ReferenceOps, widened
from worker.gpu.weights import Array, Tensor
from worker.models.decoder import Weights, collect, hidden

log = logging.getLogger(__name__)

_ROWS = 512  # of the embedding and the head: the rest of the vocabulary is more of the same
_PROMPT = 70
_TOKENS = 8  # different ones in a decode step that is larger
_POOL = 1_000_003  # made-up values; a prime, so that no two rows of a matrix are alike
_CLOSE = {2: 0.03, 4: 1e-4}  # by bytes of an element: of the logits' norm


class ComputesWrong(CudaError):
    """This device must not serve."""


def require_right(decoder: GpuDecoder) -> None:
    """Raises ComputesWrong. Overwrites slot 0 and the KV cache, so it comes before either holds anything."""
    began = time.monotonic()
    spec, chosen = _short(decoder.spec)
    names = _names(decoder, chosen)
    values = _made_up(names, decoder.element)
    for name, tensor in names.items():
        decoder.put(tensor.address, values[name])
    device = collect(spec, {_renamed(name, chosen): tensor for name, tensor in names.items()})
    host = collect(spec, {_renamed(name, chosen): widened(value) for name, value in values.items()})
    size = decoder.block_size
    length = min(_PROMPT, (decoder.num_blocks - 1) * size - 2, decoder.max_len - 2)
    reference = ReferenceOps(spec, decoder.heads.query, decoder.heads.kv, length + 2, decoder.num_blocks, size)
    errors = []
    ids = min(_ROWS // 8, len(host.embed))
    for batch in _batches(length, size, ids):
        found = decoder.trial(batch, spec, device)
        errors.append(_errors(found, _expected(reference, batch, spec, host)).max())
    different = min(_TOKENS, decoder.num_blocks - 1)
    expected = _expected(reference, _first_tokens(different, different, size, ids), spec, host)
    for rows in decoder.sizes:
        of_rows = _errors(
            decoder.trial(_first_tokens(rows, different, size, ids), spec, device),
            expected[np.arange(rows) % different],
        )
        errors.append(np.median(of_rows) if any(spec.moe) else of_rows.max())
    worst = float(np.max(errors))  # no number if any is none
    # Scores that are equal but for rounding send a token to another expert.
    close = 0.3 if any(spec.moe) else _CLOSE[decoder.element]
    if not worst < close:
        raise ComputesWrong(
            f"{decoder.device_name} computes wrong: logits of a test step are off by {worst:.3g} of their size "
            f"(at most {close:g} is right); it will not serve. Look for other CUDA libraries in "
            "the way, and at the driver's log"
        )
    log.info("self-test: off by %.2g of the logits' size, in %.2f s", worst, time.monotonic() - began)


def _short(spec: DecoderSpec) -> tuple[DecoderSpec, list[int]]:
    """The model with its first layer, and the first of experts; and which layers these are."""
    chosen = [0, *[i for i, moe in enumerate(spec.moe) if i and moe is not None and spec.moe[0] is None][:1]]
    return replace(spec, moe=tuple(spec.moe[i] for i in chosen), mtp=False), chosen


def _names(decoder: GpuDecoder, chosen: list[int]) -> dict[str, Tensor]:
    prefixes = tuple(f"model.layers.{i}." for i in chosen)
    found = {}
    for name, tensor in decoder.tensors(0).items():
        if name.startswith(("model.embed_tokens", "lm_head")):
            found[name] = Tensor(tensor.address, (min(_ROWS, tensor.shape[0]), tensor.shape[1]))
        elif name.startswith(prefixes) or name == "model.norm.weight":
            found[name] = tensor
    return _without_pieces(found, decoder.element)


def _without_pieces(tensors: dict[str, Tensor], element: int) -> dict[str, Tensor]:
    """Those that lie in no other: the parts of a fused matrix have names, too, and one memory has one value."""
    spans = {
        name: (tensor.address, tensor.address + element * math.prod(tensor.shape)) for name, tensor in tensors.items()
    }
    wholes = set(spans.values())

    def is_piece(start: int, end: int) -> bool:
        return any(first <= start and end <= last and (first, last) != (start, end) for first, last in wholes)

    return {name: tensor for name, tensor in tensors.items() if not is_piece(*spans[name])}


def _renamed(name: str, chosen: list[int]) -> str:
    parts = name.split(".")
    if parts[1] == "layers":
        parts[2] = str(chosen.index(int(parts[2])))
    return ".".join(parts)


def _made_up(names: dict[str, Tensor], element: int) -> dict[str, Array]:
    """Norms about one, matrices that keep what they multiply about as large as it was."""
    pool = np.random.default_rng(0).standard_normal(_POOL, dtype=np.float32)
    made: dict[str, Array] = {}
    for name, tensor in names.items():
        scale = 1.0 if "embed_tokens" in name else tensor.shape[-1] ** -0.5
        norm = name.endswith("norm.weight")
        piece = pool[: min(_POOL, int(np.prod(tensor.shape)))]
        piece = 1 + np.float32(0.1) * piece if norm else piece * np.float32(scale)
        made[name] = np.resize(_bits(piece) if element == 2 else piece, tensor.shape)
    return made


def _bits(x: Float32) -> Array:
    """bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _batches(length: int, size: int, ids: int) -> list[ForwardBatch]:
    """Prompts of `length` and of one token together, then the next token of both, then one of the first alone.

    Token ids are below `ids`.
    """
    tables = np.array([np.arange(1, -(-(length + 2) // size) + 1), [0] * -(-(length + 2) // size)], np.int32)
    rng = np.random.default_rng(1)

    def batch(parts: list[tuple[int, int, int]]) -> ForwardBatch:
        """parts: (sequence, first position, count)."""
        positions = np.concatenate([np.arange(first, first + count) for _, first, count in parts]).astype(np.int32)
        owner = np.repeat([which for which, _, _ in parts], [count for *_, count in parts])
        counts: Int32 = np.array([count for *_, count in parts], np.int32)
        return ForwardBatch(
            token_ids=rng.integers(0, ids, len(positions)).astype(np.int32),
            positions=positions,
            slots=(tables[owner, positions // size] * size + positions % size).astype(np.int32),
            query_lens=counts,
            context_lens=np.array([first + count for _, first, count in parts], np.int32),
            block_tables=tables[[which for which, _, _ in parts]],
            logits_rows=(np.cumsum(counts) - 1).astype(np.int32),
            block_copies=np.zeros((0, 2), np.int32),
        )

    return [batch([(0, 0, length), (1, 0, 1)]), batch([(0, length, 1), (1, 1, 1)]), batch([(0, length + 1, 1)])]


def _first_tokens(rows: int, different: int, size: int, ids: int) -> ForwardBatch:
    """The first tokens of so many sequences, so many of them different; equal ones have a block together.

    Token ids are below `ids`.
    """
    which = (np.arange(rows) % different).astype(np.int32)
    ones = np.ones(rows, np.int32)
    return ForwardBatch(
        token_ids=((3 * which + 1) % ids).astype(np.int32),
        positions=0 * ones,
        slots=((which + 1) * size).astype(np.int32),
        query_lens=ones,
        context_lens=ones,
        block_tables=(which + 1).reshape(-1, 1),
        logits_rows=np.arange(rows, dtype=np.int32),
        block_copies=np.zeros((0, 2), np.int32),
    )


def _expected(reference: ReferenceOps, batch: ForwardBatch, spec: DecoderSpec, weights: Weights[Float32]) -> Float32:
    reference.begin(batch)
    x = reference.norm(hidden(reference, spec, weights), weights.norm)
    logits: Float32 = x[batch.logits_rows] @ weights.head.T
    return logits


def _errors(found: Float32, expected: Float32) -> Float32:
    """The rows' distances, each in its row's size; no number where a logit is none."""
    distance = np.linalg.norm(found[:, : expected.shape[1]] - expected, axis=-1)
    errors: Float32 = distance / np.linalg.norm(expected, axis=-1)
    return errors

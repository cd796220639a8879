"""Before it serves, a device computes a prompt and decode steps of made-up weights, and is compared with numpy.

Every size of decode step is among them: products are computed in other ways with other numbers of rows.

A device can compute nothing and say nothing: a library without code for its kind runs no kernel and returns success.
One dense layer and one of experts are computed, in the model's own sizes. Ranks that share a model compute them
together, after their sums were tried with known numbers; each makes up all ranks' weights and compares for itself.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from weight_manager.families.spec import DecoderSpec
from worker.engine.base import Float32, ForwardBatch, Int32
from worker.gpu.backend import GpuDecoder
from worker.gpu.driver import CudaError, Driver
from worker.gpu.nccl import FLOAT32, INT32
from worker.gpu.peers import FEW
from worker.gpu.ranks import Ranks
from worker.gpu.reference import ReferenceOps, ReferenceRanks, widened
from worker.gpu.weights import Array, Tensor
from worker.models.decoder import Weights, collect, hidden

log = logging.getLogger(__name__)

_ROWS = 512  # of the embedding and the head: the rest of the vocabulary is more of the same
_PROMPT = 70
_TOKENS = 8  # different ones in a decode step that is larger
_POOL = 1_000_003  # made-up values; a prime, so that no two rows of a matrix are alike
_CLOSE = {2: 0.03, 4: 1e-4}  # by bytes of an element: of the logits' norm
_APART = 7919  # where another rank's made-up values begin
_TRIED, _TRIED_MANY = 1 << 14, FEW + 1000  # numbers that are summed, gathered and told; summed by NCCL in any case


class ComputesWrong(CudaError):
    """This device must not serve."""


def require_right(decoder: GpuDecoder) -> None:
    """Raises ComputesWrong. Overwrites slot 0 and the KV cache, so it comes before either holds anything."""
    began = time.monotonic()
    spec, chosen = _short(decoder.spec)
    names = _names(decoder, chosen)
    values = [_made_up(shapes, decoder.element, rank) for rank, shapes in enumerate(_shapes(decoder, names))]
    for name, tensor in names.items():
        decoder.put(tensor.address, values[0 if decoder.ranks is None else decoder.ranks.rank][name])
    device = collect(spec, {_renamed(name, chosen): tensor for name, tensor in names.items()})
    size = decoder.block_size
    length = min(_PROMPT, (decoder.num_blocks - 1) * size - 2, decoder.max_len - 2)
    host = _Host(decoder, spec, {_renamed(name, chosen): [widened(v[name]) for v in values] for name in names}, length)
    batches = [host.spread(batch) for batch in _batches(length, size, host.ids)]
    errors = [_errors(decoder.trial(batch, spec, device), host.logits(batch)).max() for batch in batches]
    different = min(_TOKENS, decoder.num_blocks - 1)
    expected = host.logits(host.spread(_first_tokens(different, different, size, host.ids)))
    for rows in decoder.sizes:
        batch = host.spread(_first_tokens(rows, different, size, host.ids))
        of_rows = _errors(decoder.trial(batch, spec, device), expected[np.arange(rows) % different])
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


def require_sums(driver: Driver, ranks: Ranks) -> None:
    """Raises ComputesWrong where known numbers are not summed, gathered and told right, at once and in a graph."""
    driver.enter()
    groups, rank, size = ranks.groups, ranks.rank, len(ranks.shards)
    stream = driver.stream()
    summed, many, own, told, gathered = (
        driver.allocate(4 * n, "sums that are tried") for n in (_TRIED, _TRIED_MANY, _TRIED, _TRIED, _TRIED * size)
    )
    numbers = [np.arange(_TRIED_MANY, dtype=np.float32) % 997 + 1000 * other for other in range(size)]

    def launch() -> None:
        ranks.sum(summed, _TRIED, stream)
        ranks.sum(many, _TRIED_MANY, stream)
        groups.all_gather(own, gathered, _TRIED, FLOAT32, stream)
        ranks.sum(summed, _TRIED // 2, stream)
        groups.broadcast(told, _TRIED, INT32, stream)

    def right(run: Callable[[], None]) -> bool:
        few = numbers[rank][:_TRIED]
        for address, values in ((summed, few), (own, few), (many, numbers[rank])):
            driver.to_device(address, values, stream)
        driver.to_device(told, few.astype(np.int32), stream)
        with groups.under_way():
            run()
            groups.launched(stream)
        total, total_of_many = np.empty(_TRIED, np.float32), np.empty(_TRIED_MANY, np.float32)
        all_of_them, first = np.empty((size, _TRIED), np.float32), np.empty(_TRIED, np.int32)
        for found, address in ((total, summed), (total_of_many, many), (all_of_them, gathered), (first, told)):
            driver.to_host(found, address, stream)
        driver.wait(stream)
        expected = np.sum(numbers, axis=0)
        total[: _TRIED // 2] /= size  # that half was summed twice
        return bool(
            np.array_equal(total, expected[:_TRIED])
            and np.array_equal(total_of_many, expected)
            and np.array_equal(all_of_them, np.stack(numbers)[:, :_TRIED])
            and np.array_equal(first, numbers[0][:_TRIED].astype(np.int32))
        )

    at_once = right(launch)
    with groups.under_way():
        graph = driver.captured(stream, launch)
    in_graph = right(lambda: driver.launch(graph, stream))
    driver.drop(graph)
    if not (at_once and in_graph):
        raise ComputesWrong(f"{driver.name}: sums over the ranks' GPUs are wrong{'' if at_once else ', at once too'}")


class _Host:
    """The same step in numpy. weights: of all ranks, by name."""

    def __init__(self, decoder: GpuDecoder, spec: DecoderSpec, weights: dict[str, list[Float32]], length: int) -> None:
        self._spec, ranks = spec, decoder.ranks

        def ops(heads: int, kv_heads: int) -> ReferenceOps:
            return ReferenceOps(spec, heads, kv_heads, length + 2, decoder.num_blocks, decoder.block_size)

        self._lows: list[int] | None = None
        self._ops: Any
        self._weights: Weights[Any]
        if ranks is None:
            self._ops = ops(decoder.heads.query, decoder.heads.kv)
            self._weights = collect(spec, {name: one for name, (one,) in weights.items()})
        else:
            if ranks.splits_vocabulary:
                self._lows = [shard.vocab[0] for shard in ranks.shards]
            self._ops = ReferenceRanks([ops(shard.heads, shard.kv_heads) for shard in ranks.shards], self._lows)
            self._weights = collect(spec, weights)
        self.ids = min(_ROWS // 8, *(len(table) for table in weights["model.embed_tokens.weight"]))

    def spread(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with its token ids among the rows of all ranks."""
        if self._lows is None:
            return batch
        lows, ids = np.array(self._lows, np.int32), batch.token_ids
        return replace(batch, token_ids=lows[ids % len(lows)] + ids // np.int32(len(lows)))

    def logits(self, batch: ForwardBatch) -> Float32:
        """Of the batch's rows."""
        self._ops.begin(batch)
        weights = self._weights
        found: Float32 = self._ops.logits(
            hidden(self._ops, self._spec, weights), weights.norm, weights.head, batch.logits_rows
        )
        return found


def _short(spec: DecoderSpec) -> tuple[DecoderSpec, list[int]]:
    """The model with its first layer, and the first of experts; and which layers these are."""
    chosen = [0, *[i for i, moe in enumerate(spec.moe) if i and moe is not None and spec.moe[0] is None][:1]]
    return replace(spec, moe=tuple(spec.moe[i] for i in chosen), mtp=False), chosen


def _names(decoder: GpuDecoder, chosen: list[int]) -> dict[str, Tensor]:
    prefixes = tuple(f"model.layers.{i}." for i in chosen)
    found = {}
    for name, tensor in decoder.tensors(0).items():
        if name.startswith(("model.embed_tokens", "lm_head")):
            found[name] = Tensor(tensor.address, _few_rows(name, tensor.shape))
        elif name.startswith(prefixes) or name == "model.norm.weight":
            found[name] = tensor
    return _without_pieces(found, decoder.element)


def _few_rows(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (min(_ROWS, shape[0]), *shape[1:]) if name.startswith(("model.embed_tokens", "lm_head")) else shape


def _shapes(decoder: GpuDecoder, names: dict[str, Tensor]) -> list[dict[str, tuple[int, ...]]]:
    """These weights' shapes on every rank."""
    if decoder.ranks is None:
        return [{name: tensor.shape for name, tensor in names.items()}]
    return [{name: _few_rows(name, shard.shapes[name]) for name in names} for shard in decoder.ranks.shards]


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


def _made_up(shapes: dict[str, tuple[int, ...]], element: int, rank: int) -> dict[str, Array]:
    """Norms about one, matrices that keep what they multiply about as large as it was; others on every rank."""
    pool = np.random.default_rng(0).standard_normal(_POOL, dtype=np.float32)
    made: dict[str, Array] = {}
    for name, shape in shapes.items():
        scale = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
        norm = name.endswith("norm.weight")
        piece = pool[: min(_POOL, int(np.prod(shape)))]
        if rank:
            piece = np.roll(pool, -_APART * rank)[: len(piece)]
        piece = 1 + np.float32(0.1) * piece if norm else piece * np.float32(scale)
        made[name] = np.resize(_bits(piece) if element == 2 else piece, shape)
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


def _errors(found: Float32, expected: Float32) -> Float32:
    """The rows' distances, each in its row's size; no number where a logit is none."""
    distance = np.linalg.norm(found[:, : expected.shape[1]] - expected, axis=-1)
    errors: Float32 = distance / np.linalg.norm(expected, axis=-1)
    return errors

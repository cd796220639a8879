"""A decoder on the oneDNN and MKL of Paddle's wheel: float32 exactly, or bfloat16 matrices read as they lie."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rollout_client.protocol import Dtype
from weight_manager.families.spec import DecoderSpec
from worker.cpu import mkl, native, onednn
from worker.engine.base import Deterministic, Float32, ForwardBatch, Kernels, never
from worker.models import collectives
from worker.models.compiled_program import CompiledProgram
from worker.models.decoder import draft_hidden, hidden
from worker.models.few_product import MOST, part_of_onednn
from worker.models.kv_memory import KvMemory, slots_before
from worker.models.low_rank import LowRank, NativeLowRank, PlainLowRank
from worker.models.many_product import is_fast
from worker.models.mkl_attention import BlockedAttention
from worker.models.native_attention import NativeAttention
from worker.models.onednn_experts import RoutedExperts
from worker.models.onednn_program import Buffers, Parts, Program, Rows
from worker.models.onednn_weights import BoundWeights, NamedSlot
from worker.models.packed_adapter import Site
from worker.models.plain_program import PlainProgram
from worker.models.rope import rope_table
from worker.models.shard import Shard
from worker.models.single_program import SingleProgram, fits

log = logging.getLogger(__name__)

_SUMMED = ("o_proj.weight", "down_proj.weight")
"""Names of the linears whose products are summed over the ranks."""
_STACKED = (".experts.gate_up_proj.weight", ".experts.down_proj.weight")
"""Weights of all experts, one below the other."""
_NO_PRODUCTS = ("mtp_linear_proj.0.weight", "correction_bias")
"""Matrices that few tokens are not multiplied with: of drafts, which are padded, and what is added up."""
_HEAD_ROWS = 64
"""Rows of logits computed at a time: with a vocabulary of 150000 they are 38 MB."""


def why_not(dtype: Dtype) -> str | None:
    """Why this process cannot compute with oneDNN in this dtype; None when it can."""
    try:
        dnn = onednn.load()
        mkl.load()
    except (OSError, onednn.OneDnnError) as error:
        return str(error)
    matrix = np.zeros((32, 32), np.float32 if dtype == "float32" else np.uint16)
    try:
        kernel = dnn.implementation(dnn.matmul(matrix, matrix, np.zeros((32, 32), np.float32)))
    except onednn.OneDnnError as error:
        return f"oneDNN has no {dtype} matmul for this processor ({error})"
    return f"oneDNN has no fast {dtype} matmul for this processor" if "ref" in kernel else None


def compiled_kernels(head_dim: int) -> tuple[native.Native | None, str]:
    """This machine's compiled kernels; None and why when there are none for such heads."""
    if head_dim % 16:
        return None, f"they take heads of a multiple of 16 elements, this model's have {head_dim}"
    try:
        return native.load(), ""
    except OSError as error:
        lines = str(error).splitlines() or [repr(error)]
        if len(lines) > 1:  # of a compiler
            log.warning("no compiled kernels: %s", error)
        return None, next((line for line in lines if "error:" in line), lines[0])


def padded(tokens: int, alone: int = 1) -> int:
    """Columns computed for so many tokens. A vector has 16 lanes, so fewer columns would save nothing (few tokens have
    products of their own, see `single_program`); and every distinct number costs some 20 ms once, for recording and
    for generated code. alone: those of one token.
    """
    step = alone if tokens == 1 else 16 if tokens <= 256 else 64
    return -(-tokens // step) * step


class OneDnnBackend:
    """`Backend` of one rank. max_tokens: in one step. sums: over tp ranks, None when tp is 1. sites: where
    adapters may act. drafts: whether the drafting layer is used. deterministic, sum_parts: see `WorkerConfig`; raises
    ValueError where they are asked for and cannot be. others: the shards of the other ranks, which must come to the
    same number of columns.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        shard: Shard,
        sums: collectives.Sums | None,
        dtype: Dtype,
        max_len: int,
        max_tokens: int,
        *,
        sites: Sequence[Site] = (),
        drafts: bool = False,
        deterministic: Literal["auto", "on", "off"] = "auto",
        sum_parts: int = 1,
        others: Sequence[Shard] = (),
    ) -> None:
        self._drafts = drafts
        self.asked: Callable[[], bool] = never  # whether a step is to be given up
        self._spec, self._shard, self._sums = spec, shard, sums
        self.residual: Rows = np.zeros((spec.hidden_size, 0), np.float32)
        self._dnn = onednn.load()
        self._weights = BoundWeights(self._dnn, spec, shard, dtype)
        self._native, why = compiled_kernels(spec.head_dim)
        self.kernels = Kernels("onednn" if why else "compiled", why)
        self._sum_parts = _own_parts(spec, shard, sum_parts)
        self._shards = [shard, *others]
        self._few = self._native is not None and all(fits(spec, s, self._sum_parts) for s in self._shards)
        self.deterministic, self._alone = self._in_one_order("on" if sum_parts > 1 else deterministic), 1
        if self.deterministic.on and not self._same_few():
            self._few, self._alone = False, 16
        few = self._part_of if self._few else None
        self._experts = RoutedExperts(self._dnn, self._weights, self._columns, self._native, few)
        self._parts = Parts(
            self._dnn,
            spec,
            shard,
            self._weights,
            Buffers(padded(max_tokens)),
            self._summed if shard.tp > 1 else None,
            self._experts.step,
            sum_parts=self._sum_parts,
        )
        self._head_parts = replace(self._parts, buffers=Buffers(_HEAD_ROWS))
        self._attention: NativeAttention | BlockedAttention
        if self._native:
            self._attention = NativeAttention(self._native, spec, shard)
        else:
            self._attention = BlockedAttention(self._dnn, mkl.load(), spec, shard)
        self._ropes = [rope_table(rope, max_len) for rope in spec.ropes]
        self._kv: KvMemory | None = None
        self.low_rank: LowRank = (
            NativeLowRank(self._native, sites, narrow=dtype == "bfloat16") if self._native else PlainLowRank(sites)
        )
        self._adapted_parts = replace(self._parts, adapters=self.low_rank)
        self._programs: dict[tuple[int, bool, bool], tuple[Program, Rows]] = {}
        self._draft_parts = replace(self._parts, hide_first=True)
        self._draft_programs: dict[tuple[int, bool], tuple[Program, Rows]] = {}
        self._heads: dict[tuple[int, bool], tuple[Program, Rows, Float32]] = {}

    def prepare(self, views: Mapping[str, npt.NDArray[Any]]) -> object:
        """What `bind` takes: addresses, and float32 copies of vectors, and of matrices where bfloat16 is computed so.
        Raises OSError where there is no memory for them.
        """
        return self._weights.prepare(views)

    def bind(self, prepared: Any) -> None:
        """Set some hundred pointers to a version; no memory of weights is touched."""
        self._weights.bind(prepared)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the cache; idempotent."""
        if self._kv is None:
            layers, hidden = self._spec.layers + self._drafts, self._spec.hidden_size if self._drafts else 0
            sizes = layers, num_blocks, self._shard.kv_heads, block_size, self._spec.head_dim
            # MKL multiplies float32 only; our own kernel reads what the matrices are in.
            native = isinstance(self._attention, NativeAttention)
            self._kv = KvMemory(*sizes, self._weights.matrix_dtype if native else np.float32, hidden)

    def release_kv(self) -> int:
        """Bytes freed."""
        kv, self._kv = self._kv, None
        return 0 if kv is None else kv.free()

    def forward(self, batch: ForwardBatch) -> Float32 | None:
        """Logits [L, vocab] on rank 0."""
        assert self._kv is not None, "no KV cache is allocated"
        self._kv.copy(batch.block_copies)
        if batch.draft:
            x = self._drafted(batch, self._kv, only_keys=False)
            self.residual = x[:, : len(batch.token_ids)]
            return self._logits(x, batch.logits_rows)
        tokens = len(batch.token_ids)
        adapted = bool(batch.adapters.any())
        form = *self.form(tokens), adapted
        program, x = self._programs.get(form) or self._record(*form)
        if adapted:
            self.low_rank.begin(batch)
        self._experts.tokens = tokens
        self._run(program, batch, self._kv)
        self.residual = x[:, :tokens]
        logits = self._logits(x, batch.logits_rows)
        if self._drafts:
            assert self._kv.states is not None
            self.residual = self.residual.copy()
            self._kv.states[batch.slots] = self.residual.T
            self._drafted(batch, self._kv, only_keys=True)
        return logits

    def form(self, tokens: int) -> tuple[int, bool]:
        """Columns of the program for so many tokens, and whether it is the one for few."""
        return self._columns(tokens), self._few and tokens <= MOST

    def _columns(self, tokens: int) -> int:
        return padded(tokens, self._alone)

    def _in_one_order(self, asked: Literal["auto", "on", "off"]) -> Deterministic:
        if asked == "off":
            return Deterministic(False, "it is turned off")
        if self._native is None:
            if asked == "on":
                raise ValueError(f"deterministic on, sum_parts: they need compiled kernels, and {self.kernels.why}")
            return Deterministic(False, self.kernels.why)
        if asked == "auto" and not self._same_few():
            return Deterministic(False, "one sequence alone would be slower; `deterministic on` has it nevertheless")
        return Deterministic(True)

    def _same_few(self) -> bool:
        """Few tokens' products are ours, and have the bits of oneDNN's."""
        if self._native is None or not self._few:
            return False
        products = {
            (rows // self._stacked(name), columns // (self._sum_parts if name.endswith(_SUMMED) else 1), narrow)
            for shard in self._shards
            for name, (rows, columns), narrow in self._products(shard)
        }
        return all(self._part(*product) is not None for product in products)

    def _products(self, shard: Shard) -> Iterator[tuple[str, tuple[int, int], bool]]:
        """Name and shape of each weight that few tokens are multiplied with, and whether it is bfloat16."""
        for name, shape in shard.shapes.items():
            if len(shape) == 2 and not name.endswith(_NO_PRODUCTS):
                yield name, (shape[0], shape[1]), self._weights.part(name).dtype == np.uint16

    def _stacked(self, name: str) -> int:
        """Matrices that lie one below the other in a weight."""
        return next(moe.experts for moe in self._spec.moe if moe) if name.endswith(_STACKED) else 1

    def _part(self, rows: int, columns: int, narrow: bool) -> int | None:
        assert self._native is not None
        return part_of_onednn(self._native, self._dnn, rows, columns, narrow=narrow)

    def _run(self, program: Program, batch: ForwardBatch, kv: KvMemory) -> None:
        if isinstance(program, SingleProgram):
            program.count = len(batch.token_ids)
        program.embedded()[: len(batch.token_ids)] = self._looked_up(batch.token_ids)
        program.begin(batch, kv, [(cos[batch.positions].T, sin[batch.positions].T) for cos, sin in self._ropes])
        program.run(self.asked)

    def _drafted(self, batch: ForwardBatch, kv: KvMemory, *, only_keys: bool) -> Rows:
        """The drafting layer's residual stream; only_keys: nothing but its keys and values is made."""
        assert kv.states is not None, "this engine was not made for drafts"
        tokens = len(batch.token_ids)
        columns = max(padded(tokens), padded(2))
        found = self._draft_programs.get((columns, only_keys))
        if found is None:
            program = self._new_program(self._draft_parts, columns)
            made = draft_hidden(program, self._spec, self._weights.by_role, only_keys=only_keys)
            found = self._draft_programs[columns, only_keys] = program, made
        program, x = found
        before = kv.states[slots_before(batch, kv.block_size)]
        before[batch.positions == 0] = 0
        program.previous()[:, :tokens] = before.T
        self._run(program, batch, kv)
        return x

    def _new_program(self, parts: Parts, columns: int, few: bool = False) -> Program:
        if isinstance(self._attention, BlockedAttention):
            return PlainProgram(parts, columns, self._attention)
        assert self._native is not None
        if few:
            return SingleProgram(parts, columns, self._native, self._attention, self._part_of)
        return CompiledProgram(parts, columns, self._native, self._attention, self._part_of_many)

    def _part_of_many(self, weight: NamedSlot) -> int | None:
        """None: oneDNN's product is taken, also where its order is unknown, and `deterministic` counts on it."""
        assert self._native is not None
        rows, columns = weight.shape
        if not is_fast(self._native, weight):
            return None
        part = self._part(rows // self._stacked(weight.name), columns, weight.dtype == np.uint16)
        return columns if part is None and not self.deterministic.on else part

    def _part_of(self, weight: NamedSlot) -> int:
        rows, columns = weight.shape
        return self._part(rows // self._stacked(weight.name), columns, weight.dtype == np.uint16) or columns

    def _record(self, columns: int, few: bool, adapted: bool) -> tuple[Program, Rows]:
        program = self._new_program(self._adapted_parts if adapted else self._parts, columns, few)
        made = self._programs[columns, few, adapted] = program, hidden(program, self._spec, self._weights.by_role)
        return made

    def _record_head(self, columns: int, few: bool) -> tuple[Program, Rows, Float32]:
        """Final norm and vocabulary projection of `columns` residual columns -> logits [columns, vocab]."""
        program, weights = self._new_program(self._head_parts, columns, few), self._weights.by_role
        x = self._head_parts.buffers("last", self._spec.hidden_size, columns)
        logits = program.logits(program.norm(x, weights.norm), weights.head, weights.head_bias, self._spec.logit_cap)
        self._heads[columns, few] = program, x, logits
        return self._heads[columns, few]

    def _logits(self, x: Rows, rows: npt.NDArray[np.int32]) -> Float32 | None:
        if len(rows) <= _HEAD_ROWS:
            logits = self._piece(x, rows) if len(rows) else np.empty((0, self._spec.vocab_size), np.float32)
        else:
            logits = np.empty((len(rows), self._spec.vocab_size), np.float32)
            for start in range(0, len(rows), _HEAD_ROWS):
                logits[start : start + _HEAD_ROWS] = self._piece(x, rows[start : start + _HEAD_ROWS])
        return logits if self._shard.rank == 0 else None

    def _piece(self, x: Rows, rows: npt.NDArray[np.int32]) -> Float32:
        form = self.form(len(rows))
        program, last, logits = self._heads.get(form) or self._record_head(*form)
        if isinstance(program, SingleProgram):
            program.count = len(rows)
        last[:, : len(rows)] = x[:, rows]
        program.run(self.asked)
        logits = logits[: len(rows)]
        if logits.shape[1] < self._spec.vocab_size:
            assert self._sums is not None
            return self._sums.gathered(logits)
        return logits

    def _looked_up(self, ids: npt.NDArray[np.int32]) -> Rows:
        """Embedding rows [T, hidden]; zeros for ids that other ranks hold."""
        table = self._weights.array(self._weights.by_role.embed.name)
        low, high = self._shard.vocab
        if len(table) == self._spec.vocab_size:
            return table[ids]
        mine = (ids >= low) & (ids < high)
        rows = table[np.where(mine, ids - low, 0)]
        rows[~mine] = 0
        return rows

    def _summed(self, array: Rows) -> Callable[[], None]:
        assert self._sums is not None
        return self._sums.in_place(array, in_a_tree=self.deterministic.on and self._shard.tp > 2)


def _own_parts(spec: DecoderSpec, shard: Shard, sum_parts: int) -> int:
    """The parts, of `sum_parts`, of one rank. Raises ValueError where the model cannot be summed in so many."""
    if sum_parts == 1:
        return 1
    if any(spec.moe):
        raise ValueError(f"sum_parts {sum_parts}: experts are not summed in parts")
    if spec.qk_norm == "whole":
        raise ValueError(f"sum_parts {sum_parts}: norms over all heads are not summed in parts")
    for what, size in (("attention heads", spec.heads), ("rows of the MLP", spec.intermediate)):
        if size % sum_parts:
            raise ValueError(f"sum_parts {sum_parts}: the model's {size} {what} are no multiple of it")
    if sum_parts % shard.tp:
        raise ValueError(f"sum_parts {sum_parts} is no multiple of tp {shard.tp}")
    return sum_parts // shard.tp

"""The engine's contract: forward passes over views of a weight slot. Everything else is not its business.

The loop calls `forward` with the same `ForwardBatch` on every rank; rank 0 gets logits and samples, the
others get None. An engine never sees versions, requests or sockets, so tests run the loop with a fake
(tests/fake_engine.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from weight_manager.adapters.plan import AdapterModule
from weight_manager.layout import Extent

if TYPE_CHECKING:
    from worker.logit_edits import LogitEdits
    from worker.orders import Groups

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

NO_ADAPTERS: Int32 = np.zeros(0, np.int32)


@dataclass(frozen=True)
class ForwardBatch:
    """One step over S ragged sequences with T tokens in all (decode rows and prefill chunks together).

    token_ids, positions, slots: [T]. slots[t] = block * block_size + offset where token t's KV is written.
    query_lens: [S] new tokens per sequence; sum = T. context_lens: [S] tokens including the new ones.
    block_tables: [S, B] padded with 0. logits_rows: [L] rows of T whose logits are wanted, rising; L may be 0.
    block_copies: [C, 2] (from, to) KV blocks copied before the step writes anything (copy-on-write of shared
    prompts). No block is the target of two copies, and none is both a source and a target. draft: the drafting layer
    alone runs and says what may follow each token; the model need not have seen the token, only those before it.
    adapters: [S] the epoch of each sequence's adapter, 0 = the base alone; [0] when no sequence has one. former: to be
    computed with the weights that were live before, which whoever calls the engine binds for it.
    """

    token_ids: Int32
    positions: Int32
    slots: Int32
    query_lens: Int32
    context_lens: Int32
    block_tables: Int32
    logits_rows: Int32
    block_copies: Int32
    draft: bool = False
    adapters: Int32 = field(default_factory=lambda: NO_ADAPTERS)
    former: bool = False

    def pack(self) -> Int32:
        """All as one flat int32 array, for one broadcast to the other ranks: [kind, T, S, B, L, C, A], then data."""
        sizes = (
            *self.token_ids.shape,
            *self.block_tables.shape,
            *self.logits_rows.shape,
            self.block_copies.shape[0],
            *self.adapters.shape,
        )
        fields = (
            self.token_ids,
            self.positions,
            self.slots,
            self.query_lens,
            self.context_lens,
            self.block_tables.reshape(-1),
            self.logits_rows,
            self.block_copies.reshape(-1),
            self.adapters,
        )
        kind = self.draft + 2 * self.former
        return np.concatenate((np.array((kind, *sizes), np.int32), *fields), dtype=np.int32)

    @staticmethod
    def unpack(flat: Int32) -> "ForwardBatch":
        """Inverse of `pack`; the fields are views of `flat`."""
        kind, tokens, sequences, blocks, rows, copies, adapted = (int(size) for size in flat[:7])
        lengths = (tokens, tokens, tokens, sequences, sequences, sequences * blocks, rows, copies * 2, adapted)
        ends = np.cumsum((7, *lengths))
        parts = [flat[start:end] for start, end in pairwise(ends)]
        parts[5] = parts[5].reshape(sequences, blocks)
        parts[7] = parts[7].reshape(copies, 2)
        token_ids, positions, slots, query_lens, context_lens, tables, logits_rows, pairs, adapters = parts
        draft, former = bool(kind & 1), bool(kind & 2)
        own = token_ids, positions, slots, query_lens, context_lens, tables, logits_rows, pairs
        return ForwardBatch(*own, draft, adapters, former)

    def adapters_of_all(self) -> Int32:
        """`adapters` with its zeros written out, [S]."""
        return self.adapters if len(self.adapters) else np.zeros(len(self.query_lens), np.int32)


def joined(first: ForwardBatch, second: ForwardBatch) -> ForwardBatch:
    """One step of the sequences of both batches, first's before second's. Neither is a draft or of former weights."""
    columns = max(first.block_tables.shape[1], second.block_tables.shape[1])
    tables = [
        np.pad(batch.block_tables, ((0, 0), (0, columns - batch.block_tables.shape[1]))) for batch in (first, second)
    ]
    return ForwardBatch(
        token_ids=np.concatenate((first.token_ids, second.token_ids)),
        positions=np.concatenate((first.positions, second.positions)),
        slots=np.concatenate((first.slots, second.slots)),
        query_lens=np.concatenate((first.query_lens, second.query_lens)),
        context_lens=np.concatenate((first.context_lens, second.context_lens)),
        block_tables=np.concatenate(tables),
        logits_rows=np.concatenate((first.logits_rows, second.logits_rows + np.int32(len(first.token_ids)))),
        block_copies=np.concatenate((first.block_copies, second.block_copies)),
        adapters=np.concatenate((first.adapters_of_all(), second.adapters_of_all()))
        if len(first.adapters) or len(second.adapters)
        else NO_ADAPTERS,
    )


MOST_TOPS = 1024
"""Most ids whose logprobs a device reports beside a token's own."""
CANNOT_BE_SAMPLED = -9999.0
"""Logprob of an id that was asked for and cannot be sampled: JSON has no infinity, and vLLM's clients know this one."""


class Tops(NamedTuple):
    """What is reported beside the drawn ids of R rows. ids: [R, W], those that were asked for, or the likeliest, best
    first; -1 = there are no more. logprobs: [R, W] of these. ranks: [R] of the drawn ids; 1 = the likeliest.
    """

    ids: Int64
    logprobs: Float64
    ranks: Int64


class Drawn(NamedTuple):
    """What was drawn from R rows. tokens: [R] ids. logprobs: [R] of these. finite: [R], whether the row has a token at
    all; else all its logits were masked (`closed`, [R]), or they were not all finite.
    """

    tokens: Int64
    logprobs: Float64
    finite: npt.NDArray[np.bool_]
    closed: npt.NDArray[np.bool_] | None = None
    tops: Tops | None = None  # when a row asked for some
    masks: "Sequence[Int32 | None] | None" = None  # of those `Extras.marked`, as bits [ceil(vocab / 32)]


class Cuts(NamedTuple):
    """Per row [R]: top_k (0 = off), top_p (1 = off) and min_p (0 = off), as `softmax.open_ids` means them."""

    top_k: Int32
    top_p: Float64
    min_p: Float32

    def close(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Per row, whether any of the three can close an id."""
        return ((self.top_k > 0) & (self.top_k < vocab_size)) | (self.top_p < 1.0) | (self.min_p > 0.0)


class Extras(NamedTuple):
    """What makes the draws of R rows more than plain ones, [R] each.

    edits: of the row's logits, as they are now (None = none). tops: how many of the likeliest ids are reported;
    others: or which ids are. untouched: what is reported is of the logits as the model made them, at temperature 1.
    marked: the ids that were left open are reported.
    """

    edits: Sequence["LogitEdits | None"]
    tops: Sequence[int]
    others: Sequence[Sequence[int]]
    untouched: Sequence[bool]
    marked: Sequence[bool]


class Drawing(Protocol):
    """Tokens being drawn on a device."""

    def drawn(self) -> Drawn:
        """Wait for the tokens of all rows."""
        ...

    @property
    def whole(self) -> bool:
        """Whether the tokens of all rows are drawn in one launch; else no step can follow."""
        ...

    def follow(self, batch: ForwardBatch, sources: Int32) -> "Logits":
        """Launch the next step at once: one row a sequence, row i goes on from the token drawn `sources[i]`-th."""
        ...


class Logits(Protocol):
    """Rows of logits [L, vocab] of a step on a device, perhaps still under way. Indexing fetches rows as float32
    arrays.
    """

    @overload
    def __getitem__(self, rows: int) -> Float32: ...
    @overload
    def __getitem__(self, rows: slice) -> Float32: ...

    def begin(
        self,
        rows: Int64,
        inverse_temperature: Float32,
        greedy: npt.NDArray[np.bool_],
        numbers: Float64,
        cuts: Cuts,
        extras: Extras | None = None,
    ) -> Drawing:
        """Begin to draw as `RowSampler.draw` does from an array, from what `cuts` leave open where not greedy, after
        the edits of `extras`.
        """
        ...

    def score(self, rows: Int64, inverse_temperature: Float32, tokens: Int64, tops: Sequence[int]) -> Drawn:
        """What `begin` would report of these tokens, had they been drawn. tops: how many of the likeliest ids are
        reported beside each.
        """
        ...

    def wait(self) -> None:
        """Wait until the step, and every drawing that was begun from it, is through."""
        ...

    def through(self) -> bool:
        """Whether `wait` would return at once."""
        ...


@dataclass(frozen=True)
class Kernels:
    """What computes the steps. name: "compiled" (oneDNN, and between its products C compiled for this machine: full
    speed), "onednn" (without a C compiler: half of it), "paddle" (Paddle's own, float32), "cuda" (a GPU's own), ""
    (nothing of a model). why: what keeps a CPU from the first.
    """

    name: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name}, because {self.why}" if self.why else self.name


@dataclass(frozen=True)
class Deterministic:
    """Whether a token's logits have the same bits whatever else is in its step, and however what comes before it was
    computed. why: what stands in the way.
    """

    on: bool = False
    why: str = "this engine does not promise it"

    def __str__(self) -> str:
        return "on" if self.on else f"off, because {self.why}"


@dataclass(frozen=True)
class EngineSpec:
    """An engine's sizes, which the scheduler plans by (in tokens and KV blocks), and what is told of it to whoever
    asks.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a generation. They are in the checkpoint's files (`worker.end_tokens`), which no engine reads:
    whoever makes the scheduler adds them.
    """
    kernels: Kernels = Kernels()
    deterministic: Deterministic = Deterministic()


class Interrupted(Exception):
    """A step was given up on request; the same batch, or another, may follow."""


def never() -> bool:
    """`Engine.asked` where nobody ever wants a step to be given up: False."""
    return False


@runtime_checkable
class OnDevice(Protocol):
    """An engine whose weights and KV cache lie in a device's memory."""

    def free_memory(self) -> int:
        """Bytes of the device's memory that nobody has, as its driver says."""
        ...


@runtime_checkable
class TakesFromTrainers(Protocol):
    """An engine that copies versions from the memory of trainers on its host's devices."""

    def take_at(self, socket: Path, asked: Callable[[], None]) -> None:
        """Have trainers ask for it at this socket, from now on. asked: called when one does, in another thread."""
        ...


@runtime_checkable
class LaunchesTogether(Protocol):
    """An engine whose ranks, if there are several, all launch a step that goes on from tokens being drawn.

    telling: on the rank that draws, called with such a step just before it is launched there.
    """

    telling: Callable[[ForwardBatch], None]

    def follow(self, batch: ForwardBatch) -> None:
        """Launch it on another rank: its token ids come from the one that draws, by the devices."""
        ...


@runtime_checkable
class HasGroups(Protocol):
    """An engine whose ranks sum over a group of its own."""

    def groups(self, others: "Groups") -> "Groups":
        """All that are shut when weights are released. others: those that are not the engine's."""
        ...


class Adapters(Protocol):
    """The LoRA adapters that an engine holds beside its base weights. Every version is named by an epoch, for ever."""

    def plan(self, name: str, extents: Mapping[str, Extent], modules: Sequence[AdapterModule], dtype: str) -> object:
        """For `hold`: what all versions of adapter `name` have in common that lie alike. It is kept from push to push:
        another version then costs no work for each tensor.

        extents: this rank's parts, `{module}.lora_A` [rank, in] and `{module}.lora_B` [out, rank], in an array of
        `dtype` (uint16 bits for bfloat16). Raises ValueError naming the adapter and the tensor.
        """
        ...

    def hold(self, epoch: int, plan: Any, flat: npt.NDArray[Any]) -> None:
        """Hold a version, for batches that name its epoch. Steps may run meanwhile.

        flat: of the plan's dtype; read until `forget`. A known epoch is left as it is.
        """
        ...

    def forget(self, epoch: int) -> None:
        """Let go of a version, between steps: its array is read no more. Nothing happens for an unknown epoch."""
        ...


@runtime_checkable
class GetsMemory(Adapters, Protocol):
    """One that may get memory between steps alone.

    gets: it is so; else `hold` gets what it needs, and `get` is not called.
    """

    gets: bool

    def get(self, plan: Any, nbytes: int) -> None:
        """Between steps: have the memory that a version of this plan needs, whose array has so many bytes. Where there
        is none `hold` says so.
        """
        ...


class Taking(Protocol):
    """A version of an adapter, before it is known which, while an engine copies it into memory of its own."""

    def take(self, flat: npt.NDArray[Any], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Copy these pieces, once or once more; xxh3-64 of each, of the very bytes that were copied: somebody may be
        writing them. Steps may run meanwhile.
        """
        ...


@runtime_checkable
class TakesPieces(Adapters, Protocol):
    """One that copies what it computes with, and need not wait for all of a version.

    by_pieces: it does; else versions are held at once.
    """

    by_pieces: bool

    def pieces(self, plan: Any) -> Sequence[Extent]:
        """The tensors that a version is copied by, each at its place in the array."""
        ...

    def has_room(self, plan: Any) -> bool:
        """Whether `begin` has memory that was made before: new memory may take longer than a step to be made."""
        ...

    def begin(self, plan: Any) -> Taking:
        """A version of which nothing is copied yet."""
        ...

    def keep(self, epoch: int, taking: Any) -> None:
        """Hold a version of which every piece was taken, as `hold` does; its array is read no more."""
        ...


class Engine(Protocol):
    """One rank's model. Weights come as read-only numpy views of the slot (uint16 bits for bfloat16).

    asked: an engine that can gives a step up, raising `Interrupted`, once this is true. adapters: those that steps may
    name; None = this engine computes with base weights alone.
    """

    spec: EngineSpec
    asked: Callable[[], bool]
    adapters: Adapters | None

    def prepare(self, views: Mapping[str, npt.NDArray[Any]]) -> object:
        """Everything that may fail or take time before a flip: names, shapes, tensors over the views.

        Returns an opaque handle for `bind`. Raises ValueError naming the tensor. Serving goes on meanwhile.
        """
        ...

    def bind(self, prepared: object | None) -> None:
        """Flip to a prepared set of weights (None = hold none). Pointer swaps only; may not fail halfway."""
        ...

    def allocate_kv(self) -> None:
        """Make the KV cache (idempotent)."""
        ...

    def release_kv(self) -> int:
        """Free the KV cache; returns bytes freed (0 when it holds none)."""
        ...

    def forward(self, batch: ForwardBatch) -> Float32 | Logits | None:
        """Logits [L, vocab_size] float32 on rank 0, or what a device still computes of them; None elsewhere. Writes the
        KV of all T tokens.

        A draft needs the hidden states of the tokens before, which the forward that wrote their KV has kept.
        """
        ...

"""Sequences that decode in step, a token each, kept in arrays: what a token costs the host shows here.

A sequence is let in once it needs nothing from the host but its next token: no edits of its logits, no other logprobs
than its own, no stop strings, no drafts, and a last block that nobody shares. From then on its tokens stand here, and
its `Sequence` is behind by those that came since it was last brought up: some steps after one of its blocks is full,
when it leaves, or when there is no room left here. Whoever wants to change a sequence has it leave first. The tokens
that stand here alone are made by one commit of weights, each sequence's by one version of its adapter: all are brought
up before other weights are live, and the first token of those begins a span.

Rows are numbered from 0 without gaps; the last takes the place of one that leaves.
"""

from collections import deque
from collections.abc import Sequence as Several
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worker.engine.base import NO_ADAPTERS, Cuts, Drawn, Float64, ForwardBatch, Int32, Int64
from worker.generation_metrics import GenerationMetrics
from worker.kv_cache import KvCache
from worker.sampler import Asked, inverse_temperature, is_greedy
from worker.sequence import Ending, Line, Sequence
from worker.versions import Version

_KEPT = 256
"""Steps whose tokens stay in arrays at most; then `bring_up` gives every sequence its own."""
_NO_COPIES: Int32 = np.zeros((0, 2), np.int32)
_ROW = np.dtype(
    [
        ("known", np.int32),  # tokens, the newest among them, which has no KV
        ("limit", np.int32),  # of known tokens
        ("prompt", np.int32),  # tokens
        ("token", np.int32),  # the newest
        ("adapter", np.int32),  # its epoch, 0 = none
        ("since", np.int32),  # step from which on its sequence lacks tokens
        ("seed", np.uint64),
        ("sample", np.uint64),
        ("inverse_temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("greedy", np.bool_),
    ]
)


class Ended(NamedTuple):
    """A sequence that has left the cohort, and what its newest token ended it with."""

    sequence: Sequence
    ending: Ending


class Cohort:
    """The running sequences that need nothing but their next token, a row of arrays each. most: rows there can be.
    vocab_size: token ids are below it.
    """

    def __init__(self, kv: KvCache, metrics: GenerationMetrics, vocab_size: int, most: int) -> None:
        self.sequences: list[Sequence] = []
        self.changes = 0  # of rows; the same number: the same sequences in the same rows
        self._kv = kv
        self._metrics = metrics
        self._most = most
        self._rows = np.zeros(most, _ROW)
        self._tables: Int32 = np.zeros((most, 16), np.int32)
        self._full: deque[Sequence] = deque()  # with a full block that the prefix cache has not been offered
        self._tokens: Int32 = np.zeros((_KEPT, most), np.int32)
        self._logprobs: Float64 = np.zeros((_KEPT, most), np.float64)
        self._steps = 0  # whose tokens are kept
        self._told = 0  # of them, that streams have heard of
        self._adapted = 0  # rows with an adapter
        self._at = 0.0  # when the newest came
        self._made_by: Version | None = None  # the weights that made it
        self._stops: npt.NDArray[np.bool_] = np.zeros(vocab_size, np.bool_)  # of any sequence here
        self._streams: dict[bytes, tuple[int, Int64, list[Sequence]]] | None = None  # roster and rows per connection
        self._rosters = count(1)
        self._asked: Asked | None = None  # what of it stays from step to step
        self._numbers = np.arange(most, dtype=np.int32)
        self._ones = np.ones(most, np.int32)

    def __len__(self) -> int:
        return len(self.sequences)

    def takes(self, sequence: Sequence) -> bool:
        """Whether it may join now: it has just been given a token, made by the weights that are live."""
        return (
            sequence.plain
            and len(self.sequences) < self._most
            and not sequence.edits.active
            and self._kv.sole(sequence.kv)
        )

    def join(self, sequence: Sequence, made_by: Version, now: float) -> None:
        """A sequence goes on here from the token it got at time `now` of these weights, as all the others did."""
        assert not self.sequences or made_by == self._made_by, "the others' tokens are of other weights"
        row, request, rules = len(self.sequences), sequence.request, sequence.request.rules
        sampling, known = request.sampling, len(sequence.tokens)
        self._rows[row] = (
            known,
            request.prompt_length + rules.limit,
            request.prompt_length,
            sequence.tokens[-1],
            sequence.kv.adapter.epoch,
            self._steps,
            request.seed & 0xFFFFFFFFFFFFFFFF,
            sequence.index,
            inverse_temperature(sampling),
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            is_greedy(sampling),
        )
        table = sequence.kv.table
        self._widen(len(table))
        self._tables[row, : len(table)] = table
        self._tables[row, len(table) :] = 0
        for stop in (*rules.ids, *rules.eos):
            if 0 <= stop < len(self._stops):
                self._stops[stop] = True
        sequence.row = row
        self._adapted += sequence.kv.adapter.epoch > 0
        self.sequences.append(sequence)
        self._at, self._made_by = now, made_by
        self._changed()

    def bring_up(self) -> None:
        """Give every sequence the tokens that came since the last time: other weights make the next ones."""
        for row in range(len(self)):
            self._bring_up(row)
        self._full.clear()

    def offer(self) -> None:
        """Offer the prefix cache every full block: somebody is about to look there."""
        while self._full:
            self._offer_next()

    def leave(self, sequence: Sequence) -> None:
        """Give a sequence its tokens and let it go; nothing happens when it is not here."""
        row = sequence.row
        if row < 0:
            return
        self._bring_up(row)
        sequence.last_token_at = self._at
        sequence.row = -1
        self._adapted -= sequence.kv.adapter.epoch > 0
        last = self.sequences.pop()
        if last is not sequence:
            end = len(self.sequences)
            self.sequences[row], last.row = last, row
            self._rows[row] = self._rows[end]
            self._tables[row] = self._tables[end]
            self._tokens[: self._steps, row] = self._tokens[: self._steps, end]
            self._logprobs[: self._steps, row] = self._logprobs[: self._steps, end]
        if not self.sequences:
            self._steps = self._told = 0
            self._stops[:] = False
            self._full.clear()
        self._changed()

    def dissolve(self) -> None:
        """All sequences leave."""
        for sequence in reversed(self.sequences.copy()):
            self.leave(sequence)

    def reserve(self, *, ahead: int = 0, rows: Int64 | None = None, spare: int = 0) -> bool:
        """Make the newest token's cell writable in each row (of `rows`), or that of the token `ahead` after it. False,
        and nothing done, when fewer than `spare` blocks would be left.
        """
        size = self._kv.block_size
        known = self._rows["known"][: len(self)]
        first = np.flatnonzero((known + (ahead - 1)) % size == 0)  # the cell is the first of its block
        if rows is not None:
            first = first[np.isin(first, rows)]
        if not len(first):
            return self._kv.pool.available >= spare
        indices: list[int] = ((known[first] + (ahead - 1)) // size).tolist()
        found = [(row, index, self.sequences[row].kv) for row, index in zip(first.tolist(), indices, strict=True)]
        if sum(len(kv.table) <= index for _, index, kv in found) + spare > self._kv.pool.available:
            return False
        self._widen(max(indices) + 1)
        for row, index, kv in found:
            extended = self._kv.extend(kv, index * size + 1)
            assert extended, "there were blocks for all"
            self._tables[row, index] = kv.table[index]
        return True

    def batch(self, *, ahead: int = 0, rows: Int64 | None = None) -> ForwardBatch:
        """A step of all rows (or of `rows`) for which `reserve` was true. ahead: token ids are not known yet, 0."""
        chosen = slice(len(self)) if rows is None else rows
        entries = self._rows[chosen]
        count, size = len(entries), self._kv.block_size
        contexts = entries["known"] + np.int32(ahead)
        positions = contexts - np.int32(1)
        columns = -(-int(contexts.max()) // size)
        tables = self._tables[chosen, :columns].copy()
        lines = self._numbers[:count]
        return ForwardBatch(
            token_ids=np.zeros(count, np.int32) if ahead else entries["token"].copy(),
            positions=positions,
            slots=tables[lines, positions // size] * np.int32(size) + positions % np.int32(size),
            query_lens=self._ones[:count],
            context_lens=contexts,
            block_tables=tables,
            logits_rows=lines,
            block_copies=_NO_COPIES,
            adapters=entries["adapter"].copy() if self._adapted else NO_ADAPTERS,
        )

    def asked(self, sources: Int64) -> Asked:
        """The draw of the next token of each row, from the rows `sources` of a step's logits."""
        rows = self._rows[: len(self)]
        if self._asked is None:
            self._asked = Asked(
                sources,
                rows["inverse_temperature"].copy(),
                rows["greedy"].copy(),
                Cuts(rows["top_k"].copy(), rows["top_p"].copy(), rows["min_p"].copy()),
                rows["seed"].copy(),
                rows["sample"].copy(),
                np.empty(0, np.uint64),
            )
        return self._asked._replace(rows=sources, positions=(rows["known"] - rows["prompt"]).astype(np.uint64))

    def sources(self, together: Several[Sequence], changes: int) -> Int64:
        """Per row, where it stood in `together`: what `sequences` was when `changes` was the number of them."""
        if changes == self.changes:
            return np.arange(len(self), dtype=np.int64)
        found: Int64 = np.empty(len(self), np.int64)
        for at, sequence in enumerate(together):
            if sequence.row >= 0:
                found[sequence.row] = at
        return found

    def going(self) -> Int64:
        """Rows that will not reach their limit with their next token."""
        rows = self._rows[: len(self)]
        return np.flatnonzero(rows["known"] + 1 < rows["limit"])

    def cells(self) -> float:
        """Cells that the newest tokens attend to, in all."""
        return float(self._rows["known"][: len(self)].sum(dtype=np.int64))

    def advance(
        self, drawn: Drawn, made_by: Version, now: float
    ) -> tuple[list[Ended], list[tuple[bytes, Line]], list[Sequence]]:
        """Every row's newest token was computed at time `now` by these weights, and a finite token drawn.

        Returns those that ended, per connection what goes on and is streamed, and, instead of that, what is streamed
        and has got the first token of other weights than before.
        """
        turned, self._made_by = self._made_by != made_by, made_by
        if self._steps == _KEPT:
            self.bring_up()
            self._steps = self._told = 0
            self._rows["since"][: len(self)] = 0
        many, rows = len(self), self._rows[: len(self)]
        computed = rows["known"].copy()
        self._metrics.tokens(many, now - self._at)
        self._tokens[self._steps, :many] = drawn.tokens
        self._logprobs[self._steps, :many] = drawn.logprobs
        self._steps += 1
        self._at = now
        rows["token"] = drawn.tokens
        rows["known"] += 1
        self._full += [self.sequences[row] for row in np.flatnonzero(computed % self._kv.block_size == 0).tolist()]
        ends = self._stops[drawn.tokens] | (rows["known"] >= rows["limit"])
        ended = self._ended(np.flatnonzero(ends).tolist()) if ends.any() else []
        lines = [] if turned else self._lines()
        first = [sequence for sequence in self.sequences if sequence.request.stream] if turned else []
        for sequence in first:
            self._bring_up(sequence.row)
        self._told = self._steps
        for _ in range(min(len(self._full), -(-many // self._kv.block_size))):
            self._offer_next()
        return ended, lines, first

    def _offer_next(self) -> None:
        """Sequences that began together fill their blocks in the same step, and all of them at once would make it half
        as long again for those who hear of its tokens. A block takes as many steps to fill as there are turns.
        """
        sequence = self._full.popleft()
        if sequence.row >= 0:
            self._bring_up(sequence.row)

    def _ended(self, rows: list[int]) -> list[Ended]:
        ended = []
        for sequence in [self.sequences[row] for row in rows]:
            entry = self._rows[sequence.row]
            ending = sequence.stop.after(int(entry["token"]), int(entry["known"] - entry["prompt"]))
            if ending is not None:  # None: the stop id is another's
                self.leave(sequence)
                ended.append(Ended(sequence, ending))
        return ended

    def _lines(self) -> list[tuple[bytes, Line]]:
        if self._streams is None:
            by_origin: dict[bytes, list[int]] = {}
            for row, sequence in enumerate(self.sequences):
                if sequence.request.stream:
                    by_origin.setdefault(sequence.request.origin, []).append(row)
            self._streams = {
                origin: (next(self._rosters), np.array(rows, np.int64), [self.sequences[row] for row in rows])
                for origin, rows in by_origin.items()
            }
        newest = self._steps - 1
        return [
            (origin, Line(roster, sequences, self._tokens[newest, rows], self._logprobs[newest, rows]))
            for origin, (roster, rows, sequences) in self._streams.items()
        ]

    def _bring_up(self, row: int) -> None:
        """A row's sequence gets the tokens that came since, and offers its full blocks to the prefix cache."""
        since, sequence = int(self._rows["since"][row]), self.sequences[row]
        if since == self._steps:
            return
        told = self._told if sequence.request.stream else 0
        assert self._made_by is not None, "somebody has joined"
        sequence.extend(
            self._tokens[since : self._steps, row].tolist(),
            self._logprobs[max(since, told) : self._steps, row].tolist(),
            self._made_by,
        )
        self._kv.advance(sequence.kv, sequence.tokens, len(sequence.tokens) - 1 - sequence.kv.computed)
        self._rows["since"][row] = self._steps

    def _widen(self, columns: int) -> None:
        have = self._tables.shape[1]
        if columns > have:
            self._tables = np.pad(self._tables, ((0, 0), (0, max(columns, 2 * have) - have)))

    def _changed(self) -> None:
        self.changes += 1
        self._streams = self._asked = None

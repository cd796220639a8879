"""One step on its way through the engine: which sequences feed which tokens, and what comes back for whom."""

from dataclasses import dataclass, field

import numpy as np

from worker.cohort import Cohort
from worker.engine.base import ForwardBatch, joined
from worker.kv_cache import KvCache
from worker.pace import LEAST, Pace, attended
from worker.sequence import Sequence

_SCORED_ROWS = 256
"""Prompt positions scored in one step at most: each needs a row of logits over the whole vocabulary."""


@dataclass(frozen=True)
class StepRow:
    """Tokens [start, start + length) of one sequence. scored: prompt positions among them whose logits are kept.

    proposed: 1 when the last of them is a draft's.
    """

    sequence: Sequence
    start: int
    length: int
    scored: int
    proposed: int = 0

    @property
    def fed(self) -> list[int]:
        """The tokens."""
        known = self.sequence.tokens[self.start : self.start + self.length]
        draft = self.sequence.draft
        return [*known, draft.token] if self.proposed and draft and draft.token is not None else known

    @property
    def reaches_end(self) -> bool:
        """The last known token is fed, so its logits make the next one."""
        return self.start + self.length - self.proposed == len(self.sequence.tokens)

    @property
    def samples(self) -> bool:
        """Whether a token is drawn for this row."""
        return self.reaches_end and self.sequence.request.rules.limit > 0

    @property
    def wanted(self) -> int:
        """Rows of logits this row needs; a scored row's last token may also be the one sampled from."""
        return self.scored + self.samples * (1 + self.proposed)


@dataclass
class Step:
    """A step being filled, then under way. version, epoch: of the weights it runs under. budget: tokens it may still
    take; seats: sequences. pace: says how much of a prompt fits into its time. draft: the drafting layer runs alone.
    together: those of the cohort as they stood in its rows when the number of its `changes` was this; they come first.
    """

    version: int
    epoch: int
    budget: int
    seats: int
    pace: Pace
    draft: bool = False
    rows: list[StepRow] = field(default_factory=list)
    together: list[Sequence] = field(default_factory=list)
    changes: int = 0
    _cells: float = 0.0  # that the cohort's tokens attend to
    _cost_s: float = 0.0  # of the rows
    _prompt_tokens: int = 0  # in rows of several tokens

    @property
    def full(self) -> bool:
        """No further sequence fits."""
        return self.budget <= 0 or self.seats <= 0

    @property
    def late(self) -> bool:
        """Its time is up: no further prompt is begun."""
        return self._prompt_tokens > 0 and self._cost_s >= self.pace.bound_s

    def room_for(self, sequence: Sequence) -> int:
        """How many of a sequence's tokens this step takes. A proposed token and the one before it go together."""
        if self.draft:
            return 1
        room = min(self.budget, sequence.feed)
        if sequence.draft is not None:
            return room if room == sequence.feed else 0
        if sequence.request.scoring:
            room = min(room, _SCORED_ROWS)
        if room <= 1:
            return room  # a token that was asked for waits for no time
        in_time = self.pace.fitting(room, sequence.kv.computed, self.pace.bound_s - self._cost_s)
        return in_time if in_time >= LEAST or self._prompt_tokens else min(room, LEAST)

    def take(self, sequence: Sequence, length: int) -> None:
        """Add a row; its KV is already writable."""
        request, start = sequence.request, sequence.kv.computed
        scored = min(length, request.prompt_length - 1 - start) if request.scoring else 0
        proposed = max(0, start + length - len(sequence.tokens))
        self.rows.append(StepRow(sequence, start, length, scored, proposed))
        self.budget -= length
        self.seats -= 1
        self._cost_s += self.pace.cost(length, start)
        self._prompt_tokens += length if length > 1 else 0

    def take_cohort(self, cohort: Cohort) -> None:
        """Its newest tokens; their KV is already writable."""
        count = len(cohort)
        self.together, self.changes, self._cells = cohort.sequences.copy(), cohort.changes, cohort.cells()
        self.budget -= count
        self.seats -= count
        self._cost_s += self.pace.cost_of(count, self._cells)

    @property
    def empty(self) -> bool:
        """Nobody goes."""
        return not self.rows and not self.together

    def took(self, seconds: float) -> None:
        """It ran so long. Steps of decodes wait for memory and say nothing of prompts."""
        if 2 * self._prompt_tokens >= self.tokens and not self.draft:
            cells = self._cells + sum(attended(row.length, row.start) for row in self.rows)
            self.pace.ran(self.tokens, cells, seconds)

    @property
    def tokens(self) -> int:
        """Tokens this step feeds."""
        return len(self.together) + sum(row.length for row in self.rows)

    def batch(self, kv: KvCache, cohort: Cohort) -> ForwardBatch:
        """What the engine gets."""
        if not self.together:
            return self._batch_of_rows(kv)
        decodes = cohort.batch()
        return joined(decodes, self._batch_of_rows(kv)) if self.rows else decodes

    def _batch_of_rows(self, kv: KvCache) -> ForwardBatch:
        tokens: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        size = kv.block_size
        lengths = np.array([row.length for row in self.rows], np.int32)
        contexts = np.array([row.start + row.length for row in self.rows], np.int32)
        tables = np.zeros((len(self.rows), -(-int(contexts.max()) // size)), np.int32)
        for index, row in enumerate(self.rows):
            first, end, table = len(tokens), row.start + row.length, row.sequence.kv.table
            wanted.extend(range(first, first + row.scored))
            tokens.extend(row.fed)
            slots.extend(table[at // size] * size + at % size for at in range(row.start, end))
            if row.samples:
                wanted.extend(range(len(tokens) - 1 - row.proposed, len(tokens)))
            used = -(-end // size)
            tables[index, :used] = table[:used]
        starts = np.repeat(contexts - np.cumsum(lengths), lengths)
        return ForwardBatch(
            token_ids=np.array(tokens, np.int32),
            positions=(np.arange(len(tokens)) + starts).astype(np.int32),
            slots=np.array(slots, np.int32),
            query_lens=lengths,
            context_lens=contexts,
            block_tables=tables,
            logits_rows=np.array(wanted, np.int32),
            block_copies=np.array([(copy.source, copy.target) for copy in kv.copies], np.int32).reshape(-1, 2),
            draft=self.draft,
        )

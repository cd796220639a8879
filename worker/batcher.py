"""Who runs next, and the step that takes them through the engine.

Running sequences come first, then new ones as far as tokens, seats and KV blocks go. Order is (priority, arrival). A
step takes decodes, then chunks of prompts being prefilled, then admits from the queue; so a long prompt never keeps a
decode waiting. When blocks run out the last in order gives its blocks back and is recomputed later; a sequence that is
first in order always makes progress, because alone it fits.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from worker.cohort import Cohort
from worker.engine.base import NO_ADAPTERS, ForwardBatch, Int64, joined
from worker.generation_metrics import GenerationMetrics
from worker.kv_cache import BlockHash, KvCache
from worker.live_adapters import LiveAdapters
from worker.pace import LEAST, Pace, attended
from worker.sequence import Request, Sequence
from worker.versions import Version

_SCORED_ROWS = 256
"""Prompt positions scored in one step at most: each needs a row of logits over the whole vocabulary."""


@dataclass(frozen=True)
class StepRow:
    """Tokens [start, start + length) of one sequence. scored: prompt positions among them whose logits are kept, the
    first of them `unscored` positions after start.

    reaches_end: the last known token is fed, so its logits make the next one. proposed: 1 when the last of them is a
    draft's.
    """

    sequence: Sequence
    start: int
    length: int
    scored: int
    reaches_end: bool
    proposed: int = 0
    unscored: int = 0

    @property
    def fed(self) -> list[int]:
        """The tokens, as far as they are known."""
        known = self.sequence.tokens[self.start : self.start + self.length]
        draft = self.sequence.draft
        return [*known, draft.token] if self.proposed and draft and draft.token is not None else known

    @property
    def decodes(self) -> bool:
        """The sequence's one newest token is fed, and makes the next one."""
        return self.length == 1 and self.samples and self.sequence.request.forked

    @property
    def next(self) -> "StepRow":
        """The row of the step after this one, which feeds the token that this one makes."""
        return StepRow(self.sequence, self.start + 1, 1, 0, reaches_end=True)

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
    """A step being filled, then under way. weights: that it runs under. budget: tokens it may still
    take; seats: sequences. pace: says how much of a prompt fits into its time. draft: the drafting layer runs alone.
    together: those of the cohort as they stood in its rows when the number of its `changes` was this; they come first.
    """

    weights: Version
    budget: int
    seats: int
    pace: Pace
    draft: bool = False
    former: bool = False  # of the weights before the live ones: no sequence of these is in it
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
        """The step's time is up: no further prompt is begun."""
        return self._prompt_tokens > 0 and self._cost_s >= self.pace.bound_s

    def computes(self, sequence: Sequence) -> bool:
        """Whether the step's weights are those that compute the sequence."""
        return (sequence.request.former is not None) == self.former

    def room_for(self, sequence: Sequence) -> int:
        """How many of a sequence's tokens this step takes. A proposed token and the one before it go together."""
        if self.draft:
            return 1
        room = min(self.budget, sequence.feed)
        if sequence.draft is not None:
            return room if room == sequence.feed else 0
        if sequence.request.scoring:
            room = min(room, _SCORED_ROWS + max(0, sequence.request.score_from - 1 - sequence.kv.computed))
        if room <= 1:
            return room  # a token that was asked for waits for no time
        in_time = self.pace.fitting(room, sequence.kv.computed, self.pace.bound_s - self._cost_s)
        return in_time if in_time >= LEAST or self._prompt_tokens else min(room, LEAST)

    def take(self, sequence: Sequence, length: int) -> None:
        """Add a row; its KV is already writable."""
        request, start = sequence.request, sequence.kv.computed
        unscored = max(0, request.score_from - 1 - start)
        scored = max(0, min(length, request.prompt_length - 1 - start) - unscored) if request.scoring else 0
        proposed = max(0, start + length - len(sequence.tokens))
        reaches_end = start + length - proposed == len(sequence.tokens)
        self.rows.append(StepRow(sequence, start, length, scored, reaches_end, proposed, unscored))
        self.budget -= length
        self.seats -= 1
        self._cost_s += self.pace.cost(length, start)
        self._prompt_tokens += length if length > 1 else 0

    def take_cohort(self, cohort: Cohort) -> None:
        """Add the cohort's newest tokens; their KV is already writable."""
        count = len(cohort)
        self.together, self.changes, self._cells = cohort.sequences.copy(), cohort.changes, cohort.cells()
        self.budget -= count
        self.seats -= count
        self._cost_s += self.pace.cost_of(count, self._cells)

    @property
    def empty(self) -> bool:
        """The step feeds no sequence."""
        return not self.rows and not self.together

    def took(self, seconds: float) -> None:
        """Learn from a step that took `seconds`. Steps of decodes wait for memory and say nothing of prompts."""
        if 2 * self._prompt_tokens >= self.tokens and not self.draft:
            cells = self._cells + sum(attended(row.length, row.start) for row in self.rows)
            self.pace.ran(self.tokens, cells, seconds)

    @property
    def tokens(self) -> int:
        """Tokens this step feeds."""
        return len(self.together) + sum(row.length for row in self.rows)

    def batch(self, kv: KvCache, cohort: Cohort) -> ForwardBatch:
        """The step as the engine gets it."""
        rows = self._batch_of_rows(kv, [(copy.source, copy.target) for copy in kv.copies]) if self.rows else None
        return _both(cohort.batch() if self.together else None, rows)

    def batch_ahead(self, kv: KvCache, cohort: Cohort, going: Int64) -> ForwardBatch:
        """The same of a step launched behind the one under way: of the cohort's rows `going`, and with token ids that
        are not known yet, 0.
        """
        together = cohort.batch(ahead=1, rows=going) if len(going) else None
        return _both(together, self._batch_of_rows(kv, []) if self.rows else None)

    def _batch_of_rows(self, kv: KvCache, copies: list[tuple[int, int]]) -> ForwardBatch:
        tokens: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        size = kv.block_size
        lengths = np.array([row.length for row in self.rows], np.int32)
        contexts = np.array([row.start + row.length for row in self.rows], np.int32)
        tables = np.zeros((len(self.rows), -(-int(contexts.max()) // size)), np.int32)
        for index, row in enumerate(self.rows):
            first, end, table = len(tokens), row.start + row.length, row.sequence.kv.table
            wanted.extend(range(first + row.unscored, first + row.unscored + row.scored))
            tokens.extend(row.fed or [0])  # 0: it is being drawn
            slots.extend(table[at // size] * size + at % size for at in range(row.start, end))
            if row.samples:
                wanted.extend(range(len(tokens) - 1 - row.proposed, len(tokens)))
            used = -(-end // size)
            tables[index, :used] = table[:used]
        adapters = [row.sequence.kv.adapter.epoch for row in self.rows]
        starts = np.repeat(contexts - np.cumsum(lengths), lengths)
        return ForwardBatch(
            token_ids=np.array(tokens, np.int32),
            positions=(np.arange(len(tokens)) + starts).astype(np.int32),
            slots=np.array(slots, np.int32),
            query_lens=lengths,
            context_lens=contexts,
            block_tables=tables,
            logits_rows=np.array(wanted, np.int32),
            block_copies=np.array(copies, np.int32).reshape(-1, 2),
            draft=self.draft,
            adapters=np.array(adapters, np.int32) if any(adapters) else NO_ADAPTERS,
            former=self.former,
        )


def _both(first: ForwardBatch | None, second: ForwardBatch | None) -> ForwardBatch:
    if first is not None and second is not None:
        return joined(first, second)
    batch = first or second
    assert batch is not None, "a step feeds somebody"
    return batch


def _by_order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


class Batcher:
    """The queue and the running set of one replica; both sorted by order."""

    def __init__(
        self, kv: KvCache, cohort: Cohort, adapters: LiveAdapters, max_batch: int, metrics: GenerationMetrics
    ) -> None:
        """cohort: who of those that run is kept in arrays; each leaves before anything happens to it here. adapters:
        what a sequence begins with.
        """
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._kv = kv
        self._cohort = cohort
        self._adapters = adapters
        self._max_batch = max_batch
        self._metrics = metrics
        self._spare = max(1, kv.pool.num_blocks // 100)  # admitting to the last block would preempt at once

    def enter(self, base: Version) -> None:
        """These weights are live. What has no token yet, or is being computed again from its tokens, begins anew: one
        version computes all of it.

        It may be computed in part; or whole but for its last token, by a chunk that ended there, by a step before a
        draft, or as a step that was thrown away had found it in the cache.
        """
        if base != self._kv.base:
            self._cohort.bring_up()  # while the full blocks of these weights still have their name
            for sequence in [sequence for sequence in self.running if sequence.partial]:
                self.send_back(sequence)
        self._kv.enter(base)

    def begun(self) -> Iterator[Sequence]:
        """All that have begun and not finished, preempted ones included."""
        yield from self.running
        yield from (sequence for sequence in self.waiting if sequence.begun)

    @property
    def lets_in(self) -> bool:
        """Somebody waits and there is a seat, so the next step may be of others than this one."""
        return bool(self.waiting) and len(self.running) < self._max_batch

    @property
    def crowded(self) -> bool:
        """More run than a step has seats for, as forks may."""
        return len(self.running) > self._max_batch

    def queue(self, sequence: Sequence) -> None:
        """Wait for admission."""
        insort(self.waiting, sequence, key=_by_order)

    def join(self, sequence: Sequence) -> None:
        """Run at once: a fork, which holds its blocks already. The running set may exceed a step's seats by forks."""
        sequence.begun = sequence.running = True
        insort(self.running, sequence, key=_by_order)

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence and give its blocks back."""
        self._cohort.leave(sequence)
        (self.running if sequence.running else self.waiting).remove(sequence)
        sequence.running = False
        self._kv.release(sequence.kv)

    def send_back(self, sequence: Sequence) -> None:
        """Move a sequence from running to the queue, to be computed again from its tokens."""
        self._cohort.leave(sequence)
        self._metrics.counters["wasted_tokens"] += sequence.kv.computed
        self.drop(sequence)
        sequence.draft = None
        sequence.renewing = True
        if not sequence.request.forked and sequence.request.prompt_logprobs:  # they are to be of the first token's
            sequence.request.prompt_logprobs.clear()
        self.queue(sequence)

    def change_adapter(self, request: Request, adapter: Version, *, recompute: bool) -> None:
        """Another version of its adapter computes what comes next of a request that has begun. What has no token of
        what is computed begins anew, as with other base weights; recompute: everything does.
        """
        for sequence in request.live:
            self._cohort.leave(sequence)  # with the tokens that the version before made
        request.adapter = adapter
        for sequence in request.live.copy():
            if sequence.running and (recompute or sequence.partial):
                self._metrics.counters["recomputed"] += recompute
                self.send_back(sequence)
            sequence.kv.adapter = adapter

    def fill(self, step: Step, now: float, *, admit: bool) -> None:
        """Choose the step's rows. admit=False: nobody who has not begun."""
        if self.waiting:
            self._cohort.offer()
        self._make_way(admit)
        others = [sequence for sequence in self.running if sequence.row < 0]
        if not step.former and not self._take_cohort(step, sum(sequence.pending == 1 for sequence in others)):
            others = self.running.copy()
        others = [sequence for sequence in others if step.computes(sequence)]
        decodes = [sequence for sequence in others if sequence.pending == 1 and sequence.feed]
        prefills = [sequence for sequence in others if sequence.pending > 1]
        if self._take(step, decodes + prefills):
            self._admit(step, now, admit)

    def fill_draft(self, step: Step) -> None:
        """Rows for those that cannot go on without a draft."""
        self._take(step, [sequence for sequence in self.running if sequence.wants_draft])

    def _make_way(self, admit: bool) -> None:
        """Send running sequences back for the head of the queue, where their priority is lower and there is no room for
        it.
        """
        head = next((sequence for sequence in self.waiting if self._may_run(sequence, admit)), None)
        while head and self.running and self.running[-1].order[0] > head.order[0]:
            reused, _ = self._reusable(head)
            if len(self.running) < self._max_batch and self._fits(head, reused):
                return
            self._preempt(self.running[-1])

    def _take_cohort(self, step: Step, others: int) -> bool:
        """All of it at once; or it is dissolved, where somebody may have to stand back for one who is earlier: when
        seats, tokens or blocks do not do for it and the `others` that decode, each of which needs a block at most.
        """
        if (
            len(self._cohort)
            and len(self.running) <= min(step.seats, step.budget)
            and self._cohort.reserve(spare=others)
        ):
            step.take_cohort(self._cohort)
            return True
        self._cohort.dissolve()
        return False

    def _take(self, step: Step, chosen: list[Sequence]) -> bool:
        """Rows for some of what runs; False when somebody had to give way, so nobody should be let in now."""
        if not chosen:
            return True
        unscheduled = {sequence for sequence in self.running if sequence.row < 0}
        calm = True
        for sequence in chosen:
            if step.full:
                break
            if sequence not in unscheduled:  # gave way to an earlier one
                continue
            length = step.room_for(sequence)
            if not length:
                continue
            while not self._kv.reserve(sequence.kv, length):
                victim = next(other for other in reversed(self.running) if other in unscheduled)
                calm = False
                unscheduled.discard(victim)
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                unscheduled.discard(sequence)
                step.take(sequence, length)
        return calm

    def _admit(self, step: Step, now: float, admit: bool) -> None:
        if not self.waiting or len(self.running) >= self._max_batch:
            return
        coming = self._names_coming()
        for sequence in list(self.waiting):
            if step.full or step.late or len(self.running) >= self._max_batch:
                return
            if not self._may_run(sequence, admit):
                continue
            reused, lacking = self._reusable(sequence)
            if lacking in coming:  # a running prefill computes that block: taking it next step costs nothing
                continue
            if not self._fits(sequence, reused):
                return
            if not step.computes(sequence):
                continue
            self.waiting.remove(sequence)
            self._kv.admit(sequence.kv, len(sequence.tokens), reused)
            if not sequence.begun:
                sequence.request.cached_tokens = sequence.kv.computed
                self._metrics.admitted(sequence, now)
            self.join(sequence)
            coming |= self._names_coming_from(sequence)
            if length := step.room_for(sequence):  # 0: the cache had all but the token that a draft goes on from
                reserved = self._kv.reserve(sequence.kv, length)
                assert reserved, "an admitted sequence has all its blocks"
                step.take(sequence, length)

    def _may_run(self, sequence: Sequence, admit: bool) -> bool:
        """Whether a sequence may run in this step. One that has not begun gets the version of its adapter that is live
        now.
        """
        if sequence.begun:
            return True
        request = sequence.request
        if not admit or not self._adapters.opens_to(request.adapter_name):
            return False
        if request.adapter_name:
            request.adapter = self._adapters.by_name[request.adapter_name]
            sequence.kv.adapter = request.adapter
        return True

    def _reusable(self, sequence: Sequence) -> tuple[list[int], BlockHash | None]:
        if sequence.request.scoring:  # needs the logits of the tokens it is to score
            return self._kv.reusable(sequence.kv, sequence.tokens[: sequence.request.score_from])
        return self._kv.reusable(sequence.kv, sequence.tokens)

    def _fits(self, sequence: Sequence, reused: list[int]) -> bool:
        return self._kv.fits(len(sequence.tokens), reused, self._spare if self.running else 0)

    def _preempt(self, sequence: Sequence) -> None:
        self._metrics.counters["preempted"] += 1
        self.send_back(sequence)

    def _names_coming(self) -> set[BlockHash]:
        names: set[BlockHash] = set()
        for sequence in self.running:
            if sequence.row < 0 and sequence.pending > 1:
                names |= self._names_coming_from(sequence)
        return names

    def _names_coming_from(self, sequence: Sequence) -> set[BlockHash]:
        return set(self._kv.names_coming(sequence.kv, sequence.tokens))

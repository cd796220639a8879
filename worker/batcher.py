"""Who runs next: running sequences first, then new ones as far as tokens, seats and KV blocks go.

Order is (priority, arrival). A step takes decodes, then chunks of prompts being prefilled, then admits from the
queue; so a long prompt never keeps a decode waiting. When blocks run out the last in order gives its blocks back
and is recomputed later; a sequence that is first in order always makes progress, because alone it fits.
"""

from bisect import insort

from worker.cohort import Cohort
from worker.generation_metrics import GenerationMetrics
from worker.kv_cache import KvCache
from worker.prefix_cache import BlockHash
from worker.sequence import Sequence
from worker.step import Step


def _by_order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


class Batcher:
    """The queue and the running set of one replica; both sorted by order."""

    def __init__(self, kv: KvCache, cohort: Cohort, max_batch: int, metrics: GenerationMetrics) -> None:
        """cohort: who of those that run is kept in arrays; each leaves before anything happens to it here."""
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._kv = kv
        self._cohort = cohort
        self._max_batch = max_batch
        self._metrics = metrics
        self._spare = max(1, kv.pool.num_blocks // 100)  # admitting to the last block would preempt at once

    def enter(self, epoch: int) -> None:
        """These weights are live. What has no token yet, or is being computed again from its tokens, begins anew: one
        version computes all of it.

        It may be computed in part; or whole but for its last token, by a chunk that ended there, by a step before a
        draft, or as a step that was thrown away had found it in the cache.
        """
        if epoch != self._kv.epoch:
            self._cohort.dissolve()
            for sequence in [sequence for sequence in self.running if sequence.partial]:
                self.send_back(sequence)
        self._kv.enter(epoch)

    @property
    def lets_in(self) -> bool:
        """Somebody waits, and there is a seat: the next step may be another."""
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
        """Gone; its blocks are given back."""
        self._cohort.leave(sequence)
        (self.running if sequence.running else self.waiting).remove(sequence)
        sequence.running = False
        self._kv.release(sequence.kv)

    def send_back(self, sequence: Sequence) -> None:
        """From running to the queue, to be computed again from its tokens."""
        self._cohort.leave(sequence)
        self._metrics.counters["wasted_tokens"] += sequence.kv.computed
        self.drop(sequence)
        sequence.draft = None
        sequence.renewing = True
        if not sequence.request.forked and sequence.request.prompt_logprobs:  # they are to be of the first token's
            sequence.request.prompt_logprobs.clear()
        self.queue(sequence)

    def fill(self, step: Step, now: float, *, admit: bool) -> None:
        """Choose the step's rows. admit=False: nobody who has not begun."""
        self._make_way(admit)
        others = [sequence for sequence in self.running if sequence.row < 0]
        if not self._take_cohort(step, sum(sequence.pending == 1 for sequence in others)):
            others = self.running.copy()
        decodes = [sequence for sequence in others if sequence.pending == 1 and sequence.feed]
        prefills = [sequence for sequence in others if sequence.pending > 1]
        if self._take(step, decodes + prefills):
            self._admit(step, now, admit)

    def fill_draft(self, step: Step) -> None:
        """Rows for those that cannot go on without a draft."""
        self._take(step, [sequence for sequence in self.running if sequence.wants_draft])

    def _make_way(self, admit: bool) -> None:
        """The head of the queue displaces running sequences of lower priority."""
        head = next((sequence for sequence in self.waiting if admit or sequence.begun), None)
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
            if not admit and not sequence.begun:
                continue
            reused, lacking = self._reusable(sequence)
            if lacking in coming:  # a running prefill computes that block: taking it next step costs nothing
                continue
            if not self._fits(sequence, reused):
                return
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

    def _reusable(self, sequence: Sequence) -> tuple[list[int], BlockHash | None]:
        if sequence.request.scoring:  # needs the logits of every prompt token
            return [], None
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

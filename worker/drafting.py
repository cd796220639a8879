"""The scheduler's part of speculative decoding: what drafts propose, and what becomes of it.

Steps of the drafting layer take turns with steps of the model, which judge a proposed token and go one further. A draft
may be older than the weights that judge it: what comes out follows those that judge.
"""

from collections.abc import Callable
from typing import NamedTuple

from worker.batcher import Step
from worker.engine.base import Float32
from worker.generation_metrics import GenerationMetrics
from worker.kv_cache import KvCache
from worker.sampler import Draw, Pick, Sampler
from worker.sequence import Sequence
from worker.speculation import Proposal


class Judged(NamedTuple):
    """A sequence whose proposed token the step has judged. pick: from the logits before it; the next row follows it."""

    sequence: Sequence
    pick: Pick


class Drafting:
    """advance: takes a drawn token into a sequence, which may end it."""

    def __init__(
        self,
        sampler: Sampler,
        kv: KvCache,
        metrics: GenerationMetrics,
        advance: Callable[[Sequence, Draw, Step, float], None],
    ) -> None:
        self._sampler = sampler
        self._kv = kv
        self._counters = metrics.counters
        self._advance = advance

    def propose(self, step: Step, logits: Float32) -> None:
        """Take the drafts' tokens. Nothing counts as computed: the model writes the same cells when it judges."""
        sequences = [row.sequence for row in step.rows]
        proposals = self._sampler.propose(logits, [s.pick(index) for index, s in enumerate(sequences)])
        for sequence, proposal in zip(sequences, proposals, strict=True):
            sequence.draft = proposal

    def judge(self, judged: list[Judged], logits: Float32, step: Step, now: float) -> list[Judged]:
        """Give each sequence a token; returns those whose proposed token it is and that go on, with their next pick."""
        proposals = [sequence.draft or Proposal(None) for sequence, _ in judged]
        found = self._sampler.verify(logits, [pick for _, pick in judged], proposals)
        confirmed: list[Judged] = []
        for (sequence, pick), proposal, (draw, kept) in zip(judged, proposals, found, strict=True):
            if not sequence.running:  # a sibling's bad logits ended it
                continue
            sequence.draft = None
            self._counters["spec_drafted"] += proposal.token is not None
            self._counters["spec_accepted"] += kept
            self._advance(sequence, draw, step, now)
            if kept and sequence.running:
                self._kv.advance(sequence.kv, sequence.tokens, 1)
                confirmed.append(Judged(sequence, sequence.pick(pick.row + 1)))
        return confirmed

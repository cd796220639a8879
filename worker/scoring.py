"""Scores of tokens that are given: their logprobs and ranks, in the bits that sampling them would report.

A score goes the way of a draw (sampler.py): the request's temperature and edits, then `softmax`'s sums. So the logprob
of a token that was sampled is the same number again. A device scores what nothing edits; for the rest rows are fetched.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from worker.engine.base import CANNOT_BE_SAMPLED, MOST_TOPS, Float32, Logits
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.sampler import ALL_MASKED, BROKEN, Draw, LogprobsMode, inverse_temperature, is_finite, rank_of
from worker.softmax import Softmax, largest, logprob

Scored = list[tuple[int, float, int]]
"""(id, logprob, rank) of a token, then of the most likely others."""


class Scoring(NamedTuple):
    """Tokens to score: targets[i] under row `first + i` of a step's logits. sampling, edits: as in `Scorer.score`."""

    first: int
    targets: Sequence[int]
    sampling: SamplingParams
    edits: LogitEdits | None


class Scorer:
    """Scores tokens over one vocabulary; one owner thread. mode: what logprobs are of, as for `Sampler`."""

    def __init__(self, vocab_size: int, mode: LogprobsMode = "processed") -> None:
        self._raw = mode == "raw"
        self._softmax = Softmax(vocab_size)

    def score(
        self, logits: Float32, targets: Sequence[int], sampling: SamplingParams, edits: LogitEdits | None = None
    ) -> list[Scored] | Draw:
        """(id, logprob, rank) of each target under its row of logits [L, vocab], then of the most likely others.

        At the request's temperature and after its edits, so that scoring what was sampled gives the logprobs it was
        sampled with; mode "raw": at 1, of the untouched logits. edits: where the output is before the first target;
        None = nothing is edited. A Draw says why there is no score: a row is not finite, or the grammar had not let a
        target follow. What any other edit closes has the logprob of an id that cannot be sampled.
        """
        scores: list[Scored] = []
        others = sampling.prompt_logprobs or 0
        inverse = 1.0 if self._raw else inverse_temperature(sampling)
        scaled = self._softmax.scaled
        with np.errstate(all="ignore"):
            for row, target in zip(logits, targets, strict=True):
                shown = row if self._raw or edits is None else self._edited(row, edits, target)
                if isinstance(shown, Draw):
                    return shown
                weighed = self._softmax.weigh(shown, inverse)
                if not (weighed.finite if shown is row else np.isfinite(weighed.peak)):
                    return BROKEN if shown is row else ALL_MASKED
                best = [(int(i), rank) for rank, i in enumerate(largest(scaled, others), 1)] if others else []
                ranked = [(target, rank_of(scaled, target)), *(entry for entry in best if entry[0] != target)]
                lowest = CANNOT_BE_SAMPLED
                scores.append([(i, max(lowest, logprob(scaled, i, weighed.norm)), rank) for i, rank in ranked])
                if edits is not None:
                    edits.record(target)
        return scores

    def score_all(self, logits: Float32 | Logits, asked: Sequence[Scoring]) -> list[list[Scored] | Draw]:
        """`score` of each: all that nothing edits at once, where the logits are on a device."""
        found: list[list[Scored] | Draw | None] = [None] * len(asked)
        there = [] if isinstance(logits, np.ndarray) else [i for i, one in enumerate(asked) if self._scored_there(one)]
        if there and not isinstance(logits, np.ndarray):
            scores = iter(self._score_there(logits, [asked[i] for i in there]))
            for i in there:
                found[i] = next(scores)
        return [
            self.score(logits[first : first + len(targets)], targets, sampling, edits) if scored is None else scored
            for scored, (first, targets, sampling, edits) in zip(found, asked, strict=True)
        ]

    def _scored_there(self, one: Scoring) -> bool:
        plain = self._raw or one.edits is None or not one.edits.active
        return plain and (one.sampling.prompt_logprobs or 0) <= MOST_TOPS

    def _score_there(self, logits: Logits, asked: Sequence[Scoring]) -> Iterator[list[Scored] | Draw]:
        counts = [len(one.targets) for one in asked]
        rows = np.concatenate([np.arange(one.first, one.first + len(one.targets)) for one in asked])
        inverse = np.array([1.0 if self._raw else inverse_temperature(one.sampling) for one in asked], np.float32)
        targets = np.array([target for one in asked for target in one.targets], np.int64)
        others = np.repeat([one.sampling.prompt_logprobs or 0 for one in asked], counts)
        found = logits.score(rows, np.repeat(inverse, counts), targets, others.tolist())
        assert found.tops is not None
        tokens, logprobs, ranks = targets.tolist(), found.logprobs.tolist(), found.tops.ranks.tolist()
        ids, of_ids = found.tops.ids.tolist(), found.tops.logprobs.tolist()
        at = 0
        for count, one in zip(counts, asked, strict=True):
            if one.edits is not None:
                for target in one.targets:
                    one.edits.record(target)
            part, most = range(at, at + count), one.sampling.prompt_logprobs or 0
            at += count
            if not found.finite[part.start : part.stop].all():
                yield BROKEN
                continue
            yield [
                [
                    (tokens[i], logprobs[i], ranks[i]),
                    *(
                        (other, value, rank)
                        for rank, (other, value) in enumerate(zip(ids[i][:most], of_ids[i][:most], strict=True), 1)
                        if other not in (tokens[i], -1)
                    ),
                ]
                for i in part
            ]

    def _edited(self, row: Float32, edits: LogitEdits, target: int) -> Float32 | Draw:
        """The row as it is where nothing is edited; a Draw when the target could not have been drawn from it."""
        if not edits.active:
            return row
        if not is_finite(row):
            return BROKEN
        edited = self._softmax.scaled
        edited[:] = row
        if problem := edits.apply(edited):
            return Draw(0, 0.0, error=problem)
        if edits.grammar is not None and edited[target] == -np.inf:
            return Draw(0, 0.0, error=f"token {target} is not what the constraint lets follow")
        return edited

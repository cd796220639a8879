"""From logits to tokens: exact sampling and finite logprobs, on the CPU.

The distribution sampled from is softmax(edited logits / temperature), cut by top-k, top-p and min-p; what a grammar
closes is an edit. Logprobs are those of that distribution before the cut ("processed"), or of the untouched logits
("raw"). Temperature 0 takes the most likely id (the lowest of equals) and reports logprobs at temperature 1. Sums and
logarithms are `softmax`'s, whichever way a row goes: a token's logprob is the same number drawn in a batch, alone,
beside others' or scored.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from worker import row_sampler
from worker.engine.base import MOST_TOPS, Cuts, Drawing, Drawn, Float32, Float64, Int64, Logits, Tops
from worker.grammar import FILL
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.random_streams import UInt64, uniforms, uniforms_of
from worker.row_sampler import RowSampler, Softmax, Spread, largest, logprob
from worker.speculation import ACCEPT, DRAFT, REPLACE, Proposal, judged

LogprobsMode = Literal["processed", "raw"]

_COLD = 1e-5
"""A temperature below this is greedy; dividing by it would leave float32."""
_MASKED = -9999.0
"""Logprob of an id that was asked for and cannot be sampled: JSON has no infinity, and vLLM's clients know this one."""


class Pick(NamedTuple):
    """One token to draw: from which row of the logits, how, and with which random number."""

    row: int
    sampling: SamplingParams
    edits: LogitEdits
    seed: int
    sample: int  # index among the n sequences
    position: int  # output tokens before this one


class Draw(NamedTuple):
    """One drawn token. top: (id, logprob), best first. rank: 1 = most likely (0 when no top was asked for)."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()
    rank: int = 0
    mask: Sequence[int] = ()  # ids left open, when asked for and something was cut
    error: str = ""  # non-empty: there is no token
    broken: bool = False  # because the engine's logits were not finite


class Asked(NamedTuple):
    """Plain draws in columns [R]. The last three: a pick's seed, sample and position."""

    rows: Int64
    inverse_temperature: Float32
    greedy: npt.NDArray[np.bool_]
    cuts: Cuts
    seeds: UInt64
    samples: UInt64
    positions: UInt64


Scored = list[tuple[int, float, int]]
"""(id, logprob, rank) of a token, then of the most likely others."""


class Sampler:
    """Draws for one vocabulary; one owner thread. logits: whatever the engine's `forward` returned, [L, vocab]; their
    rows are named by `Pick.row`.
    """

    def __init__(self, vocab_size: int, mode: LogprobsMode = "processed") -> None:
        self._raw = mode == "raw"
        self._rows = RowSampler(vocab_size)
        self._softmax = self._rows.softmax
        self._untouched = Softmax(vocab_size) if self._raw else None
        self._masked: Float32 = np.empty((0, vocab_size), np.float32)  # logits that grammars leave
        row_sampler.load()  # compiled now, and not before the first token

    def sample(self, logits: Float32 | Logits, picks: Sequence[Pick]) -> list[Draw]:
        """Draw a token for every pick from logits [L, vocab], which stay as they are."""
        numbers = _numbers(picks)
        draws: list[Draw | None] = [None] * len(picks)
        device = not isinstance(logits, np.ndarray)
        plain = [
            i
            for i, pick in enumerate(picks)
            if not pick.edits.active and (self.plain(pick.sampling) or (device and self._likeliest(pick.sampling)))
        ]
        masked = [] if device else [i for i, pick in enumerate(picks) if self._only_masked(pick)]
        with np.errstate(all="ignore"):
            if masked and isinstance(logits, np.ndarray):
                found = self._sample_masked(logits, [picks[i] for i in masked], numbers[masked])
                for i, draw in zip(masked, found, strict=True):
                    draws[i] = draw
            if plain:
                found = self._sample_plain(logits, [picks[i] for i in plain], numbers[plain])
                for i, draw in zip(plain, found, strict=True):
                    draws[i] = draw
            return [
                self._sample_row(logits[pick.row], pick, numbers[i : i + 1]) if draw is None else draw
                for i, (pick, draw) in enumerate(zip(picks, draws, strict=True))
            ]

    def plain(self, sampling: SamplingParams) -> bool:
        """Its token and logprob are all that is told, and of the same temperature; unless its logits are edited."""
        if sampling.reports_others or sampling.sampling_mask:
            return False
        return not self._raw or is_greedy(sampling) or sampling.temperature == 1.0

    def _only_masked(self, pick: Pick) -> bool:
        """Whether the pick is plain but for its grammar, and its logprob is of what the grammar leaves."""
        return pick.edits.grammar_alone is not None and not self._raw and self.plain(pick.sampling)

    def _likeliest(self, sampling: SamplingParams) -> bool:
        """Whether only top logprobs keep it from being plain: on a device they come with its token."""
        if sampling.logprob_token_ids or not 0 < sampling.logprobs <= MOST_TOPS:
            return False
        return self.plain(msgspec.structs.replace(sampling, logprobs=0))

    def draw(self, logits: Float32 | Logits, asked: Asked) -> Drawn:
        """Draw a token for every row that is asked for."""
        if isinstance(logits, np.ndarray):
            numbers = uniforms_of(asked.seeds, asked.samples, asked.positions)
            with np.errstate(all="ignore"):
                return self._rows.draw(logits, asked.rows, asked.inverse_temperature, asked.greedy, numbers, asked.cuts)
        return self.begin(logits, asked).drawn()

    def begin(self, logits: Logits, asked: Asked) -> Drawing:
        """Begin to draw where the logits are."""
        numbers = uniforms_of(asked.seeds, asked.samples, asked.positions)
        return logits.begin(asked.rows, asked.inverse_temperature, asked.greedy, numbers, asked.cuts)

    def propose(self, logits: Float32, picks: Sequence[Pick]) -> list[Proposal]:
        """Draw from a draft's logits as `sample` would from the model's, and keep what was drawn from."""
        numbers = _numbers(picks, DRAFT)
        with np.errstate(all="ignore"):
            return [self._propose_row(logits[p.row], p, numbers[i : i + 1]) for i, p in enumerate(picks)]

    def verify(self, logits: Float32, picks: Sequence[Pick], proposals: Sequence[Proposal]) -> list[tuple[Draw, bool]]:
        """The token at every pick, drawn as `sample` draws it in distribution, and whether it is the proposed one."""
        plain, accept, replace = (_numbers(picks, purpose) for purpose in (0, ACCEPT, REPLACE))
        found: list[tuple[Draw, bool]] = []
        with np.errstate(all="ignore"):
            for i, (pick, proposal) in enumerate(zip(picks, proposals, strict=True)):
                row = logits[pick.row]
                if proposal.token is None:
                    found.append((self._sample_row(row, pick, plain[i : i + 1]), False))
                elif isinstance(spread := self._spread(row, pick), Draw):
                    found.append((spread, False))
                elif spread.ids is not None and len(spread.ids) == 1:
                    token = int(spread.ids[0])
                    found.append((self._reported(row, pick, token, spread), token == proposal.token))
                else:
                    token, kept = judged(self._shares(spread), proposal, float(accept[i]), replace[i : i + 1])
                    found.append((self._reported(row, pick, token, spread), kept))
        return found

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
                    return _BROKEN if shown is row else _ALL_MASKED
                best = [(int(i), rank) for rank, i in enumerate(largest(scaled, others), 1)] if others else []
                ranked = [(target, _rank(scaled, target)), *(entry for entry in best if entry[0] != target)]
                scores.append([(i, max(_MASKED, logprob(scaled, i, weighed.norm)), rank) for i, rank in ranked])
                if edits is not None:
                    edits.record(target)
        return scores

    def _edited(self, row: Float32, edits: LogitEdits, target: int) -> Float32 | Draw:
        """The row as it is where nothing is edited; a Draw when the target could not have been drawn from it."""
        if not edits.active:
            return row
        if not _finite(row):
            return _BROKEN
        edited = self._softmax.scaled
        edited[:] = row
        if problem := edits.apply(edited):
            return Draw(0, 0.0, error=problem)
        if edits.grammar is not None and edited[target] == -np.inf:
            return Draw(0, 0.0, error=f"token {target} is not what the constraint lets follow")
        return edited

    def _sample_plain(self, logits: Float32 | Logits, picks: Sequence[Pick], numbers: Float64) -> list[Draw]:
        how = (
            np.array([pick.row for pick in picks], np.int64),
            np.array([inverse_temperature(pick.sampling) for pick in picks], np.float32),
            np.array([is_greedy(pick.sampling) for pick in picks], np.bool_),
            numbers,
        )
        if isinstance(logits, np.ndarray):
            return draws_of(self._rows.draw(logits, *how, _cuts(picks)))
        drawn = logits.begin(*how, _cuts(picks)).drawn()
        return _with_tops(draws_of(drawn), drawn.tops, picks)

    def _sample_masked(self, logits: Float32, picks: list[Pick], numbers: Float64) -> list[Draw]:
        """All rows together, as plain ones, from logits that their grammars leave."""
        if len(self._masked) < len(picks):
            self._masked = np.empty((len(picks), logits.shape[1]), np.float32)
        rows = self._masked[: len(picks)]
        problems: dict[int, Draw] = {}
        for i, pick in enumerate(picks):
            grammar, row = pick.edits.grammar, logits[pick.row]
            assert grammar is not None
            if not _finite(row):
                problems[i] = _BROKEN
            elif problem := grammar.restrict(row, rows[i], FILL):
                problems[i] = Draw(0, 0.0, error=problem)
            elif rows[i].max() == FILL:
                problems[i] = _ALL_MASKED
            if i in problems:
                rows[i] = 0.0
        moved = [pick._replace(row=i) for i, pick in enumerate(picks)]
        return [problems.get(i, draw) for i, draw in enumerate(self._sample_plain(rows, moved, numbers))]

    def _sample_row(self, row: Float32, pick: Pick, number: Float64) -> Draw:
        spread = self._spread(row, pick)
        if isinstance(spread, Draw):
            return spread
        return self._reported(row, pick, self._rows.token(spread, number), spread)

    def _propose_row(self, row: Float32, pick: Pick, number: Float64) -> Proposal:
        spread = self._spread(row, pick)
        if isinstance(spread, Draw):
            return Proposal(None)
        token = self._rows.token(spread, number)
        return Proposal(token, None if is_greedy(pick.sampling) else self._shares(spread))

    def _spread(self, row: Float32, pick: Pick) -> Spread | Draw:
        """Fill the buffers from a row; a Draw when nothing can be drawn."""
        if pick.edits.active:
            if not _finite(row):
                return _BROKEN
            self._softmax.scaled[:] = row
            row = self._softmax.scaled
            if problem := pick.edits.apply(row):
                return Draw(0, 0.0, error=problem)
        sampling = pick.sampling
        spread = self._rows.spread(row, inverse_temperature(sampling), sampling, greedy=is_greedy(sampling))
        if not (spread.weighed.finite or pick.edits.active):
            return _BROKEN
        return spread if np.isfinite(spread.weighed.peak) else _ALL_MASKED

    def _shares(self, spread: Spread) -> Float64:
        """The distribution that is drawn from, [vocab]."""
        weights = self._softmax.weights.astype(np.float64)
        if spread.ids is not None:
            whole, weights = weights, np.zeros_like(weights)
            weights[spread.ids] = whole[spread.ids]
        shares: Float64 = weights / weights.sum()
        return shares

    def _reported(self, row: Float32, pick: Pick, token: int, spread: Spread) -> Draw:
        sampling, shown, weighed = pick.sampling, self._softmax.scaled, spread.weighed
        if self._untouched is not None:
            weighed, shown = self._untouched.weigh(row, 1.0), self._untouched.scaled
        mask: list[int] = []
        if sampling.sampling_mask and spread.ids is not None:
            mask = spread.ids.tolist()
        elif sampling.sampling_mask and pick.edits.grammar is not None:
            mask = np.flatnonzero(self._softmax.scaled > -np.inf).tolist()
        draw = Draw(token, logprob(shown, token, weighed.norm), mask=mask)
        if sampling.logprob_token_ids:
            ids = dict.fromkeys((token, *sampling.logprob_token_ids))
            top = [(i, max(_MASKED, logprob(shown, i, weighed.norm))) for i in ids]
            draw = draw._replace(top=top, rank=_rank(shown, token))
        elif sampling.logprobs:
            top = [(int(i), logprob(shown, int(i), weighed.norm)) for i in largest(shown, sampling.logprobs)]
            draw = draw._replace(top=top, rank=_rank(shown, token))
        return draw


_ALL_MASKED = Draw(0, 0.0, error="every token is masked")
_BROKEN = Draw(0, 0.0, error="logits are not finite", broken=True)


def _cuts(picks: Sequence[Pick]) -> Cuts:
    return Cuts(
        np.array([pick.sampling.top_k for pick in picks], np.int32),
        np.array([pick.sampling.top_p for pick in picks], np.float64),
        np.array([pick.sampling.min_p for pick in picks], np.float32),
        np.array([pick.sampling.logprobs for pick in picks], np.int32),
    )


def _with_tops(draws: list[Draw], tops: Tops | None, picks: Sequence[Pick]) -> list[Draw]:
    if tops is None:
        return draws
    for at, (draw, pick) in enumerate(zip(draws, picks, strict=True)):
        count = min(pick.sampling.logprobs, tops.ids.shape[1])
        if count and not draw.error:
            top = list(zip(tops.ids[at, :count].tolist(), tops.logprobs[at, :count].tolist(), strict=True))
            draws[at] = draw._replace(top=top, rank=int(tops.ranks[at]))
    return draws


def draws_of(drawn: Drawn) -> list[Draw]:
    """Draws one by one, of what was drawn in columns."""
    return [
        Draw(token, logprob) if finite else _BROKEN
        for token, logprob, finite in zip(
            drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.finite.tolist(), strict=True
        )
    ]


def _numbers(picks: Sequence[Pick], purpose: int = 0) -> Float64:
    return uniforms([p.seed for p in picks], [p.sample for p in picks], [p.position for p in picks], purpose)


def _finite(row: Float32) -> bool:
    return bool(np.isfinite(row.max()) and np.isfinite(row.min()))


def is_greedy(sampling: SamplingParams) -> bool:
    """The most likely id is taken."""
    return sampling.temperature < _COLD


def inverse_temperature(sampling: SamplingParams) -> float:
    """What logits are multiplied by."""
    return 1.0 if is_greedy(sampling) else 1.0 / sampling.temperature


def _rank(row: Float32, token: int) -> int:
    return int(np.count_nonzero(row > row[token])) + 1

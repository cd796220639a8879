"""From logits to tokens: exact sampling and finite logprobs, on the CPU, or by a device that has the logits.

The distribution sampled from is softmax(edited logits / temperature), cut by top-k, top-p and min-p; what a grammar
closes is an edit. Logprobs are those of that distribution before the cut ("processed"), or of the untouched logits
("raw"). Temperature 0 takes the most likely id (the lowest of equals) and reports logprobs at temperature 1. Sums and
logarithms are `softmax`'s, whichever way a row goes: a token's logprob is the same number drawn in a batch, alone,
beside others' or scored (scoring.py).

A device draws the same tokens from its logits by the same numbers, and reports all but more than 1,024 other ids'
logprobs. For the rest rows are fetched.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from worker import softmax
from worker.engine.base import (
    CANNOT_BE_SAMPLED,
    MOST_TOPS,
    Cuts,
    Drawing,
    Drawn,
    Extras,
    Float32,
    Float64,
    ForwardBatch,
    Int32,
    Int64,
    Logits,
)
from worker.grammar import FILL
from worker.logit_edits import LogitEdits
from worker.messages import SamplingParams
from worker.random_streams import UInt64, uniforms, uniforms_of
from worker.softmax import Cut, Softmax, Truncation, Weighed, largest, locate, logprob, open_ids, truncates
from worker.speculation import ACCEPT, DRAFT, REPLACE, Proposal, judged

LogprobsMode = Literal["processed", "raw"]

_COLD = 1e-5
"""A temperature below this is greedy; dividing by it would leave float32."""


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


class Begun:
    """Tokens that a device draws: of rows that were asked for in columns, then of picks. problems: why no token can
    follow, by the number of the pick.
    """

    def __init__(self, drawing: Drawing, columns: int, picks: Sequence[Pick], problems: dict[int, str]) -> None:
        self._drawing, self._columns, self._picks, self._problems = drawing, columns, picks, problems

    def drawn(self) -> tuple[Drawn, list[Draw]]:
        """Wait for the tokens: of the rows asked for in columns, then of picks one by one."""
        drawn, columns = self._drawing.drawn(), self._columns
        draws = draws_of(drawn, columns)
        for i, problem in self._problems.items():
            if not draws[i].broken:
                draws[i] = Draw(0, 0.0, error=problem)
        if drawn.tops is not None:
            rows = zip(self._picks, *(column[columns:].tolist() for column in drawn.tops), strict=True)
            for i, (pick, ids, logprobs, rank) in enumerate(rows):
                if pick.sampling.reports_others and not draws[i].error:
                    draws[i] = _with_others(draws[i], pick.sampling, ids, logprobs, rank)
        for i, mask in enumerate(drawn.masks[columns:] if drawn.masks is not None else ()):
            if mask is not None and not draws[i].error:
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                draws[i] = draws[i]._replace(mask=np.flatnonzero(bits).tolist())
        return Drawn(drawn.tokens[:columns], drawn.logprobs[:columns], drawn.finite[:columns]), draws

    def follow(self, batch: ForwardBatch, sources: Int32) -> Logits | None:
        """Launch the next step at once: row i goes on from the token drawn `sources[i]`-th. None: it cannot be."""
        return self._drawing.follow(batch, sources) if self._drawing.whole else None


class Spread(NamedTuple):
    """What a row's token is drawn from: its weights, which are in the buffers, of the ids left open (None: of all)."""

    weighed: Weighed
    ids: Int64 | None


class RowSampler:
    """Draws tokens from rows of logits on the CPU, and keeps the buffers of one row. One owner thread. Rows are
    float32, each of them C-contiguous.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self.softmax = Softmax(vocab_size)

    def draw(
        self,
        logits: Float32,
        rows: Int64,
        inverse_temperature: Float32,
        greedy: npt.NDArray[np.bool_],
        numbers: Float64,
        cuts: Cuts | None = None,
    ) -> Drawn:
        """Draw from softmax(logits[rows] * inverse_temperature), or what `cuts` leave open of it, by numbers in [0, 1).

        Where greedy, the most likely id.
        """
        count, kernels = len(rows), softmax.load()
        cut = np.zeros(count, np.bool_) if cuts is None else cuts.close(self._vocab) & ~greedy
        tokens, logprobs, finite = np.zeros(count, np.int64), np.zeros(count), np.ones(count, np.bool_)
        if kernels is None:
            alone = np.arange(count)
        else:
            alone, whole = np.flatnonzero(cut), np.flatnonzero(~cut)
            tokens[whole], logprobs[whole], finite[whole] = kernels.draw(
                logits, rows[whole], inverse_temperature[whole], greedy[whole], numbers[whole], self.softmax.sums
            )
        for i in alone.tolist():
            left = (
                Cut(int(cuts.top_k[i]), float(cuts.top_p[i]), float(cuts.min_p[i])) if cuts is not None else _EVERYTHING
            )
            spread = self.spread(logits[rows[i]], float(inverse_temperature[i]), left, greedy=bool(greedy[i]))
            finite[i] = spread.weighed.finite
            if finite[i]:
                tokens[i] = token = self.token(spread, numbers[i : i + 1])
                logprobs[i] = logprob(self.softmax.scaled, token, spread.weighed.norm)
        return Drawn(tokens, logprobs, finite)

    def spread(self, row: Float32, inverse_temperature: float, cut: Truncation, *, greedy: bool) -> Spread:
        """Fill the buffers from a row, -inf where masked. Nothing is drawn where its largest is no finite number."""
        weighed, ids = self.softmax.weigh(row, inverse_temperature), None
        scaled, weights = self.softmax.scaled, self.softmax.weights
        if np.isfinite(weighed.peak):
            if greedy:
                ids = np.array([scaled.argmax()])
            elif truncates(cut, self._vocab):
                ids = open_ids(scaled, weights, weighed.total, cut)
        return Spread(weighed, ids)

    def token(self, spread: Spread, number: Float64) -> int:
        """What a number [1] in [0, 1) draws from the row in the buffers."""
        if spread.ids is not None:
            return int(spread.ids[locate(self.softmax.weights[spread.ids][None], number)[0][0]])
        block, share = locate(self.softmax.sums[None], number)
        return int(block[0] * softmax.BLOCK + locate(self.softmax.blocks[block], share)[0][0])


_EVERYTHING = Cut(0, 1.0, 0.0)


class Sampler:
    """Draws for one vocabulary; one owner thread. logits: whatever the engine's `forward` returned, [L, vocab]; their
    rows are named by `Pick.row`.
    """

    def __init__(self, vocab_size: int, mode: LogprobsMode = "processed") -> None:
        self._raw, self._vocab = mode == "raw", vocab_size
        self._rows = RowSampler(vocab_size)
        self._softmax = self._rows.softmax
        self._untouched = Softmax(vocab_size) if self._raw else None
        self._masked: Float32 = np.empty((0, vocab_size), np.float32)  # logits that grammars leave
        softmax.load()  # compiled now, and not before the first token

    def sample(self, logits: Float32 | Logits, picks: Sequence[Pick]) -> list[Draw]:
        """Draw a token for every pick from logits [L, vocab], which stay as they are."""
        draws: list[Draw | None] = [None] * len(picks)
        if isinstance(logits, np.ndarray):
            together = [i for i, pick in enumerate(picks) if not pick.edits.active and self.plain(pick.sampling)]
            masked = [i for i, pick in enumerate(picks) if self._only_masked(pick)]
            with np.errstate(all="ignore"):
                for chosen, way in ((together, self._sample_plain), (masked, self._sample_masked)):
                    found = way(logits, [picks[i] for i in chosen]) if chosen else []
                    for i, draw in zip(chosen, found, strict=True):
                        draws[i] = draw
        else:
            there = [i for i, pick in enumerate(picks) if on_device(pick.sampling)]
            if there:
                _, found = self.begin(logits, None, [picks[i] for i in there]).drawn()
                for i, draw in zip(there, found, strict=True):
                    draws[i] = draw
        with np.errstate(all="ignore"):
            return [
                self._sample_row(logits[pick.row], pick, _numbers([pick])) if draw is None else draw
                for pick, draw in zip(picks, draws, strict=True)
            ]

    def plain(self, sampling: SamplingParams) -> bool:
        """Whether a draw is plain, if nothing edits its logits: only its token and logprob are told, and both are of
        one temperature.
        """
        if sampling.reports_others or sampling.sampling_mask:
            return False
        return not self._raw or is_greedy(sampling) or sampling.temperature == 1.0

    def _only_masked(self, pick: Pick) -> bool:
        """Whether the pick is plain but for its grammar, and its logprob is of what the grammar leaves."""
        return pick.edits.grammar_alone is not None and not self._raw and self.plain(pick.sampling)

    def draw(self, logits: Float32 | Logits, asked: Asked) -> Drawn:
        """Draw a token for every row that is asked for."""
        if isinstance(logits, np.ndarray):
            numbers = uniforms_of(asked.seeds, asked.samples, asked.positions)
            with np.errstate(all="ignore"):
                return self._rows.draw(logits, asked.rows, asked.inverse_temperature, asked.greedy, numbers, asked.cuts)
        return self.begin(logits, asked, ()).drawn()[0]

    def begin(self, logits: Logits, asked: Asked | None, picks: Sequence[Pick]) -> Begun:
        """Begin to draw where the logits are: for every row that is asked for, and every pick that is `on_device`."""
        if not picks:
            assert asked is not None, "there is something to draw"
            return Begun(self._launched(logits, asked, None), len(asked.rows), picks, {})
        problems = {i: bits for i, pick in enumerate(picks) if isinstance(bits := _grammar_bits(pick.edits), str)}
        plain, columns = 0 if asked is None else len(asked.rows), _asked_of(picks)
        drawing = self._launched(
            logits, columns if asked is None else _joined(asked, columns), self._extras(plain, picks, problems)
        )
        return Begun(drawing, plain, picks, problems)

    def _launched(self, logits: Logits, asked: Asked, extras: Extras | None) -> Drawing:
        numbers = uniforms_of(asked.seeds, asked.samples, asked.positions)
        return logits.begin(asked.rows, asked.inverse_temperature, asked.greedy, numbers, asked.cuts, extras)

    def _extras(self, plain: int, picks: Sequence[Pick], problems: dict[int, str]) -> Extras | None:
        """What makes rows more than plain draws: `plain` rows that are, then the picks'; None when all are plain."""
        edits = [pick.edits if pick.edits.active and i not in problems else None for i, pick in enumerate(picks)]
        others = [_others(pick.sampling) for pick in picks]
        tops = [0 if ids else pick.sampling.logprobs for ids, pick in zip(others, picks, strict=True)]
        untouched = [
            self._raw and (edit is not None or not (is_greedy(p.sampling) or p.sampling.temperature == 1.0))
            for edit, p in zip(edits, picks, strict=True)
        ]
        marked = [pick.sampling.sampling_mask and self._cut_or_held(pick) for pick in picks]
        if not (any(others) or any(tops) or any(untouched) or any(marked)) and all(edit is None for edit in edits):
            return None
        none: list[int] = []
        false = [False] * plain
        return Extras(
            [None] * plain + edits, [0] * plain + tops, [none] * plain + others, false + untouched, false + marked
        )

    def _cut_or_held(self, pick: Pick) -> bool:
        """Whether a mask says more than which ids the request itself has closed."""
        greedy, held = is_greedy(pick.sampling), pick.edits.grammar is not None
        return greedy or held or truncates(pick.sampling, self._vocab)

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

    def _sample_plain(self, logits: Float32, picks: Sequence[Pick]) -> list[Draw]:
        return draws_of(self.draw(logits, _asked_of(picks)))

    def _sample_masked(self, logits: Float32, picks: Sequence[Pick]) -> list[Draw]:
        """All rows together, as plain ones, from logits that their grammars leave."""
        if len(self._masked) < len(picks):
            self._masked = np.empty((len(picks), logits.shape[1]), np.float32)
        rows = self._masked[: len(picks)]
        problems: dict[int, Draw] = {}
        for i, pick in enumerate(picks):
            grammar, row = pick.edits.grammar, logits[pick.row]
            assert grammar is not None
            if not is_finite(row):
                problems[i] = BROKEN
            elif problem := grammar.restrict(row, rows[i], FILL):
                problems[i] = Draw(0, 0.0, error=problem)
            elif rows[i].max() == FILL:
                problems[i] = ALL_MASKED
            if i in problems:
                rows[i] = 0.0
        moved = [pick._replace(row=i) for i, pick in enumerate(picks)]
        return [problems.get(i, draw) for i, draw in enumerate(self._sample_plain(rows, moved))]

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
            if not is_finite(row):
                return BROKEN
            self._softmax.scaled[:] = row
            row = self._softmax.scaled
            if problem := pick.edits.apply(row):
                return Draw(0, 0.0, error=problem)
        sampling = pick.sampling
        spread = self._rows.spread(row, inverse_temperature(sampling), sampling, greedy=is_greedy(sampling))
        if not (spread.weighed.finite or pick.edits.active):
            return BROKEN
        return spread if np.isfinite(spread.weighed.peak) else ALL_MASKED

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
            top = [(i, max(CANNOT_BE_SAMPLED, logprob(shown, i, weighed.norm))) for i in ids]
            draw = draw._replace(top=top, rank=rank_of(shown, token))
        elif sampling.logprobs:
            top = [(int(i), logprob(shown, int(i), weighed.norm)) for i in largest(shown, sampling.logprobs)]
            draw = draw._replace(top=top, rank=rank_of(shown, token))
        return draw


ALL_MASKED = Draw(0, 0.0, error="every token is masked")
"""No token, as no id is open."""
BROKEN = Draw(0, 0.0, error="logits are not finite", broken=True)
"""No token, as a row of the engine's logits is not finite."""


def on_device(sampling: SamplingParams) -> bool:
    """Whether a device can draw the token and report all that is asked for."""
    return max(sampling.logprobs, len(sampling.logprob_token_ids)) <= MOST_TOPS


def _asked_of(picks: Sequence[Pick]) -> Asked:
    how = [pick.sampling for pick in picks]
    return Asked(
        np.array([pick.row for pick in picks], np.int64),
        np.array([inverse_temperature(one) for one in how], np.float32),
        np.array([is_greedy(one) for one in how], np.bool_),
        Cuts(
            np.array([one.top_k for one in how], np.int32),
            np.array([one.top_p for one in how], np.float64),
            np.array([one.min_p for one in how], np.float32),
        ),
        np.array([pick.seed & 0xFFFFFFFFFFFFFFFF for pick in picks], np.uint64),
        np.array([pick.sample for pick in picks], np.uint64),
        np.array([pick.position for pick in picks], np.uint64),
    )


def _joined(first: Asked, second: Asked) -> Asked:
    return Asked(
        np.concatenate((first.rows, second.rows)),
        np.concatenate((first.inverse_temperature, second.inverse_temperature)),
        np.concatenate((first.greedy, second.greedy)),
        Cuts(
            np.concatenate((first.cuts.top_k, second.cuts.top_k)),
            np.concatenate((first.cuts.top_p, second.cuts.top_p)),
            np.concatenate((first.cuts.min_p, second.cuts.min_p)),
        ),
        np.concatenate((first.seeds, second.seeds)),
        np.concatenate((first.samples, second.samples)),
        np.concatenate((first.positions, second.positions)),
    )


def _grammar_bits(edits: LogitEdits) -> npt.NDArray[np.int32] | str | None:
    return None if edits.grammar is None else edits.grammar.bits()


def _others(sampling: SamplingParams) -> list[int]:
    """Ids that the request names whose logprobs are wanted beside the token's own, each once."""
    ids = sampling.logprob_token_ids
    return list(dict.fromkeys(ids)) if ids else ids


def _with_others(draw: Draw, sampling: SamplingParams, ids: list[int], logprobs: list[float], rank: int) -> Draw:
    """A draw with what a device reports of others beside it."""
    count = len(_others(sampling)) or sampling.logprobs
    top = list(zip(ids[:count], logprobs[:count], strict=True))
    if sampling.logprob_token_ids:
        top = [(draw.token, draw.logprob), *(entry for entry in top if entry[0] != draw.token)]
    elif top[-1][0] < 0:  # fewer are open
        top = [entry for entry in top if entry[0] >= 0]
    return Draw(draw.token, draw.logprob, top, rank)


def draws_of(drawn: Drawn, start: int = 0) -> list[Draw]:
    """Draws one by one, from `start` on, of what was drawn in columns."""
    tokens, logprobs, finite = (column[start:].tolist() for column in drawn[:3])
    closed = [False] * len(tokens) if drawn.closed is None else drawn.closed[start:].tolist()
    return [
        Draw(token, logprob) if sound else ALL_MASKED if masked else BROKEN
        for token, logprob, sound, masked in zip(tokens, logprobs, finite, closed, strict=True)
    ]


def _numbers(picks: Sequence[Pick], purpose: int = 0) -> Float64:
    return uniforms([p.seed for p in picks], [p.sample for p in picks], [p.position for p in picks], purpose)


def is_finite(row: Float32) -> bool:
    """Whether all logits of a row [vocab] are numbers."""
    return bool(np.isfinite(row.max()) and np.isfinite(row.min()))


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the most likely id is taken, and none is drawn."""
    return sampling.temperature < _COLD


def inverse_temperature(sampling: SamplingParams) -> float:
    """What logits are multiplied by before the softmax; 1 where the most likely id is taken."""
    return 1.0 if is_greedy(sampling) else 1.0 / sampling.temperature


def rank_of(row: Float32, token: int) -> int:
    """How many logits of a row [vocab] are larger than the token's, plus one: 1 = the most likely."""
    return int(np.count_nonzero(row > row[token])) + 1

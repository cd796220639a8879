"""What a step costs, learned from the steps that ran, so that a chunk of a prompt ends when its time is up.

A token costs its products with the weights, and more the more cells (keys and values of tokens before it) it attends
to: 64 tokens of a chunk that begins at position 60,000 may take as long as 1,000 at position 0. Both rates are fitted
to the last steps at each order of magnitude of context, by least squares of the relative error: a step that was held
up counts for little, and short ones for less than long ones.
"""

import math

LEAST = 16
"""Tokens of a prompt that a step takes whatever they cost: the kernels compute so many at once."""
FIRST = 64
"""Tokens of a step while nothing is known."""
COARSE = 64
"""A longer chunk that is cut is cut to a multiple of this: the engine records a program for every size."""
_NEWEST = 0.5
"""Weight of a new step beside those before it of the same order of magnitude."""
_FADED = 0.9
"""Weight that is left of what was seen elsewhere: it tells of lengths that have not come since, of speed the newest."""


class Pace:
    """Seconds of a step by its tokens and the cells that they attend to. bound_s: of a step; infinite: none."""

    def __init__(self, bound_s: float = math.inf) -> None:
        self.bound_s = bound_s
        # log2 of cells per token -> tokens per second, cells per second, weight
        self._seen: dict[int, tuple[float, float, float]] = {}
        self._token_s = self._cell_s = 0.0

    def budget(self, tokens: int) -> int:
        """Tokens for a step that may take so many at most."""
        return tokens if self._seen or math.isinf(self.bound_s) else min(tokens, FIRST)

    def ran(self, tokens: int, cells: float, seconds: float) -> None:
        """A step of so many tokens, mostly of prompts, which attended to so many cells in all, took so long."""
        if tokens < LEAST or seconds <= 0.0 or math.isinf(self.bound_s):
            return  # so few tokens wait for the weights, whatever they compute
        self._seen = {key: (t, c, weight * _FADED) for key, (t, c, weight) in self._seen.items()}
        key = int(math.log2(1 + cells / tokens))
        new = tokens / seconds, cells / seconds, min(seconds, self.bound_s)
        tokens_rate, cells_rate, weight = (
            old + (now - old) * _NEWEST for old, now in zip(self._seen.get(key, new), new, strict=True)
        )
        self._seen[key] = tokens_rate, cells_rate, weight
        self._fit()

    def cost(self, length: int, start: int) -> float:
        """Seconds that `length` tokens from position `start` on take; 0 while nothing is known."""
        return self.cost_of(length, attended(length, start))

    def cost_of(self, tokens: int, cells: float) -> float:
        """Seconds that tokens take which attend to so many cells in all; 0 while nothing is known."""
        return self._token_s * tokens + self._cell_s * cells

    def fitting(self, length: int, start: int, left_s: float) -> int:
        """How many of `length` tokens from position `start` on fit into so much time: all, or a round number."""
        if self.cost(length, start) <= left_s:
            return length
        if left_s <= 0.0:
            return 0
        # The positive root of cell_s / 2 * n^2 + slope * n = left_s.
        slope = self._token_s + self._cell_s * start
        most = int(2 * left_s / (slope + math.sqrt(slope * slope + 2 * self._cell_s * left_s)))
        unit = COARSE if most >= COARSE else LEAST
        return min(length, most // unit * unit)

    def _fit(self) -> None:
        """Weighted least squares of token_s * tokens + cell_s * cells = 1 (second), neither rate below zero."""
        tt = tc = cc = t = c = 0.0
        for tokens, cells, weight in self._seen.values():
            tt, tc, cc = tt + weight * tokens * tokens, tc + weight * tokens * cells, cc + weight * cells * cells
            t, c = t + weight * tokens, c + weight * cells
        determinant = tt * cc - tc * tc
        if determinant > 1e-9 * tt * cc:
            token_s, cell_s = (t * cc - c * tc) / determinant, (c * tt - t * tc) / determinant
            if token_s >= 0.0 and cell_s >= 0.0:
                self._token_s, self._cell_s = token_s, cell_s
                return
        # All of it is of tokens, or all of cells, whichever says more of what was seen.
        if t * t / tt >= c * c / cc:
            self._token_s, self._cell_s = t / tt, 0.0
        else:
            self._token_s, self._cell_s = 0.0, c / cc


def attended(length: int, start: int) -> float:
    """Cells that `length` tokens from position `start` on attend to, in all."""
    return length * (start + (length + 1) / 2)

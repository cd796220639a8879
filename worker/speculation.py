"""Exact speculative sampling: a token drawn from a draft's distribution is kept or replaced so that what comes out is
distributed as if it had been drawn from the model's (Leviathan et al., ICML 2023; Chen et al., arXiv:2302.01318).

The draft q proposes x. It is kept with probability min(1, p(x) / q(x)); otherwise the token is drawn from what p has
more than q, max(0, p - q). Whatever q is, and whichever weights made it, the result follows p.
"""

from typing import NamedTuple

import numpy as np

from worker.engine.base import Float64
from worker.softmax import locate

DRAFT, ACCEPT, REPLACE = 1, 2, 3
"""Purposes of random numbers (`random_streams.uniforms`) beside 0, which is a plain draw: to draft, to accept, to
replace.
"""


class Proposal(NamedTuple):
    """What a draft says the next token is. token: None = it could not say. shares: [vocab] q; None = it is certain."""

    token: int | None
    shares: Float64 | None = None


def judged(target: Float64, proposal: Proposal, accept: float, replace: Float64) -> tuple[int, bool]:
    """The token, and whether it is the proposed one. target: [vocab] p, sums to 1. accept, replace [1]: in [0, 1)."""
    token = proposal.token
    assert token is not None
    assert proposal.shares is not None
    if accept * proposal.shares[token] < target[token]:
        return token, True
    rest = np.maximum(target - proposal.shares, 0.0)
    if not rest.any():  # equal but for rounding
        return token, True
    return int(locate(rest[None], replace)[0][0]), False

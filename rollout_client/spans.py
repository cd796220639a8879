"""Which weights made a token, and what it was sampled from: version spans, and what can be read from them.

Positions count prompt and output together: of a prompt of P tokens, output token t is position P + t. It was sampled
from the keys and values of positions [0, P + t), which need not all be of its own version: an update may keep a
sequence's cache. Position p >= P - 1 belongs to the version of the token sampled from it, output token p - P + 1, and
the prompt to that of the first token; unless a span that is `recomputed` begins later, at or before t: then all
positions before that span belong to its version.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec


class Span(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled under this weight version, and this one of the adapter (None = none).

    recomputed: before the first of them was sampled, the keys and values of all earlier positions, the prompt's
    included, were computed again under this version.
    """

    version: int
    start: int
    end: int
    recomputed: bool = False
    adapter_version: int | None = None


class ForwardPass(msgspec.Struct, frozen=True):
    """One pass over (prompt + output)[:len(versions)] derives the logprobs of output tokens [start, end).

    versions[p]: whose weights compute position p, and so its keys and values. The row of position P + t - 1 is that of
    token t. adapter_versions[p]: likewise of the adapter; [] = there is none.
    """

    start: int
    end: int
    versions: list[int]
    adapter_versions: list[int | None] = []


def forward_passes(spans: Sequence[Span], prompt_length: int) -> list[ForwardPass]:
    """The passes that derive every token of an output again: one, and another for each recomputed span.

    spans: all of an output, as a reply or the last event of a stream has them. prompt_length: P >= 1, in tokens.
    Raises ValueError when they do not cover [0, n) in order, or the prompt is empty.
    """
    if prompt_length < 1:
        raise ValueError("a prompt has at least one token")
    if [span.start for span in spans] != [0, *(span.end for span in spans)][: len(spans)]:
        raise ValueError(f"spans do not adjoin: {list(spans)}")
    made_by = [span.version for span in spans for _ in range(span.start, span.end)]
    adapted_by = [span.adapter_version for span in spans for _ in range(span.start, span.end)]
    begins = [0, *(span.start for span in spans if span.recomputed and span.start), len(made_by)]
    return [
        ForwardPass(
            start,
            end,
            [made_by[start]] * (prompt_length - 1 + start) + made_by[start:end],
            [adapted_by[start]] * (prompt_length - 1 + start) + adapted_by[start:end]
            if adapted_by[start] is not None
            else [],
        )
        for start, end in pairwise(begins)
        if start < end
    ]


def computed_by(spans: Sequence[Span], prompt_length: int, *, position: int, token: int) -> int:
    """Which version computed position `position` when output token `token` was sampled.

    Raises IndexError where there is no such token, or the position comes after what it was sampled from.
    """
    for one in forward_passes(spans, prompt_length):
        if one.start <= token < one.end and 0 <= position < prompt_length + token:
            return one.versions[position]
    raise IndexError(f"output token {token} was not sampled from a position {position}")

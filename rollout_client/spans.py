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
    included, were computed again under this version. digest, adapter_digest: of the bytes of each, as `PushReport` has
    it of their push: a number may have stood for other weights before (a rollback, force, another run). "" = none; or a
    service that does not say it.
    """

    version: int
    start: int
    end: int
    recomputed: bool = False
    adapter_version: int | None = None
    digest: str = ""
    adapter_digest: str = ""


class ForwardPass(msgspec.Struct, frozen=True):
    """One pass over (prompt + output)[:len(versions)] derives the logprobs of output tokens [start, end).

    versions[p]: whose weights compute position p, and so its keys and values. The row of position P + t - 1 is that of
    token t. adapter_versions[p]: likewise of the adapter; [] = there is none. digests[p], adapter_digests[p]: their
    bytes.
    """

    start: int
    end: int
    versions: list[int]
    adapter_versions: list[int | None] = []
    digests: list[str] = []
    adapter_digests: list[str] = []


def forward_passes(spans: Sequence[Span], prompt_length: int) -> list[ForwardPass]:
    """The passes that derive every token of an output again: one, and another for each recomputed span.

    spans: all of an output, as a reply or the last event of a stream has them. prompt_length: P >= 1, in tokens.
    Raises ValueError when they do not cover [0, n) in order, or the prompt is empty.
    """
    if prompt_length < 1:
        raise ValueError("a prompt has at least one token")
    if [span.start for span in spans] != [0, *(span.end for span in spans)][: len(spans)]:
        raise ValueError(f"spans do not adjoin: {list(spans)}")
    made_by = [span for span in spans for _ in range(span.start, span.end)]
    begins = [0, *(span.start for span in spans if span.recomputed and span.start), len(made_by)]
    passes = []
    for start, end in pairwise(begins):
        if start < end:
            by = [made_by[start]] * (prompt_length - 1 + start) + made_by[start:end]
            adapted = by if made_by[start].adapter_version is not None else []
            passes.append(
                ForwardPass(
                    *(start, end),
                    versions=[span.version for span in by],
                    adapter_versions=[span.adapter_version for span in adapted],
                    digests=[span.digest for span in by],
                    adapter_digests=[span.adapter_digest for span in adapted],
                )
            )
    return passes


def computed_by(spans: Sequence[Span], prompt_length: int, *, position: int, token: int) -> int:
    """Which version computed position `position` when output token `token` was sampled; its bytes `forward_passes` has.

    Raises IndexError where there is no such token, or the position comes after what it was sampled from.
    """
    for one in forward_passes(spans, prompt_length):
        if one.start <= token < one.end and 0 <= position < prompt_length + token:
            return one.versions[position]
    raise IndexError(f"output token {token} was not sampled from a position {position}")

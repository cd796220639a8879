"""What one step gave to sequences that are streamed: a token each, kept in columns until it is known who reads them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from worker.engine.base import Int32
from worker.inverse_cdf import Float64
from worker.messages import Chunk, Chunks, Tokens
from worker.sequence import Sequence


@dataclass(frozen=True)
class Line:
    """One more token of each sequence, of the weights that made the one before it. tokens, logprobs, lengths: [R].

    lengths: output tokens, this one among them. roster: a number that only lines of the same sequences share.
    """

    roster: int
    sequences: list[Sequence]
    tokens: Int32
    logprobs: Float64
    lengths: Int32

    def chunks(self) -> list[Chunk]:
        """The same as one chunk a sequence."""
        return [
            sequence.chunk_of(token, logprob, length)
            for sequence, token, logprob, length in zip(
                self.sequences, self.tokens.tolist(), self.logprobs.tolist(), self.lengths.tolist(), strict=True
            )
        ]


class Telling:
    """Makes messages of what a tick produced. Each connection is told who the columns are of when that changes."""

    def __init__(self) -> None:
        self._rosters: dict[bytes, int] = {}  # the last that each connection was told

    def messages(self, origin: bytes, items: Iterable[Chunk | Line]) -> Iterator[Chunks | Tokens]:
        """For one connection, in the order in which it happened."""
        chunks: list[Chunk] = []
        for item in items:
            if isinstance(item, Chunk):
                chunks.append(item)
                continue
            if chunks:
                yield Chunks(chunks)
                chunks = []
            yield self._tokens(origin, item)
        if chunks:
            yield Chunks(chunks)

    def forget(self, origin: bytes) -> None:
        """That connection is gone."""
        self._rosters.pop(origin, None)

    def _tokens(self, origin: bytes, line: Line) -> Tokens:
        known = self._rosters.get(origin) == line.roster
        self._rosters[origin] = line.roster
        return Tokens(
            line.tokens.astype("<i4", copy=False).tobytes(),
            line.logprobs.astype("<f8", copy=False).tobytes(),
            None if known else [(s.request.request_id, s.index) for s in line.sequences],
        )

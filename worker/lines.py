"""What one step gave to sequences that are streamed: a token each, kept in columns until it is known who reads them."""

from dataclasses import dataclass

from worker.engine.base import Int32
from worker.inverse_cdf import Float64
from worker.messages import Chunk
from worker.sequence import Sequence


@dataclass(frozen=True)
class Line:
    """One more token of each sequence, of the weights that made the one before it. tokens, logprobs, lengths: [R].

    lengths: output tokens, this one among them. The list of sequences is the same object as long as they are the same.
    """

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

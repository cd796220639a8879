"""Text of sampled ids, whole or as it comes. Ids are the truth; text is derived from them, never the other way.

The worker decides where a sequence ends; its last token is the one that completed the stop. So a stop
string is cut where it ends in the text of the last token, not at an earlier place (min_tokens may have
let one pass), and a stop token loses its text unless the caller wants it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.messages import Chunk, FinishReason
from worker.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextOptions:
    """How one request wants its text."""

    skip_special_tokens: bool = True
    include_stop: bool = False
    stop: tuple[str, ...] = ()


def final_text(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    finish: FinishReason | None,
    stop_reason: int | str | None,
    options: TextOptions,
) -> str:
    """Text of a finished sequence."""
    skip = options.skip_special_tokens
    if finish != "stop" or not ids:
        return tokenizer.decode(ids, skip)
    if not isinstance(stop_reason, str):
        return tokenizer.decode(ids if options.include_stop else ids[:-1], skip)
    text = tokenizer.decode(ids, skip)
    # Replacement characters stand for a character that the last token finished.
    before = len(tokenizer.decode(ids[:-1], skip).rstrip("\ufffd"))
    at = text.find(stop_reason, max(0, before - len(stop_reason) + 1))
    if at < 0:
        return text
    return text[: at + len(stop_reason)] if options.include_stop else text[:at]


class StreamedText:
    """Text of one sequence as its chunks come; the pieces join to exactly `final_text`."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._decoder = tokenizer.stream(options.skip_special_tokens)
        self._ids: list[int] = []
        self._pending = ""  # decoded, not given out: it may be the beginning of a stop string
        self._given = 0  # characters given out

    def push(self, chunk: Chunk) -> str:
        """The text this chunk adds; what may yet turn out to be a stop string waits."""
        self._ids += chunk.token_ids
        if chunk.finish is not None:
            text = final_text(self._tokenizer, self._ids, chunk.finish, chunk.stop_reason, self._options)
            return text[self._given :]
        for token_id in chunk.token_ids:
            self._pending += self._decoder.push(token_id)
        safe = len(self._pending) - _held_back(self._pending, self._options.stop)
        piece, self._pending = self._pending[:safe], self._pending[safe:]
        self._given += safe
        return piece


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins one of the stop strings."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop), len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest

"""Text of sampled ids, whole or as it comes. Ids are the truth; text is derived from them, never the other way.

The worker decides where a sequence ends; its last token is the one that completed the stop. So a stop
string is cut where it ends in the text of the last token, not at an earlier place (min_tokens may have
let one pass), and a stop token loses its text unless the caller wants it. Where a grammar lets nothing follow and the
sequence has no end token to say so, the last token is its output's like any other. Stop strings are looked for in
the text with special tokens, as the worker does, also where the caller sees it without.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from api.reading.parts import held_back
from worker.messages import FinishReason
from worker.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextOptions:
    """How one request wants its text."""

    skip_special_tokens: bool = True
    include_stop: bool = False
    stop: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()
    """Special tokens that are not skipped."""


def final_text(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    finish: FinishReason | None,
    stop_reason: int | str | None,
    options: TextOptions,
) -> str:
    """Text of a finished sequence."""
    if finish == "stop" and isinstance(stop_reason, str):
        return StreamedText(tokenizer, options).push(ids, finish, stop_reason)
    shown = ids[:-1] if _is_end(ids, finish, stop_reason, tokenizer) and not options.include_stop else ids
    return tokenizer.decode(shown, options.skip_special_tokens)


def _is_end(
    ids: Sequence[int], finish: FinishReason | None, stop_reason: int | str | None, tokenizer: Tokenizer
) -> bool:
    """Whether the last token is there to end the sequence, and nothing else."""
    return finish == "stop" and bool(ids) and ids[-1] in (tokenizer.ends if stop_reason is None else (stop_reason,))


class StreamedText:
    """Text of one sequence as its tokens come; the pieces join to exactly `final_text`."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._plain = not options.stop
        self._shown = tokenizer.stream(skip_special=options.skip_special_tokens, kept=options.kept)
        self._full = tokenizer.stream(skip_special=False) if options.stop and options.skip_special_tokens else None
        self._waiting: deque[tuple[str, str]] = deque()  # of each token: its text, and what the caller sees of that

    def push(self, ids: Sequence[int], finish: FinishReason | None = None, stop_reason: int | str | None = None) -> str:
        """The text that further tokens add; what may yet turn out to be a stop string waits."""
        if finish is None and self._plain:
            return self._shown.push(ids[0]) if len(ids) == 1 else "".join(map(self._shown.push, ids))
        if _is_end(ids, finish, stop_reason, self._tokenizer) and not self._options.include_stop:
            ids = ids[:-1]
        if self._plain and not isinstance(stop_reason, str):
            return "".join(map(self._shown.push, ids)) + self._shown.finish()
        for token_id in ids:
            shown = self._shown.push(token_id)
            self._waiting.append((shown if self._full is None else self._full.push(token_id), shown))
        text = "".join(text for text, _ in self._waiting)
        if finish is None:
            return self._take(len(text) - held_back(text, self._options.stop))
        if finish == "stop" and isinstance(stop_reason, str) and self._waiting:
            before = len(text) - len(self._waiting[-1][0])
            at = text.find(stop_reason, max(0, before - len(stop_reason) + 1))
            if at >= 0:
                return self._take(at + len(stop_reason) if self._options.include_stop else at)
        rest = "".join(shown for _, shown in self._waiting)
        self._waiting.clear()
        return rest + self._shown.finish()

    @property
    def at_rest(self) -> bool:
        """Whether a token that is whole adds its own text, and changes nothing for those after it."""
        return self._plain and self._shown.at_rest

    def _take(self, count: int) -> str:
        """What the caller sees of the next `count` characters."""
        taken = []
        while count and self._waiting:
            text, shown = self._waiting.popleft()
            left = len(text) - count
            if left > 0:
                cut = max(0, len(shown) - left)
                self._waiting.appendleft((text[count:], shown[cut:]))
                shown = shown[:cut]
            taken.append(shown)
            count = max(0, -left)
        return "".join(taken)

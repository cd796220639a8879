"""When a sequence is done: stop ids, stop strings across token boundaries, and the length."""

from worker.detokenizer import TextStream
from worker.messages import FinishReason, SamplingParams

Ending = tuple[FinishReason, int | str | None]
"""Finish reason, and the stop id or string behind it."""


class StopRules:
    """Shared by the n sequences of a request. limit: most tokens each may have."""

    def __init__(self, sampling: SamplingParams, eos_token_ids: tuple[int, ...], limit: int) -> None:
        self.eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self.ids = frozenset(sampling.stop_token_ids)
        self.strings = [text for text in sampling.stop if text]
        self.overlap = max((len(text) for text in self.strings), default=1) - 1
        self.min_tokens = sampling.min_tokens
        self.limit = limit


class StopCheck:
    """The progress of one sequence against its rules. stream: needed when there are stop strings."""

    def __init__(self, rules: StopRules, stream: TextStream | None) -> None:
        self._rules = rules
        self._stream = stream
        self._tail = ""

    def after(self, token: int, length: int) -> Ending | None:
        """What token number `length` (from 1) ends the sequence with, if anything. Call once per token."""
        rules = self._rules
        string = self._string_ended_by(token) if rules.strings else None
        if length >= rules.min_tokens:
            if token in rules.ids:
                return "stop", token
            if token in rules.eos:
                return "stop", None
            if string is not None:
                return "stop", string
        return ("length", None) if length >= rules.limit else None

    def _string_ended_by(self, token: int) -> str | None:
        assert self._stream is not None
        piece = self._stream.push(token)
        if not piece:
            return None
        text = self._tail + piece  # the tail is shorter than any match, so a match ends inside the piece
        self._tail = text[-self._rules.overlap :] if self._rules.overlap else ""
        found = [(at, string) for string in self._rules.strings if (at := text.find(string)) >= 0]
        return min(found, key=lambda match: match[0])[1] if found else None

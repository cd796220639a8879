"""Reasoning that a model writes between marks before its answer."""

from typing import NamedTuple

from api.reading.parts import held_back

BEGIN, END = "<think>", "</think>"


class Split(NamedTuple):
    """What of a piece of text is reasoning, and what is content."""

    reasoning: str
    answer: str


class Thinking:
    """Splits a text as it comes. opened: the prompt ended with the first mark. Spaces next to the marks are theirs.

    What does not begin with the mark is all answer; what never ends is all reasoning.
    """

    def __init__(self, *, opened: bool) -> None:
        self._state = "spaces" if opened else "start"  # start, spaces (after the mark), thinking, after, answer
        self._text = ""

    def push(self, text: str) -> Split:
        """More of the text; what may yet be a mark waits."""
        if self._state == "answer":
            return Split("", text)
        self._text += text
        if self._state == "start":
            begun = self._text.lstrip()
            if not begun or (BEGIN.startswith(begun) and begun != BEGIN):
                return Split("", "")
            if not begun.startswith(BEGIN):
                return self._answer(self._text)
            self._state, self._text = "spaces", begun[len(BEGIN) :]
        if self._state == "spaces":
            self._text = self._text.lstrip()
            if not self._text:
                return Split("", "")
            self._state = "thinking"
        reasoning = ""
        if self._state == "thinking":
            at = self._text.find(END)
            if at < 0:
                kept = self._text[: len(self._text) - held_back(self._text, (END,))].rstrip()
                self._text = self._text[len(kept) :]
                return Split(kept, "")
            reasoning = self._text[:at].rstrip()
            self._state, self._text = "after", self._text[at + len(END) :]
        begun = self._text.lstrip()
        return Split(reasoning, self._answer(begun).answer if begun else "")

    def finish(self) -> Split:
        """The text has ended: what waited to be told apart."""
        text, self._text = self._text, ""
        if self._state == "thinking":
            return Split(text.rstrip(), "")
        return Split("", text if self._state == "start" else "")

    def _answer(self, text: str) -> Split:
        self._state, self._text = "answer", ""
        return Split("", text)


def opened_by(prompt: str, *, continued: bool) -> bool:
    """Whether output goes on inside reasoning. continued: the prompt ends inside a message, which may hold some."""
    if continued:
        return prompt.rfind(BEGIN) > prompt.rfind(END)
    return prompt.rstrip().endswith(BEGIN)

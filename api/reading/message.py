"""The message of one sequence, as its tokens come: reasoning, content, and calls of tools."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from api.reading.calls import Reader
from api.reading.parts import Call, Content, Part
from api.reading.thinking import Thinking
from api.text import StreamedText
from worker.messages import FinishReason


@dataclass(frozen=True)
class Reading:
    """What of a text is read out. The default: nothing, all of it is content.

    calls: makes a reader of the format. opened: None = reasoning is not looked for; True = output begins inside it.
    show_reasoning: else it is left out. at_once: it is shown when it has ended. most_calls: later ones are left out.
    """

    calls: Callable[[], Reader] | None = None
    opened: bool | None = None
    show_reasoning: bool = True
    at_once: bool = False
    most_calls: int | None = None

    @property
    def anything(self) -> bool:
        """Whether a message is more than its content."""
        return self.calls is not None or self.opened is not None


class MessageStream:
    """One sequence. calls: how many of its calls have been told."""

    def __init__(self, reading: Reading, text: StreamedText) -> None:
        self.calls = 0
        self._reading = reading
        self._text = text
        self._thinking = None if reading.opened is None else Thinking(opened=reading.opened)
        self._reader = None if reading.calls is None else reading.calls()
        self._found = 0  # calls, with those that are left out
        self._reasoning = ""  # not shown yet

    def push(
        self, ids: Sequence[int], finish: FinishReason | None = None, stop_reason: int | str | None = None
    ) -> dict[str, Any]:
        """The delta that further tokens add, as OpenAI has it; reasoning under vLLM's and SGLang's name for it."""
        text, reasoning = self._text.push(ids, finish, stop_reason), ""
        if self._thinking is not None:
            reasoning, text = self._thinking.push(text)
            if finish is not None:
                more = self._thinking.finish()
                reasoning, text = reasoning + more.reasoning, text + more.answer
        parts: list[Part] = [Content(text)] if text else []
        if self._reader is not None:
            parts = self._reader.push(text) + (self._reader.finish() if finish is not None else [])
        delta = self._delta(parts)
        self._reasoning += reasoning
        due = not self._reading.at_once or parts or finish is not None
        if self._reading.show_reasoning and self._reasoning and due:
            delta |= {"reasoning": self._reasoning, "reasoning_content": self._reasoning}
            self._reasoning = ""
        return delta

    @property
    def at_rest(self) -> bool:
        """Whether a token that is whole adds its own text to the content, and changes nothing for those after it."""
        return not self._reading.anything and self._text.at_rest

    def _delta(self, parts: list[Part]) -> dict[str, Any]:
        content = ""
        calls: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, Content):
                content += part.text
            elif isinstance(part, Call):
                self._found += 1
                if self._told:
                    self.calls += 1
                    about = {"index": self.calls - 1, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                    calls.append(about | {"function": {"name": part.name, "arguments": ""}})
            elif self._told and calls and calls[-1]["index"] == self.calls - 1:
                calls[-1]["function"]["arguments"] += part.text
            elif self._told:
                calls.append({"index": self.calls - 1, "function": {"arguments": part.text}})
        return ({"content": content} if content or not self._reading.anything else {}) | (
            {"tool_calls": calls} if calls else {}
        )

    @property
    def _told(self) -> bool:
        most = self._reading.most_calls
        return most is None or self._found <= most


def whole_message(
    reading: Reading,
    text: StreamedText,
    ids: Sequence[int],
    finish: FinishReason | None,
    stop_reason: int | str | None,
) -> dict[str, Any]:
    """What the deltas of a finished sequence add up to. content is None where something else was said instead."""
    delta = MessageStream(reading, text).push(ids, finish, stop_reason)
    calls = [{key: value for key, value in call.items() if key != "index"} for call in delta.pop("tool_calls", [])]
    message = {"role": "assistant", "content": None if calls or "reasoning" in delta else ""} | delta
    return message | ({"tool_calls": calls} if calls else {})

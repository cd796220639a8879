"""Conversations as clients send them -> as chat templates expect them, the way vLLM reads them.

Clients send what they got: an assistant's message that only calls tools has no content, calls have their arguments as a
JSON string, reasoning has one of two names, fields that say nothing are null. Templates were written for content that
is there, arguments that are a mapping, and either text or a list of parts as content; what a tool said is always text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_TEXT_OF = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of content parts, and the key of their text."""


def read(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Every message with content, a text or a list of {"type": "text", "text": ...}, and with decoded arguments.

    Arguments that are no JSON, as a model may have written them, are none: or no turn could follow. Reading what was
    read changes nothing. Raises ValueError naming the message.
    """
    return [_message(i, message) for i, message in enumerate(messages)]


def shaped(messages: Sequence[Message], *, as_parts: bool) -> list[Message]:
    """What `read` gave, with all content as lists of parts, or all as text (parts on lines of their own)."""
    return [
        message | {"content": _shaped(message["content"], as_parts and message.get("role") != "tool")}
        for message in messages
    ]


def text_of(content: str | list[dict[str, str]]) -> str:
    """The text of a content."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _shaped(content: str | list[dict[str, str]], as_parts: bool) -> str | list[dict[str, str]]:
    if not as_parts:
        return text_of(content)
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _message(i: int, message: Mapping[str, Any]) -> Message:
    found = {key: value for key, value in message.items() if value is not None}
    content = found.get("content", "")
    if isinstance(content, list):
        content = [_part(i, part) for part in content]
    elif not isinstance(content, str):
        raise ValueError(f"message {i}: content is a text, a list of parts or null, not {type(content).__name__}")
    found["content"] = content
    reasoning = found.get("reasoning", found.get("reasoning_content"))
    if reasoning is not None:
        found["reasoning"] = found["reasoning_content"] = reasoning
    calls = found.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise ValueError(f"message {i}: tool_calls is a list")
        found["tool_calls"] = [_call(i, n, call) for n, call in enumerate(calls)]
    return found


def _part(i: int, part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict):
        text = part.get(_TEXT_OF.get(part.get("type", "text"), ""))
        if isinstance(text, str):
            return {"type": "text", "text": text}
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"message {i}: only text content is supported, not {kind!r}")


def _call(i: int, n: int, call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"message {i}: tool call {n} has no function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    elif not isinstance(arguments, dict | list):
        raise ValueError(f"message {i}: the arguments of tool call {n} are a JSON string or an object")
    return call | {"function": function | {"arguments": arguments}}

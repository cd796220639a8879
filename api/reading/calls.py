"""The formats in which models write calls of tools, each read as it comes; and which one a checkpoint writes.

A call that breaks off (length, abort) or whose arguments are no JSON is still given out, with what there is of its
arguments. What only looks like a call, having no name, is content as it was written. Spaces and newlines between calls,
and between calls and content, belong to neither.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from api.reading.json_call import JsonCall
from api.reading.names import ToolFormat
from api.reading.parts import Arguments, Call, Content, Part, first_of, held_back


class Reader(Protocol):
    """Reads one text."""

    def push(self, text: str) -> list[Part]:
        """What more of the text says; what may yet turn out to be a mark waits."""
        ...

    def finish(self) -> list[Part]:
        """What waited. Nothing may be pushed after it."""
        ...


class _Spacing:
    """Content without the spaces around calls; without calls, as it is."""

    def __init__(self) -> None:
        self._waiting = ""
        self._after_call = False

    def content(self, text: str) -> list[Part]:
        text = self._waiting + text
        if self._after_call:
            text = text.lstrip()
            if not text:
                self._waiting = ""
                return []
            self._after_call = False
        shown = text.rstrip()
        self._waiting = text[len(shown) :]
        return [Content(shown)] if shown else []

    def call(self) -> None:
        self._waiting, self._after_call = "", True

    def finish(self) -> list[Part]:
        return [Content(self._waiting)] if self._waiting else []


class TaggedJson:
    """Calls as JSON between marks, among content: Hermes, Qwen 2.5 and 3, ERNIE. dropped: marks that say nothing."""

    def __init__(self, begin: str = "<tool_call>", end: str = "</tool_call>", dropped: tuple[str, ...] = ()) -> None:
        self._begin = begin
        self._marks = (begin, end, *dropped)
        self._text = ""
        self._call: JsonCall | None = None
        self._closes = False  # an end that comes is that of a call
        self._end = end
        self._spacing = _Spacing()

    def push(self, text: str) -> list[Part]:
        """See Reader."""
        self._text += text
        parts: list[Part] = []
        while True:
            if self._call is not None:
                parts += self._inside(self._call)
                if not self._call.done:
                    return parts
                parts += self._leave(self._call)
                continue
            at, mark = first_of(self._text, self._marks)
            if not mark:
                kept = len(self._text) - held_back(self._text, self._marks)
                parts += self._spacing.content(self._text[:kept])
                self._text = self._text[kept:]
                return parts
            parts += self._spacing.content(self._text[:at])
            self._text = self._text[at + len(mark) :]
            if mark == self._begin:
                self._call = JsonCall()
            elif mark == self._end and not self._closes:
                parts += self._spacing.content(mark)
            self._closes = False

    def finish(self) -> list[Part]:
        """See Reader."""
        parts: list[Part] = []
        if self._call is not None:
            self._call.finish()
            parts += self._leave(self._call)
        parts += self._spacing.content(self._text)
        return parts + self._spacing.finish()

    def _inside(self, call: JsonCall) -> list[Part]:
        text, self._text = self._text, ""
        known = call.is_call
        parts = call.push(text)
        if call.is_call and not known:
            self._spacing.call()
        return parts

    def _leave(self, call: JsonCall) -> list[Part]:
        self._call, self._text, self._closes = None, call.rest, call.is_call
        return [] if call.is_call else self._spacing.content(self._begin)


class LlamaJson:
    """Llama 3's: the whole output is calls as JSON, one after another (; or , between them), perhaps after a mark."""

    MARK = "<|python_tag|>"

    def __init__(self) -> None:
        self._text = ""
        self._all_content = False
        self._called = False
        self._call: JsonCall | None = None
        self._skipped = ""  # before what may be a call: content again if it is none

    def push(self, text: str) -> list[Part]:
        """See Reader."""
        self._text += text
        parts: list[Part] = []
        while not self._all_content:
            if self._call is None:
                start = self._text.lstrip(" \n\r\t;," if self._called else None)
                if not start or (self.MARK.startswith(start) and start != self.MARK):
                    return parts
                if start.startswith(self.MARK):
                    self._text = start[len(self.MARK) :]
                    continue
                if not start.startswith("{"):
                    break
                self._skipped = self._text[: len(self._text) - len(start)]
                self._call, self._text = JsonCall(), start
            text, self._text = self._text, ""
            parts += self._call.push(text)
            if not self._call.done:
                return parts
            self._leave(self._call)
        self._all_content = True
        text, self._text = self._text, ""
        return [*parts, Content(text)] if text else parts

    def finish(self) -> list[Part]:
        """See Reader."""
        if self._call is not None:
            self._call.finish()
            self._leave(self._call)
        left = self._text if not self._called or self._all_content else self._text.strip(" \n\r\t;,")
        return [Content(left)] if left else []

    def _leave(self, call: JsonCall) -> None:
        self._call, self._text = None, call.rest if call.is_call else self._skipped + call.rest
        self._called = self._called or call.is_call
        self._all_content = not call.is_call


_FUNCTION = "<function="
_PARAMETER = "<parameter="
_FUNCTION_END = "</function>"
_PARAMETER_END = "</parameter>"
_LONGEST_MARK = len(_PARAMETER_END)


class QwenXml:
    """Qwen3-Coder's: a function with parameters as text between marks. tools: say what type a parameter has.

    Arguments come parameter by parameter; a value that is no JSON of its type is a string.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._types = {
            name: _properties(function)
            for tool in tools
            if (function := _function(tool))
            for name in [function["name"]]
        }
        self._text = ""
        self._awaited: tuple[str, ...] = ()  # without one of these, what is more of the text says nothing more
        self._new: list[str] = []  # of the text, meanwhile
        self._end_of_new = ""  # which may begin one of them
        self._name: str | None = None
        self._given = 0  # parameters
        self._opened = ""  # a <tool_call> that nothing but spaces has followed yet, and those
        self._closes = False  # a </tool_call> that comes is that of a call
        self._spacing = _Spacing()

    def push(self, text: str) -> list[Part]:
        """See Reader."""
        self._new.append(text)
        if self._awaited:
            text = self._end_of_new + text
            self._end_of_new = text[-_LONGEST_MARK:]
            if not first_of(text, self._awaited)[1]:
                return []
        self._take_new()
        parts: list[Part] = []
        while (more := self._step()) is not None:
            parts += more
        return parts

    def _take_new(self) -> None:
        self._text += "".join(self._new)
        self._new.clear()
        self._awaited, self._end_of_new = (), ""

    def _await(self, *marks: str) -> None:
        """See to nothing until one of these has come: a value is looked through once, and not with each token of it."""
        self._awaited, self._end_of_new = marks, self._text[-_LONGEST_MARK:]

    def finish(self) -> list[Part]:
        """See Reader."""
        if self._name is not None:
            return []  # the call broke off: what there is of a value is none yet
        self._take_new()
        parts = self._spacing.content(self._opened + self._text)
        return parts + self._spacing.finish()

    def _step(self) -> list[Part] | None:
        return self._outside() if self._name is None else self._inside()

    def _outside(self) -> list[Part] | None:
        marks = (_FUNCTION, "<tool_call>", "</tool_call>")
        at, mark = first_of(self._text, marks)
        if mark == _FUNCTION and (end := self._text.find(">", at)) < 0:
            parts = self._content(self._text[:at])
            self._text = self._text[at:]
            if not parts:
                self._await(">")
            return parts or None
        if not mark:
            kept = len(self._text) - held_back(self._text, marks)
            parts = self._content(self._text[:kept])
            self._text = self._text[kept:]
            return parts or None
        parts = self._content(self._text[:at])
        if mark != _FUNCTION:
            self._text = self._text[at + len(mark) :]
            parts += self._content_of_opened()
            if mark == "<tool_call>":
                self._opened = mark
            elif not self._closes:
                parts += self._spacing.content(mark)
            self._closes = False
            return parts
        self._name, self._given, self._opened = self._text[at + len(mark) : end].strip(), 0, ""
        self._text = self._text[end + 1 :]
        self._spacing.call()
        return [*parts, Call(self._name)]

    def _content(self, text: str) -> list[Part]:
        if self._opened and not text.strip():
            self._opened += text
            return []
        return self._content_of_opened() + self._spacing.content(text)

    def _content_of_opened(self) -> list[Part]:
        opened, self._opened = self._opened, ""
        return self._spacing.content(opened) if opened else []

    def _inside(self) -> list[Part] | None:
        assert self._name is not None
        marks = (_PARAMETER, _FUNCTION_END, "</tool_call>")
        at, mark = first_of(self._text, marks)
        if not mark:
            self._await(*marks)
            return None
        if mark != _PARAMETER:
            self._text = self._text[at + len(mark) :]
            self._name, self._closes = None, mark == _FUNCTION_END
            return [Arguments("}" if self._given else "{}")]
        named = self._text.find(">", at)
        if named < 0:
            self._await(">")
            return None
        ends = (_PARAMETER_END, _PARAMETER, _FUNCTION_END, "</tool_call>")
        until, end = first_of(self._text, ends, named + 1)
        if not end:
            self._await(*ends)
            return None
        name = self._text[at + len(_PARAMETER) : named].strip()
        value = self._text[named + 1 : until]
        after = until + (len(end) if end == _PARAMETER_END else 0)
        self._text = self._text[after:]
        self._given += 1
        written = (
            f"{json.dumps(name, ensure_ascii=False)}: {_as_json(value, self._types.get(self._name, {}).get(name))}"
        )
        return [Arguments(("{" if self._given == 1 else ", ") + written)]


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    function = tool.get("function")
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def _as_json(value: str, schema: Any) -> str:
    """A value as the model wrote it between its marks: a newline on each side is the format's."""
    value = value.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type", "") if isinstance(schema, dict) else "string"
    if kinds != "string":
        try:
            json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            lower = value.strip().lower()
            if lower in ("true", "false"):
                return lower
        else:
            return value.strip()
    return json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _ernie(tools: Sequence[Mapping[str, Any]]) -> Reader:
    return TaggedJson(dropped=("<response>", "</response>"))


FORMATS: dict[ToolFormat, Callable[[Sequence[Mapping[str, Any]]], Reader]] = {
    "hermes": lambda tools: TaggedJson(),
    "llama3_json": lambda tools: LlamaJson(),
    "qwen3_coder": QwenXml,
    "ernie45": _ernie,
}
MARKS = (
    *("<tool_call>", "</tool_call>", "<response>", "</response>", LlamaJson.MARK),
    *("<think>", "</think>"),
)
"""All that any reader looks for. Where they are special tokens they are seen all the same, though such are skipped."""


def format_of(template: str, model_type: str) -> ToolFormat:
    """The format that a checkpoint's chat template asks for; "hermes", which most use, where it says nothing."""
    if _FUNCTION in template:
        return "qwen3_coder"
    if model_type.startswith("ernie"):
        return "ernie45"
    if "<tool_call>" not in template and re.search(r'python_tag|"parameters"', template):
        return "llama3_json"
    return "hermes"

"""One call of a tool that is written as a JSON object: {"name": ..., "arguments": {...}}."""

import json
import re

from api.reading.parts import Arguments, Call, Part

_GAP = r"\s{0,16}"
_HEAD = re.compile(
    _GAP.join(
        (
            r"",
            r"\{",
            r'"name"',
            r":",
            r'("(?:[^"\\]|\\.){0,256}")',
            r",",
            r'"(?:arguments|parameters)"',
            r":",
            r"(?=\{)",
        )
    )
)
"""In this order the arguments can be given out as they come; else the call is given out once it is whole."""
_LONGEST_HEAD = 1024
"""Characters. A text that has no head in so many has none, and is not looked at again with each piece that comes."""


class JsonCall:
    """Reads it as it comes. `push` until `done`; then `rest` is what followed it, or all of it when it was no call.

    Arguments are given out exactly as they were written. An object that breaks off or goes wrong inside its arguments
    is a call with broken arguments, as it is for OpenAI's clients; one that goes wrong before is no call.
    """

    def __init__(self) -> None:
        self.done = False
        self.is_call = False
        self.rest = ""
        self._text = ""
        self._seen = 0  # of the text, when a head was last looked for
        self._scanned = 0
        self._told = 0  # of the text, once the arguments are known to begin there
        self._shown = False  # the arguments are through
        self._broken = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> list[Part]:
        """Take more of the text; what it adds to the call."""
        self._text += text
        parts: list[Part] = []
        head = None if self.is_call or self._seen > _LONGEST_HEAD else _HEAD.match(self._text)
        self._seen = len(self._text)
        if head is not None and isinstance(name := _decoded(head[1]), str):
            self._scan(head.end(), 0)
            self.is_call, self._told = True, head.end()
            parts.append(Call(name))
        if self.is_call and not self._shown:
            end = self._scan(len(self._text), 1)
            shown = self._text[self._told : end]
            self._told += len(shown)
            self._shown = end is not None
            parts += [Arguments(shown)] if shown else []
        if self._shown or not self.is_call:
            end = self._scanned if self._broken else self._scan(len(self._text), 0)
            if end is not None:
                parts += self._ended(end)
        return parts

    def finish(self) -> None:
        """The text has ended, whether the call has or not."""
        if not self.done:
            self.done = True
            self.rest = "" if self.is_call else self._text

    def _scan(self, until: int, depth: int) -> int | None:
        """Follow the nesting until it is this deep; where that was, or where the text went wrong."""
        for at in range(self._scanned, until):
            character = self._text[at]
            self._scanned = at + 1
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == "{":
                self._depth += 1
            elif character == "<" or (self._depth == 0 and not character.isspace()):
                self._broken, self._scanned = True, at  # a mark, or never JSON
                return at
            elif character == '"':
                self._in_string = True
            elif character == "[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= depth:
                    return at + 1
        return None

    def _ended(self, end: int) -> list[Part]:
        """The object ended there, or broke off."""
        self.done = True
        if self.is_call:
            self.rest = self._text[end:]
            return []
        return self._whole(end)

    def _whole(self, end: int) -> list[Part]:
        """An object in another order than the usual one, or no call."""
        written = _decoded(self._text[:end])
        if isinstance(written, dict) and isinstance(written.get("name"), str):
            arguments = written.get("arguments", written.get("parameters"))
            if isinstance(arguments, str) and isinstance(decoded := _decoded(arguments), dict):
                arguments = decoded
            if isinstance(arguments, dict) or arguments is None:
                self.is_call, self.rest = True, self._text[end:]
                return [Call(written["name"]), Arguments(json.dumps(arguments or {}, ensure_ascii=False))]
        self.rest = self._text
        return []


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

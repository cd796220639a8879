"""The grammar of calls in each format: what an answer is held to where tools have to be called.

It is written as the model would write it, so that what is sampled stays near to what it was trained on.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from api.constraint import Writer
from api.reading.names import ToolFormat

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def calls(write: Writer, form: ToolFormat, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """Calls of these tools, one or more."""
    made = [_WRITTEN[form](write, tool["function"]) for tool in tools]
    one = write.rule(" | ".join(made))
    between = write.quoted("; " if form == "llama3_json" else "\n")
    return write.rule(f"{one} ({between} {one})*" if several else one)


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] | None = function.get("parameters")
    return parameters or NO_ARGUMENTS


def _as_object(write: Writer, function: Mapping[str, Any], key: str) -> str:
    head = write.quoted(f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": ')
    return f'{head} {write.json(_parameters(function), closed=True)} "}}"'


def _hermes(write: Writer, function: Mapping[str, Any]) -> str:
    body = _as_object(write, function, "arguments")
    return f'{write.mark("<tool_call>")} "\\n" {body} "\\n" {write.mark("</tool_call>")}'


def _llama(write: Writer, function: Mapping[str, Any]) -> str:
    return _as_object(write, function, "parameters")


def _xml(write: Writer, function: Mapping[str, Any]) -> str:
    parameters = _parameters(function)
    properties, required = parameters.get("properties"), parameters.get("required")
    required = required if isinstance(required, list) else []
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    body = ""
    for name, schema in (properties if isinstance(properties, dict) else {}).items():
        if isinstance(schema, dict) and schema.get("type", "string") == "string" and "$ref" not in schema:
            value = _text(write, schema)
        else:
            own = {**schema, **shared} if isinstance(schema, dict) else schema
            value = f"{write.json(own, closed=True)} {write.quoted(_PARAMETER_END)}"
        parameter = f"{write.quoted(f'<parameter={name}>' + chr(10))} {value}"
        body += f"{parameter} " if name in required else f"({parameter})? "
    head, tail = write.quoted(f"<function={function['name']}>\n"), write.quoted("</function>\n")
    return f'{write.mark("<tool_call>")} "\\n" {head} {body}{tail} {write.mark("</tool_call>")}'


def _text(write: Writer, schema: Mapping[str, Any]) -> str:
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(map(write.quoted, choices))}) {write.quoted(_PARAMETER_END)}"
    return write.until(_PARAMETER_END)


_PARAMETER_END = "\n</parameter>\n"
_WRITTEN: dict[ToolFormat, Callable[[Writer, Mapping[str, Any]], str]] = {
    "hermes": _hermes,
    "ernie45": _hermes,
    "llama3_json": _llama,
    "qwen3_coder": _xml,
}

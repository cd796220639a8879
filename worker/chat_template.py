"""A checkpoint's chat template, rendered as the Hugging Face stack renders it, in a sandbox.

Templates come with checkpoints and with requests, so neither is trusted: they see immutable values and no Python.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def render(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, continue_final: bool
) -> str:
    """The prompt text. continue_final: end inside the last message, so that the model goes on with it.

    Raises ValueError for a template that does not parse, refuses these messages, or fails.
    """
    try:
        text = _compiled(template).render(messages=messages, **variables)
    except (jinja2.TemplateError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"chat template: {error}") from error
    return _cut_after_final(text, messages) if continue_final else text


def _cut_after_final(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    final = messages[-1].get("content") if messages else None
    if not isinstance(final, str):
        raise ValueError("continue_final_message: the last message has no text")
    at = text.rfind(final.strip())
    if at < 0:
        raise ValueError("continue_final_message: the template does not show the last message as it is")
    kept = final if text.startswith(final.lstrip(), at) else final.strip()
    return text[: at + len(kept.lstrip())]


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        autoescape=False,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)

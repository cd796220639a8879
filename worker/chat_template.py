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
import msgspec

from worker.conversation import shaped, text_of


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class Rendering(msgspec.Struct, frozen=True):
    """A prompt to be written. messages: as `conversation.read` gives them. variables: seen by the template.

    continue_final: end inside the last message, so that the model goes on with it.
    """

    template: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any] = {}
    continue_final: bool = False

    def text(self) -> str:
        """The prompt. Raises ValueError for a template that does not parse, refuses these messages, or fails."""
        try:
            compiled, as_parts = _compiled(self.template)
            text = compiled.render({**self.variables, "messages": shaped(self.messages, as_parts=as_parts)})
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise ValueError(f"chat template: {error}") from error
        return _cut_after_final(text, self.messages) if self.continue_final else text


_FAILURES = (TypeError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError)


def _cut_after_final(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    final = text_of(messages[-1]["content"]) if messages else ""
    if not final.strip():
        raise ValueError("continue_final_message: the last message has no text")
    at = text.rfind(final.strip())
    if at < 0:
        raise ValueError("continue_final_message: the template does not show the last message as it is")
    kept = final if text.startswith(final.lstrip(), at) else final.strip()
    return text[: at + len(kept.lstrip())]


@lru_cache(maxsize=64)
def _compiled(template: str) -> tuple[jinja2.Template, bool]:
    """The template, and whether it goes over the parts of a message's content."""
    environment = _environment()
    return environment.from_string(template), _iterates_content(environment.parse(template))


def _iterates_content(tree: jinja2.nodes.Template) -> bool:
    """Whether a loop goes over the content of a message: over `x.content`, or a variable that was set to one."""
    names: set[str] = set()
    for assignment in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assignment.target, jinja2.nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node, names: set[str]) -> bool:
    match node:
        case jinja2.nodes.Name(name=name):
            return name in names
        case jinja2.nodes.Getattr(attr="content") | jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Filter(node=jinja2.nodes.Expr() as filtered):
            return _is_content(filtered, names)
        case jinja2.nodes.Getitem(node=sliced, arg=jinja2.nodes.Slice()):
            return _is_content(sliced, names)
    return False


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

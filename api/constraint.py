"""What output is constrained to, in whatever words a request has for it -> one grammar, as replicas compile it.

A grammar is written for llguidance: JSON with a list of Lark grammars and JSON schemas, the first of which may name the
others. Whether it is one that can be followed is found out by the replica, whose answer becomes a 400; but that a
grammar in Lark has no end is found out here, as following it has none either.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from api.errors import BadInput
from api.grammar_ends import endless_rule
from weight_manager.processor_limit import OverLimit, processor_limit

MAX_CHARS = 1 << 18
"""Most characters of a grammar, all of it together."""
MAX_EBNF_CHARS = 1 << 14
"""Most characters of a grammar that is translated in this process."""
MAX_CHOICES = 4096
_TRANSLATION_S = 0.5
"""Processor time of one, in which nobody else is answered, and of looking for its end. The translator takes the square
of some texts' lengths."""
_LARK = re.compile(r"^[^\S\n]*+start\s*+(?:\[[^\]]{0,256}+\]\s*+)?:(?!:)", re.MULTILINE)
"""Possessive: a grammar is read once, whatever it is."""
Kind = Literal["json", "regex", "choice", "grammar", "tags"]


@dataclass(frozen=True)
class Constraint:
    """value: a JSON schema (object or true), a regular expression, texts to choose from, a grammar in Lark, GBNF or
    llguidance's JSON, or structural tags. options: llguidance's for JSON. closed: objects have no other properties than
    those that the schema lists, where it does not say.
    """

    kind: Kind
    value: Any
    options: tuple[tuple[str, Any], ...] = ()
    closed: bool = False


ANY_OBJECT = Constraint("json", {"type": "object"})


class Writer:
    """Writes one grammar. special: whether a text is the spelling of a special token, which no other text can be."""

    def __init__(self, special: Callable[[str], bool]) -> None:
        self._special = special
        self._rules: list[str] = []
        self._others: list[dict[str, Any]] = []

    def quoted(self, text: str) -> str:
        """A text that a grammar takes as it is."""
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # no string of Lark has it as it is

    def mark(self, text: str) -> str:
        """A mark in a grammar: as it is where it is a special token, else quoted."""
        return text if self._special(text) else self.quoted(text)

    def rule(self, body: str, attribute: str = "") -> str:
        """Add a rule to the grammar; its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def until(self, mark: str) -> str:
        """Any text up to this mark, and the mark."""
        if self._special(mark):
            return self.rule(f"TEXT {mark}")
        return self.rule(f"TEXT {self.quoted(mark)}", "[lazy]")

    def json(self, schema: Any, options: tuple[tuple[str, Any], ...] = (), *, closed: bool = False) -> str:
        """Have the grammar take JSON of a schema; the name of its rule."""
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise BadInput("a JSON schema is an object")
        schema = _closed(schema) if closed else schema
        own = schema.get("x-guidance")
        guidance = {"whitespace_pattern": SPACES} | dict(options) | (own if isinstance(own, dict) else {})
        return self._other({"json_schema": schema | {"x-guidance": guidance}})

    def of(self, constraint: Constraint) -> str:
        """What a constraint allows. Raises BadInput."""
        value = constraint.value
        match constraint.kind:
            case "json":
                return self.json(value, constraint.options, closed=constraint.closed)
            case "regex":
                return self.rule(f"/{_slashed(value)}/")
            case "choice":  # one terminal: of alternatives of a rule only 2000 can be followed side by side
                self._rules.append("CHOICE: " + " | ".join(self.quoted(text) for text in value))
                return "CHOICE"
            case "grammar":
                return self._grammar(value)
            case "tags":
                return self._tags(value)

    def written(self, start: str) -> str:
        """The whole grammar. Raises BadInput when it is too long."""
        lines = [f"start: {start}", *self._rules, "TEXT: /(.|\\n)*/", f"SPACES: /{SPACES}/"]
        try:
            text = json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *self._others]}, ensure_ascii=False)
            text.encode()
        except RecursionError:
            raise BadInput("the schema is nested too deeply") from None
        except UnicodeError:
            raise BadInput("the grammar is not valid Unicode") from None
        if len(text) > MAX_CHARS:
            raise BadInput(f"the grammar is too long: {len(text)} characters, at most {MAX_CHARS}")
        return text

    def _other(self, grammar: dict[str, Any]) -> str:
        name = f"g{len(self._others)}"
        self._others.append({"name": name} | grammar)
        return f"@{name}"

    def _grammar(self, text: str) -> str:
        if is_written(text):
            grammars = json.loads(text)["grammars"]
            if len(grammars) != 1:
                raise BadInput("of llguidance's own grammars one can be sent; write it as one")
            grammar = {key: value for key, value in grammars[0].items() if key != "name"}
        else:
            grammar = {"lark_grammar": _as_lark(text)}
        _check_end(grammar.get("lark_grammar"))
        return self._other(grammar)

    def _tags(self, tags: dict[str, Any]) -> str:
        """Text in which every trigger begins one of the structures, as vLLM's and SGLang's structural tags have it."""
        branches = []
        for structure in tags["structures"]:
            begin = structure["begin"]
            trigger = next((t for t in tags["triggers"] if begin.startswith(t)), None)
            if trigger is None:
                raise BadInput(f"structural_tag: {begin[:64]!r} begins with none of the triggers")
            rest = f"{self.quoted(begin[len(trigger) :])} " if len(begin) > len(trigger) else ""
            schema = structure.get("schema")
            body = self.json({"type": "object"} if schema is None else schema)
            branches.append(self.rule(f"{self.until(trigger)} {rest}{body} {self.quoted(structure['end'])}"))
        return self.rule(f"({' | '.join(branches)})* TEXT")


SPACES = r"[\x20\x0A\x0D\x09]{1,16}"
"""White space between the tokens of JSON. Bounded: a model that has nothing to say would say it in spaces."""


def is_written(text: str) -> bool:
    """Whether a grammar is llguidance's own JSON. Raises BadInput for JSON that is something else."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    grammars = whole.get("grammars") if isinstance(whole, dict) else None
    if not isinstance(grammars, list) or not grammars or not all(isinstance(grammar, dict) for grammar in grammars):
        raise BadInput('a grammar that begins with { is {"grammars": [...]}, a list of objects')
    return True


def _slashed(pattern: str) -> str:
    """A regular expression as Lark has it: between slashes."""
    return re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", pattern, flags=re.DOTALL).replace("\n", r"\n")


def _as_lark(text: str) -> str:
    if _LARK.search(text):
        return text
    if len(text) > MAX_EBNF_CHARS:
        raise BadInput(f"an EBNF grammar may have {MAX_EBNF_CHARS} characters; write longer ones in Lark")
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415  0.1 s, and few send one

    try:
        with processor_limit(_TRANSLATION_S):
            lark: str = any_to_lark(text)
    except Exception as error:  # the translation raises nothing narrower
        raise BadInput(f"the grammar is neither Lark nor EBNF: {str(error)[:200]}") from None
    return lark


def _check_end(lark: Any) -> None:
    """Raises BadInput for a grammar that lets no text be complete, or that goes on to where none can be."""
    if not isinstance(lark, str):
        return
    try:
        with processor_limit(_TRANSLATION_S):
            rule = endless_rule(lark)
    except OverLimit:
        raise BadInput("the grammar takes too long to read: make it simpler") from None
    if rule:
        needs = f"each alternative of rule {rule!r} needs, sooner or later, the rule itself"
        raise BadInput(f"the grammar has no end: {needs}; give it one that does not")


def _closed(schema: Any) -> Any:
    """A JSON schema in which objects that list their properties have no others, unless they say so."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in ("enum", "const", "default") else _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema and "allOf" not in schema:
        found["additionalProperties"] = False
    return found

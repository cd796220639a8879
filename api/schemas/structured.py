"""How requests of each dialect say what their output is constrained to."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from api.constraint import ANY_OBJECT, MAX_CHARS, MAX_CHOICES, Constraint
from api.schemas.base import Asked, Lenient, Strict, Texts

Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARS)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
]
Schema = dict[str, Any] | bool | Text
"""A JSON schema: an object or a boolean, or either written as JSON."""


def _one(found: list[Constraint], *names: str) -> Constraint | None:
    """The one constraint among those found; None = there is none. "Any object" beside a schema of objects is no second
    one, as client libraries ask for both. Raises ValueError for several.
    """
    if any(c.kind == "json" and c != ANY_OBJECT and _of_objects(c.value) for c in found):
        found = [c for c in found if c != ANY_OBJECT]
    if len(found) > 1:
        raise ValueError(f"output can be constrained in one way only: send one of {', '.join(names)}")
    return found[0] if found else None


def _of_objects(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type", "object") == "object"


def schema_of(value: Schema) -> dict[str, Any] | bool:
    """A JSON schema, however it was sent. Raises ValueError."""
    if value == "$$ANY$$":
        return {"type": "object"}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a JSON schema that is a string is JSON: {error}") from None
    if not isinstance(value, dict) and value is not True:
        raise ValueError("a JSON schema is an object")
    return value


def _tags(value: Any) -> dict[str, Any]:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}, perhaps as JSON. Raises ValueError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structural_tag: not JSON: {error}") from None
    structures, triggers = (value.get(k) if isinstance(value, dict) else None for k in ("structures", "triggers"))
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise ValueError("structural_tag: only structures with triggers are offered")
    for one in structures:
        if not isinstance(one, dict) or not isinstance(one.get("begin"), str) or not isinstance(one.get("end"), str):
            raise ValueError("structural_tag: a structure has begin, schema and end")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("structural_tag: triggers are texts")
    return {"structures": structures, "triggers": triggers}


class StructuredOutputs(Lenient):
    """vLLM's `structured_outputs`: one of the first six fields says what the output is held to."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    """A grammar in Lark, in EBNF (GBNF), or in llguidance's own JSON."""
    json_object: bool | None = None
    structural_tag: dict[str, Any] | Text | None = None
    disable_any_whitespace: bool | None = False
    disable_additional_properties: bool | None = False
    whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.constraint is None:
            raise ValueError("structured_outputs: say one of json, regex, choice, grammar, json_object, structural_tag")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """What the output is constrained to. Raises ValueError for several."""
        found = []
        options: dict[str, Any] = {}
        if self.disable_any_whitespace:
            options = {"whitespace_flexible": False, "whitespace_pattern": None}
        elif self.whitespace_pattern:
            options = {"whitespace_pattern": self.whitespace_pattern}
        schema = {"type": "object"} if self.json_object else None if self.json_ is None else schema_of(self.json_)
        if self.json_object and self.json_ is not None:
            raise ValueError("structured_outputs: json and json_object are two constraints; send one")
        if schema is not None:
            closed = bool(self.disable_additional_properties)
            found.append(Constraint("json", schema, tuple(options.items()), closed))
        if self.regex is not None:
            found.append(Constraint("regex", self.regex))
        if self.choice is not None:
            found.append(Constraint("choice", tuple(self.choice)))
        if self.grammar is not None:
            found.append(Constraint("grammar", self.grammar))
        if self.structural_tag is not None:
            found.append(Constraint("tags", _tags(self.structural_tag)))
        return _one(found, "json", "regex", "choice", "grammar", "json_object", "structural_tag")


class JsonSchemaFormat(Lenient):
    """`json_schema` of OpenAI's response_format. name, description and strict make no difference: the schema is
    followed in any case.
    """

    schema_: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(Lenient):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[dict[str, Any]], Field(max_length=1024, fail_fast=True)] | None = None
    triggers: Texts | None = None

    @model_validator(mode="after")
    def _with_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("response_format: json_schema is missing: send its schema")
        if self.type == "structural_tag":
            _tags({"structures": self.structures, "triggers": self.triggers})
        return self

    @property
    def constraint(self) -> Constraint | None:
        """What the output is constrained to; None: nothing."""
        match self.type:
            case "json_object":
                return ANY_OBJECT
            case "json_schema":
                assert self.json_schema is not None
                return Constraint("json", schema_of(self.json_schema.schema_))
            case "structural_tag":
                return Constraint("tags", _tags({"structures": self.structures, "triggers": self.triggers}))
        return None


class Structured(Asked):
    """What output is held to, as vLLM has it on all routes that sample."""

    structured_outputs: StructuredOutputs | None = None

    @property
    def constraint(self) -> Constraint | None:
        """What the output is constrained to."""
        return None if self.structured_outputs is None else self.structured_outputs.constraint


def _formatted(value: Schema) -> Schema:
    schema_of(value)
    return value


class OpenAiStructured(Structured):
    """What output is held to on OpenAI's routes, also by names of vLLM's earlier releases and of SGLang."""

    response_format: ResponseFormat | None = None
    guided_json: Annotated[Schema, AfterValidator(_formatted)] | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    json_schema: Annotated[Schema, AfterValidator(_formatted)] | None = None
    regex: Text | None = None
    ebnf: Text | None = None

    @property
    def constraint(self) -> Constraint | None:
        """What the output is constrained to."""
        found = [super().constraint, self.response_format.constraint if self.response_format else None]
        found += [Constraint("json", schema_of(v)) for v in (self.guided_json, self.json_schema) if v is not None]
        found += [Constraint("regex", v) for v in (self.guided_regex, self.regex) if v is not None]
        found += [Constraint("grammar", v) for v in (self.guided_grammar, self.ebnf) if v is not None]
        found += [Constraint("choice", tuple(self.guided_choice))] if self.guided_choice is not None else []
        return _one([f for f in found if f is not None], "structured_outputs", "response_format", "guided_...", "ebnf")

    @model_validator(mode="after")
    def _in_one_way(self) -> Self:
        assert self.constraint is None or self.constraint
        return self


class SglangStructured(Asked):
    """What output is held to, as SGLang's sampling_params say it."""

    json_schema: Annotated[Schema, AfterValidator(_formatted)] | None = None
    """"$$ANY$$": any object."""
    regex: Text | None = None
    ebnf: Text | None = None
    structural_tag: dict[str, Any] | Text | None = None

    @property
    def constraint(self) -> Constraint | None:
        """What the output is constrained to."""
        found = [] if self.json_schema is None else [Constraint("json", schema_of(self.json_schema))]
        found += [] if self.regex is None else [Constraint("regex", self.regex)]
        found += [] if self.ebnf is None else [Constraint("grammar", self.ebnf)]
        found += [] if self.structural_tag is None else [Constraint("tags", _tags(self.structural_tag))]
        return _one(found, "json_schema", "regex", "ebnf", "structural_tag")

    @model_validator(mode="after")
    def _in_one_way(self) -> Self:
        assert self.constraint is None or self.constraint
        return self


class NativeConstraint(Strict):
    """What the output is constrained to: exactly one of these."""

    json_schema: dict[str, Any] | bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    """A grammar in Lark, in EBNF (GBNF), or in llguidance's own JSON."""

    @property
    def constraint(self) -> Constraint:
        """The constraint that the fields say."""
        found = [] if self.json_schema is None else [Constraint("json", schema_of(self.json_schema))]
        found += [] if self.regex is None else [Constraint("regex", self.regex)]
        found += [] if self.choice is None else [Constraint("choice", tuple(self.choice))]
        found += [] if self.grammar is None else [Constraint("grammar", self.grammar)]
        one = _one(found, "json_schema", "regex", "choice", "grammar")
        if one is None:
            raise ValueError("send one of json_schema, regex, choice, grammar")
        return one

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        assert self.constraint
        return self

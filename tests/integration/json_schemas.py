"""A hundred JSON schemas of the kinds that people hold a model's answers to: forms, records, nesting, unions, formats.

Written for this project. Strings, lists and the digits of numbers are bounded, or a small model would not always come
to an end: a fraction may have any number of digits.
"""

from typing import Any

Schema = dict[str, Any]


def record(_required: list[str] | None = None, /, **properties: Any) -> Schema:
    """A closed object whose properties are all required, or those that are named."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if _required is None else _required,
        "additionalProperties": False,
    }


def text(most: int = 24, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most} | more


def some(items: Schema, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "maxItems": most} | more


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


WHOLE: Schema = {"type": "integer", "minimum": -1000, "maximum": 1000}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.125}
YES_NO: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
POINT = record(x=WHOLE, y=WHOLE)
PERSON = record(name=text(), age=COUNT)
TREE: Schema = {
    "$defs": {"node": record(["value"], value=COUNT, children=some({"$ref": "#/$defs/node"}, 2))},
    "$ref": "#/$defs/node",
}
LIST: Schema = {
    "$defs": {"cell": record(["head"], head=COUNT, tail={"anyOf": [NOTHING, {"$ref": "#/$defs/cell"}]})},
    "$ref": "#/$defs/cell",
}

SCHEMAS: dict[str, Schema] = {
    # values
    "whole number": WHOLE,
    "natural number": {"type": "integer", "minimum": 0, "maximum": 10**6},
    "only negative": {"type": "integer", "exclusiveMaximum": 0, "minimum": -50},
    "between, exclusive": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 100},
    "share": SHARE,
    "temperature": {"type": "number", "minimum": -273.5, "maximum": 1000, "multipleOf": 0.5},
    "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 998},
    "in fives": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500},
    "flag": YES_NO,
    "nothing": NOTHING,
    "one value": {"const": "ready"},
    "one object": {"const": {"kind": "a", "of": [1, 2, {"b": None}]}},
    "one of some words": one_of("low", "medium", "high"),
    "one of some numbers": one_of(1, 2, 3, 5, 8, 13),
    "one of mixed": one_of("auto", None, 0, True, 1.5),
    "words with quotes": one_of('say "hi"', "back\\slash", "line\nbreak", "tab\t", "ünïcode 🦄"),
    "short text": text(12),
    "text of a length": text(8, minLength=3),
    "text that may be empty": text(1),
    "number or text": {"type": ["integer", "string"], "maxLength": 10, "minimum": 0, "maximum": 9},
    "text or nothing": {"type": ["string", "null"], "maxLength": 10},
    # patterns and formats
    "postcode": {"type": "string", "pattern": "^[0-9]{5}$"},
    "plate": {"type": "string", "pattern": "^[A-Z]{1,3}-[A-Z]{1,2} [1-9][0-9]{0,3}$"},
    "hex colour": {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
    "version": {"type": "string", "pattern": r"^\d{1,3}\.\d{1,3}\.\d{1,3}$"},
    "slug": {"type": "string", "pattern": "^[a-z]+(-[a-z]+){0,3}$", "maxLength": 30},
    "contains": {"type": "string", "pattern": "ab", "maxLength": 12},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
    "moment": {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-[0-2][1-9]T[01][0-9]:[0-5][0-9]Z$"},
    "id": {"type": "string", "format": "uuid"},
    "address v4": {"type": "string", "format": "ipv4"},
    "mail": {"type": "string", "format": "email", "maxLength": 40},
    "host": {"type": "string", "format": "hostname", "maxLength": 30},
    # lists
    "numbers": some(COUNT, 5),
    "at least two": some(COUNT, 4, minItems=2),
    "exactly three": some(YES_NO, 3, minItems=3),
    "words": some(text(8), 4),
    "list of choices": some(one_of("red", "green", "blue"), 4, minItems=1),
    "grid": some(some(COUNT, 3, minItems=3), 3, minItems=3),
    "pair": {"type": "array", "prefixItems": [text(8), COUNT], "items": False, "minItems": 2},
    "triple": {"type": "array", "prefixItems": [COUNT, COUNT, YES_NO], "items": False, "minItems": 3},
    "head and rest": {"type": "array", "prefixItems": [one_of("sum")], "items": COUNT, "minItems": 1, "maxItems": 4},
    "empty list": {"type": "array", "maxItems": 0},
    "of anything small": some({"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 9}, 4),
    # records
    "point": POINT,
    "person": PERSON,
    "book": record(
        title=text(), author=text(), year={"type": "integer", "minimum": 1450, "maximum": 2100}, lent=YES_NO
    ),
    "optional parts": record(["id"], id=COUNT, note=text(), tag=text(8), done=YES_NO),
    "all optional": record([], a=COUNT, b=YES_NO, c=one_of("x", "y")),
    "empty record": record(),
    "names with spaces": record(**{"first name": text(10), "how many?": COUNT, 'a "b"': YES_NO, "ü": COUNT}),
    "order of keys": record(z=COUNT, a=COUNT, m=COUNT),
    "many fields": record(**{f"field_{i}": COUNT for i in range(20)}),
    "score card": record(
        **{name: {"type": "integer", "minimum": 1, "maximum": 5} for name in ("style", "sense", "wit")}
    ),
    "verdict": record(reason=text(40), verdict=one_of("pass", "fail"), confidence=SHARE),
    "invoice line": record(
        item=text(16), quantity=COUNT, price={"type": "number", "minimum": 0, "maximum": 9999, "multipleOf": 0.25}
    ),
    "range": record(low=COUNT, high=COUNT, inclusive=YES_NO),
    "weather": record(
        town=text(16), degrees={"type": "integer", "minimum": -40, "maximum": 50}, sky=one_of("clear", "rain")
    ),
    "maybe nothing": record(value={"anyOf": [COUNT, NOTHING]}),
    # nesting
    "person with address": record(who=PERSON, address=record(street=text(), number=COUNT)),
    "team": record(name=text(12), members=some(PERSON, 2)),
    "line": record(start=POINT, end=POINT),
    "polygon": some(POINT, 4, minItems=3),
    "deep": record(a=record(b=record(c=record(d=record(e=COUNT))))),
    "deep list": some(some(some(COUNT, 2), 2), 2),
    "order": record(id=COUNT, lines=some(record(sku=text(6), n=COUNT), 2), paid=YES_NO),
    "recipe": record(title=text(16), steps=some(text(20), 3, minItems=1), minutes=COUNT),
    "quiz": record(
        question=text(30), options=some(text(10), 4, minItems=2), answer={"type": "integer", "minimum": 0, "maximum": 3}
    ),
    "calendar": record(day={"type": "string", "format": "date"}, slots=some(record(hour=COUNT, free=YES_NO), 2)),
    "settings": record(theme=one_of("dark", "light"), font=record(size=COUNT, bold=YES_NO), tabs=some(text(8), 2)),
    "matrix with name": record(name=text(8), rows=some(some(SHARE, 2, minItems=2), 2, minItems=2)),
    # references
    "by reference": {"$defs": {"n": COUNT}, **record(a={"$ref": "#/$defs/n"}, b={"$ref": "#/$defs/n"})},
    "by the older word": {"definitions": {"p": POINT}, **record(at={"$ref": "#/definitions/p"})},
    "reference in a list": {"$defs": {"p": PERSON}, "type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2},
    "reference to a reference": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": YES_NO}, **record(x={"$ref": "#/$defs/a"})},
    "tree": TREE,
    "linked list": LIST,
    "two that name each other": {
        "$defs": {
            "even": record([], odd={"$ref": "#/$defs/odd"}),
            "odd": record([], even={"$ref": "#/$defs/even"}),
        },
        "$ref": "#/$defs/even",
    },
    # unions
    "number or flag": {"anyOf": [COUNT, YES_NO]},
    "either record": {"anyOf": [POINT, PERSON]},
    "shapes": {
        "oneOf": [
            record(kind={"const": "circle"}, r=COUNT),
            record(kind={"const": "box"}, w=COUNT, h=COUNT),
            record(kind={"const": "dot"}),
        ]
    },
    "tool or answer": {
        "anyOf": [
            record(tool=one_of("search", "add"), arguments=record(query=text(16))),
            record(answer=text(24)),
        ]
    },
    "list of either": some({"anyOf": [COUNT, text(6)]}, 4),
    "nested unions": record(x={"anyOf": [NOTHING, {"anyOf": [COUNT, record(y=COUNT)]}]}),
    "all of two": {"allOf": [{"type": "object", "properties": {"a": COUNT}, "required": ["a"]}, record(a=COUNT)]},
    "bounds in parts": {"allOf": [{"type": "integer", "minimum": 10}, {"type": "integer", "maximum": 20}]},
    "result or error": {
        "oneOf": [record(ok={"const": True}, value=COUNT), record(ok={"const": False}, error=text(20))]
    },
    # open objects
    "map of counts": {"type": "object", "additionalProperties": COUNT, "maxProperties": 3},
    "map of lists": {"type": "object", "additionalProperties": some(COUNT, 2), "maxProperties": 2},
    "keys by pattern": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,4}$": COUNT},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "known and others": {
        "type": "object",
        "properties": {"id": COUNT},
        "required": ["id"],
        "additionalProperties": YES_NO,
        "maxProperties": 3,
    },
    "at least one": {"type": "object", "additionalProperties": COUNT, "minProperties": 1, "maxProperties": 2},
    # with words about them
    "described": record(
        size=COUNT | {"title": "Size", "description": "In pixels.", "default": 3, "examples": [1, 2]},
    )
    | {"title": "Thing", "description": "A thing.", "$schema": "https://json-schema.org/draft/2020-12/schema"},
    "as a library writes it": {
        "title": "Answer",
        "type": "object",
        "properties": {
            "steps": {"title": "Steps", "type": "array", "items": {"$ref": "#/$defs/Step"}, "maxItems": 2},
            "final": {"title": "Final", "type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["steps", "final"],
        "$defs": {
            "Step": {
                "title": "Step",
                "type": "object",
                "properties": {"text": text(24) | {"title": "Text"}},
                "required": ["text"],
                "additionalProperties": False,
            }
        },
        "additionalProperties": False,
    },
    "optional that may be null": record(["a"], a=COUNT, b={"anyOf": [text(8), NOTHING], "default": None}),
    "a choice with one value": record(kind={"enum": ["only"]}, n=COUNT),
    "flags": record(**dict.fromkeys(("read", "write", "run"), YES_NO)),
    "coordinates": record(
        lat={"type": "number", "minimum": -90, "maximum": 90, "multipleOf": 0.5},
        lon={"type": "number", "minimum": -180, "maximum": 180, "multipleOf": 0.5},
    ),
    "review": record(
        stars={"type": "integer", "minimum": 1, "maximum": 5},
        pros=some(text(12), 2),
        cons=some(text(12), 2),
        again=YES_NO,
    ),
}

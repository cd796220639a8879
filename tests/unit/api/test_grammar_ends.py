"""What has no end is found; what has one, or cannot be read, is not."""

import pytest

from api.grammar_ends import endless_rule

ENDLESS = [
    ('start: "a" start', "start"),
    ('start: start "a"', "start"),
    ("start: /a+/ start", "start"),
    ('start: "a"? start', "start"),
    ('start: ("a" start)+', "start"),
    ('start: "a" (start){1,3}', "start"),
    ('start: "a" start~2', "start"),
    ("start: a\na: b\n | b b\nb: a", "start"),
    ('start: "a" x\nx: x "c" | x', "start"),
    ('start: "a" (b | "c")\nb: "d" b', "b"),
    ('start: "x" b?\nb: /d+/ b', "b"),
    ('start: "x" [b]\nb: /d+/ b', "b"),
    ('start: x{0,2}\n?x.2: "b" x', "x"),
    ('start: a // "b" | "c"\na: "//" a', "start"),
    ('start[max_tokens=3]: "a" %json {"a": "}"} start', "start"),
    ('%llguidance {}\n\nstart: "a" start\n', "start"),
    ('%import common.WS\n%ignore WS\nstart: "a" -> one\n | b\n!b: "c" b', "b"),
]
ENDING = [
    'start: "a" start | "b"',
    'start: "a" start | ',
    'start: ""',
    'start: ("a" start)*',
    'start: "a" [start]',
    'start: "a" start?',
    'start: start?b\nb: "x"',
    'start: "a" start{0,3}',
    'start: "a" start{,3}',
    'start: "a" start~0..3',
    '?start: a\n | b\na: "x"\nb: (a | b) "y"',
    'start: A b\nA: /x/\nb[lazy]: %json {"a": [1, "}"]} | @g1 | <s> | <[1-3]>\nunused: unused',
    "start: missing",
    'other: other\nbegin: "a"',
]
UNREAD = [
    'start: "a" start "',
    'start: ("a" start',
    'start: "a") start',
    'start: ["a" start)',
    "start: %json {start",
    "start::x : start",
    "start: ? start",
    '"a" start: start',
    'start: "a"{ start',
    "",
]


@pytest.mark.parametrize(("lark", "rule"), ENDLESS)
def test_what_has_no_end_is_named(lark, rule):
    assert endless_rule(lark) == rule


@pytest.mark.parametrize("lark", ENDING + UNREAD)
def test_what_has_an_end_or_cannot_be_read_is_left_alone(lark):
    assert endless_rule(lark) == ""

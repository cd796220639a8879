"""Calls of tools in the text of a model, in every format, whole and in pieces."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.reading.calls import FORMATS, format_of
from api.reading.parts import Arguments, Call, Content, Part

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}},
            },
        },
    }
]
F = ("f", '{"n": 1}')
G = ("g", "{}")


def one(name: str = "f", arguments: str = '{"n": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # format, text, content, calls
    ("hermes", "Hello.\n", "Hello.\n", []),
    ("hermes", one(), "", [F]),
    ("hermes", f"I look.\n\n{one()}\n{one('g', '{}')}\n", "I look.", [F, G]),
    ("hermes", f"{one()}\nDone.", "Done.", [F]),
    ("hermes", '<tool_call>{"arguments": {"n":1}, "name": "f"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}, "id": [1, {}]}</tool_call>', "", [F]),
    ("hermes", one(arguments='{"s": "</tool_call> } \\" {"}'), "", [("f", '{"s": "</tool_call> } \\" {"}')]),
    ("hermes", one(arguments='{"l": [[1], {"a": {}}]}'), "", [("f", '{"l": [[1], {"a": {}}]}')]),
    ("hermes", one(arguments='{"s": "né\\u00e9 🦄"}'), "", [("f", '{"s": "né\\u00e9 🦄"}')]),
    # what breaks off inside the arguments is a call; what has no name is text
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"n": ', "", [("f", '{"n": ')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1</tool_call> x', "x", [("f", '{"n": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    ("hermes", "<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
    ("hermes", '<tool_call>{"n": 1}</tool_call>', '<tool_call>{"n": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("ernie45", f"<response>\nHi\n</response>\n{one()}", "\nHi", [F]),
    ("ernie45", f"\n\n{one()}\n\n{one('g', '{}')}", "", [F, G]),
    ("llama3_json", '{"name": "f", "parameters": {"n": 1}}', "", [F]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"n": 1}}', "", [F]),
    ("llama3_json", '{"name": "f", "parameters": {"n": 1}}; {"name": "g", "parameters": {}}', "", [F, G]),
    ("llama3_json", '{"name": "f", "parameters": {"n": 1}}\n\nSo.', "\n\nSo.", [F]),
    ("llama3_json", '{"answer": 3} it is', '{"answer": 3} it is', []),
    ("llama3_json", ' It is {"name": "f"}', ' It is {"name": "f"}', []),
    ("llama3_json", "<|python", "<|python", []),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\n12\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [("f", '{"n": 1, "s": "12"}')],
    ),
    (
        "qwen3_coder",
        "Now:\n<function=f>\n<parameter=l>\n[1,\n 2]\n</parameter>\n</function>\n"
        "<tool_call><function=g></function></tool_call>",
        "Now:",
        [("f", '{"l": [1,\n 2]}'), G],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=s>\nif a < b:\n\tpass\n\n</parameter></function>",
        "",
        [("f", '{"s": "if a < b:\\n\\tpass\\n"}')],
    ),
    ("qwen3_coder", "<function=f><parameter=n>one</parameter></function>", "", [("f", '{"n": "one"}')]),
    ("qwen3_coder", "<function=f><parameter=l>True</parameter></function>", "", [("f", '{"l": true}')]),
    ("qwen3_coder", "<function=f><parameter=n>1<parameter=s>x</function>", "", [("f", '{"n": 1, "s": "x"}')]),
    ("qwen3_coder", "<function=f><parameter=n>1</parameter><parameter=s>x", "", [("f", '{"n": 1')]),
    ("qwen3_coder", "<tool_call>no function", "<tool_call>no function", []),
    ("qwen3_coder", "a <func", "a <func", []),
]


def joined(parts: list[Part]) -> tuple[str, list[tuple[str, str]]]:
    content, calls = "", []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Call(name):
                calls.append((name, ""))
            case Arguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, calls


def read(kind: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = FORMATS[kind](TOOLS)  # type: ignore[index]
    parts = [part for piece in pieces for part in reader.push(piece)]
    return joined(parts + reader.finish())


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_a_text_in_one_piece(kind: str, text: str, content: str, calls: list[Any]) -> None:
    assert read(kind, [text]) == (content, calls)


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_the_same_in_every_two_pieces_and_in_characters(kind: str, text: str, content: str, calls: list[Any]) -> None:
    assert read(kind, list(text)) == (content, calls)
    for cut in range(len(text) + 1):
        assert read(kind, [text[:cut], text[cut:]]) == (content, calls), cut


MARKS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": ',
    "{",
    "}",
    '"',
    "\\",
    "<function=",
    "f>",
    " ",
    "\n",
]
MARKS += ["<parameter=", "n>", "</parameter>", "</function>", "<|python_tag|>", ";", "x", '"name"', ":", "[", "<", "é"]


@given(kind=st.sampled_from(sorted(FORMATS)), words=st.lists(st.sampled_from(MARKS), max_size=30), data=st.data())
def test_any_text_in_any_pieces(kind: str, words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(kind, pieces) == read(kind, [text])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("qwen3_coder", "x</tool_call>y"),
        ("qwen3_coder", "<tool_call>\n x"),
        ("qwen3_coder", "<tool_call> \n</tool_call>"),
        ("qwen3_coder", "a <tool_call>\n<tool_call> b"),
        ("llama3_json", ' \n{"name": 5}'),
        ("llama3_json", '\n{"x'),
    ],
)
def test_marks_and_spaces_without_a_call_are_content(kind: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(kind, pieces) == (text, [])


def test_a_mark_after_a_call_that_broke_is_the_same_in_pieces() -> None:
    text = '{"name": "f", "parameters": {;<|python_tag|>x'
    assert read("llama3_json", list(text)) == read("llama3_json", [text])


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("begin", ['<tool_call>{"name": "', "<tool_call>", '{"name": "', "<tool_call>{", ""])
@pytest.mark.parametrize("more", ["x", "{", "<", " ", "\\"])
def test_a_model_that_runs_away_costs_no_more_with_every_token(kind: str, begin: str, more: str) -> None:
    """The loop that reads it is everybody's: 8000 tokens of a name that never ends took seconds of it."""
    reader = FORMATS[kind](TOOLS)  # type: ignore[index]
    reader.push(begin)
    began = time.thread_time()
    for _ in range(8000):
        reader.push(4 * more)
    assert time.thread_time() - began < 0.8


@pytest.mark.parametrize(
    "begin", ["<function=", "<function=f>", "<function=f><parameter=", "<function=f><parameter=s>"]
)
def test_a_long_value_is_looked_through_once(begin: str) -> None:
    """A file that a coder writes is one value: looked through with every token of it, this takes many seconds."""
    reader = FORMATS["qwen3_coder"](TOOLS)
    reader.push(begin)
    began = time.thread_time()
    for _ in range(60_000):
        reader.push("x = ")
    assert time.thread_time() - began < 0.8


def test_calls_of_one_piece_are_looked_through_once() -> None:
    """A whole answer comes so."""
    reader = FORMATS["qwen3_coder"](TOOLS)
    began = time.thread_time()
    parts = reader.push("<function=f>" + "<parameter=n>1</parameter>" * 10_000 + "</function>")
    assert len(parts) == 10_002
    assert time.thread_time() - began < 1.5


def test_arguments_come_as_they_are_written() -> None:
    reader = FORMATS["hermes"](TOOLS)
    seen = [
        part for piece in ['<tool_call>{"name": "f", "arguments": ', '{"n"', ": 1", "}}"] for part in reader.push(piece)
    ]
    assert seen == [Call("f"), Arguments('{"n"'), Arguments(": 1"), Arguments("}")]


@given(st.dictionaries(st.sampled_from("nsl"), st.text(), max_size=3))
def test_strings_survive_the_xml(values: dict[str, str]) -> None:
    """All but those with marks in them."""
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"properties": {name: {"type": "string"} for name in "nsl"}}},
        }
    ]
    shown = {k: v for k, v in values.items() if "<" not in v}
    text = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in shown.items())
    reader = FORMATS["qwen3_coder"](tools)
    _, [(_, arguments)] = joined(reader.push(f"<function=f>\n{text}</function>") + reader.finish())
    assert json.loads(arguments) == shown


@pytest.mark.parametrize(
    ("template", "model_type", "found"),
    [
        ("... <tool_call>\n<function=example_function_name> ...", "qwen3_moe", "qwen3_coder"),
        (
            '... <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
            "qwen3",
            "hermes",
        ),
        ('{"name": function name, "parameters": dictionary ...}', "llama", "llama3_json"),
        ("{{- '<|python_tag|>' }}", "llama", "llama3_json"),
        ("<tool_call>", "ernie4_5_moe", "ernie45"),
        ("{{ messages }}", "llama", "hermes"),
    ],
)
def test_the_format_is_found_in_the_template(template: str, model_type: str, found: str) -> None:
    assert format_of(template, model_type) == found

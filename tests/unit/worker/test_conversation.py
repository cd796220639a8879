"""What clients send of a conversation, and what templates are given."""

from typing import Any

import pytest

from worker.chat_template import Rendering
from worker.conversation import read, shaped


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def _prompt(template: str, *messages: dict[str, Any], **variables: Any) -> str:
    return Rendering(template, read(messages), variables).text()


CONTENT = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
_CALLS = "{% for m in messages %}{% for t in m.tool_calls or [] %}"
ARGUMENTS = _CALLS + "{{ t.function.arguments | tojson }}{% endfor %}{% endfor %}"
ITEMS = _CALLS + "{% for k, v in t.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
PARTS = "{% for m in messages %}{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endfor %}"


@pytest.mark.parametrize("role", ["assistant", "user", "tool", "system"])
@pytest.mark.parametrize("said", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_no_content_is_an_empty_text(role: str, said: dict[str, Any]) -> None:
    message = {"role": role, **said}
    assert _prompt(CONTENT, message) == f"{role}: |"
    assert _prompt("{{ 'a' + messages[0]['content'] }}", message) == "a"


@pytest.mark.parametrize(
    ("arguments", "json", "items"),
    [
        ('{"a": 3}', '{"a": 3}', "a=3;"),
        ({"a": 3}, '{"a": 3}', "a=3;"),
        ('{"a": {"b": "é"}}', '{"a": {"b": "é"}}', "a={'b': 'é'};"),
        ("", "{}", ""),
        (None, "{}", ""),
        ("{}", "{}", ""),
        ('{"a": ', "{}", ""),  # as a model wrote them that was cut off: the conversation goes on
        ("[" * 100_000, "{}", ""),
    ],
)
def test_arguments_of_calls_are_decoded(arguments: Any, json: str, items: str) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [_call(arguments)]}
    assert _prompt(ARGUMENTS, message) == json
    assert _prompt(ITEMS, message) == items
    assert message["tool_calls"] == [_call(arguments)]  # the caller's own is left alone


def test_null_and_empty_fields_are_absent() -> None:
    template = "{% for m in messages %}{{ m.keys() | list | sort | join(' ') }}{% endfor %}"
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "audio": None}
    assert _prompt(template, message) == "content role"
    assert _prompt(template, message | {"tool_calls": None, "name": "n"}) == "content name role"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_found_under_both_names(name: str) -> None:
    template = "{% for m in messages %}{{ m.reasoning }}/{{ m.reasoning_content }}{% endfor %}"
    assert _prompt(template, {"role": "assistant", "content": "x", name: "hm"}) == "hm/hm"
    assert _prompt(template, {"role": "assistant", "content": "x", name: None}) == "/"


def test_what_a_tool_said_is_text_for_every_template() -> None:
    template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    template += "[{{ c.text }}]{% endfor %}{% endif %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _prompt(template, {"role": "user", "content": parts}, {"role": "tool", "content": parts}) == "[a][b]a\nb"


TEXTS: list[Any] = [{"type": "text", "text": "Hi"}, "there", {"type": "input_text", "text": "you"}, {"text": "all"}]


def test_parts_become_what_the_template_goes_over() -> None:
    """Templates that loop over content get parts, also of a plain text; others a text."""
    assert _prompt(PARTS, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}) == "[Hi]"
    assert _prompt(PARTS, {"role": "user", "content": "Hi"}, {"role": "user", "content": TEXTS}) == (
        "[Hi][Hi][there][you][all]"
    )
    assert _prompt(CONTENT, {"role": "user", "content": TEXTS}) == "user: Hi\nthere\nyou\nall|"
    parts = [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}]
    assert _prompt(PARTS, {"role": "assistant", "content": parts}) == "[no][hm]"


@pytest.mark.parametrize(
    ("template", "as_parts"),
    [
        ("{% for m in messages %}{% for c in m['content'] %}{{ c.type }}{% endfor %}{% endfor %}", True),
        ("{% set x = messages[0].content %}{% for c in x %}{{ c.type }}{% endfor %}", True),
        ("{% for c in messages[0].content | list %}{{ c.type }}{% endfor %}", True),
        ("{% for c in messages[0].content[1:] %}{{ c.type }}{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for w in messages[0].content.split(' ') %}{{ w }}{% endfor %}", False),
        ("{% set content = messages[0].content | trim %}{{ content }}", False),
    ],
)
def test_what_a_template_goes_over_is_read_from_it(template: str, as_parts: bool) -> None:
    said = [{"role": "user", "content": "a b"}]
    with_list = Rendering(template, shaped(read(said), as_parts=as_parts)).text()
    assert Rendering(template, read(said)).text() == with_list
    assert ("text" in with_list) == (as_parts and "[1:]" not in template)


def test_reading_twice_is_reading_once() -> None:
    once = read([{"role": "assistant", "content": TEXTS, "tool_calls": [_call('{"a": "{}"}')]}])
    assert read(once) == once


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            {"content": [{"type": "image_url", "image_url": {}}]},
            "message 1: only text content is supported, not 'image_url'",
        ),
        ({"content": [3]}, "message 1: only text content is supported, not 'int'"),
        ({"content": [{"type": "text"}]}, "message 1: only text content"),
        ({"content": 3}, "message 1: content is a text, a list of parts or null, not int"),
        ({"content": {"text": "x"}}, "message 1: content is a text"),
        ({"tool_calls": {"f": 1}}, "message 1: tool_calls is a list"),
        ({"tool_calls": ["f"]}, "message 1: tool call 0 has no function"),
        ({"tool_calls": [_call(3)]}, "message 1: the arguments of tool call 0 are a JSON string or an object"),
    ],
)
def test_what_cannot_be_read_is_named(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        read([{"role": "user", "content": "x"}, {"role": "assistant"} | message])


def test_tools_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert _prompt("{{ tools | tojson }}", {"role": "user", "content": "x"}, tools=tools) == (
        '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
    )

"""Rendering as the Hugging Face stack does, and not an inch of Python more."""

from datetime import datetime
from typing import Any

import pytest

from worker.chat_template import Rendering
from worker.conversation import read

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello there "}]
SIMPLE = "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}</s>{% endfor %}"


def _render(
    template: str, messages: list[dict[str, Any]] = CHAT, *, continue_final: bool = False, **values: Any
) -> str:
    return Rendering(template, read(messages), values, continue_final).text()


def test_blocks_leave_no_blank_lines() -> None:
    assert (
        _render("{% for m in messages %}\n  {% if m %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n")
        == "user\nassistant\n"
    )


def test_json_is_written_as_models_have_seen_it() -> None:
    value = {"b": "<é>", "a": [1, True, None]}
    assert _render("{{ x | tojson }}", x=value) == '{"b": "<é>", "a": [1, true, null]}'
    assert _render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"


def test_loop_controls_generation_marks_and_dates() -> None:
    template = (
        "{% for m in messages %}{% if loop.index == 1 %}{% continue %}{% endif %}"
        "{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}"
    )
    assert _render(template) == "assistant"
    assert _render("{{ strftime_now('%Y') }}") == str(datetime.now().astimezone().year)


def test_a_generation_mark_sees_the_variables_around_it() -> None:
    marked = "{% generation %}{{ x }}{{ loop.index }}{% endgeneration %}"
    assert _render("{% set x = 'a' %}{% for m in messages %}" + marked + "{% endfor %}") == "a1a2"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template"),
        ("{{ messages[0].nothing.more }}", "chat template"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "chat template"),
        ("{{ ''.__class__.__mro__ }}", "chat template"),
        ("{{ cycler.__init__.__globals__ }}", "chat template"),
        ("{% for i in range(999999999) %}{% endfor %}", "chat template"),
        ("{{ x | tojson }}", "not JSON serializable"),
    ],
)
def test_a_template_that_cannot_or_must_not_is_a_value_error(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _render(template)


def test_continuing_ends_inside_the_last_message() -> None:
    assert _render(SIMPLE, continue_final=True) == "<user>Hi</s><assistant>Hello there"
    whole = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert _render(whole, continue_final=True) == "[Hi][ Hello there "
    with pytest.raises(ValueError, match="does not show"):
        _render("nothing", continue_final=True)
    with pytest.raises(ValueError, match="no text"):
        _render(SIMPLE, [], continue_final=True)

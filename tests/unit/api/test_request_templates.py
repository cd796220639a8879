"""Chat templates of requests: off unless the operator allows them, and then in a process that is killed."""

import asyncio
import dataclasses
import time

import pytest

from api import template_process
from api.model import Model
from api.template_process import TemplateProcess
from tests.unit.api.byte_tokenizer import ByteTokenizer

HI = [{"role": "user", "content": "Hi"}]
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{% set x = 'x' * 99999 %}{% set y = x * 99999 %}{{ y | length }}"


@pytest.fixture
def trusted() -> bool:
    return True


@pytest.fixture
def model(config, model, trusted) -> Model:
    process = TemplateProcess(max_chars=2048)
    return dataclasses.replace(model, max_model_len=2048, template_process=process if trusted else None)


async def _tokenize(client, template: str, messages=HI, **more) -> tuple[int, str]:
    reply = await client.post("/tokenize", json={"messages": messages, "chat_template": template} | more)
    if reply.status_code == 200:
        return 200, ByteTokenizer().decode(reply.json()["tokens"])
    return reply.status_code, reply.json()["error"]["message"]


def _called(arguments: str, content: str | None = "") -> list[dict]:
    function = {"name": "f", "arguments": arguments}
    return [
        {"role": "assistant", "content": content, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    ]


CASES = [
    (
        "{% for m in messages %}{% for t in m.tool_calls or [] %}"
        "{{ t.function.arguments | tojson }}{% endfor %}{% endfor %}",
        _called('{"a": 3}'),
        '{"a": 3}',
    ),
    (
        "{% for m in messages %}{% for t in m.tool_calls or [] %}{% for k, v in t.function.arguments | items %}"
        "{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}",
        _called('{"a": 3}'),
        "a=3;",
    ),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", _called("{}", None), "assistant: "),
    (
        "{% for m in messages %}{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endfor %}",
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "[Hi]",
    ),
]


@pytest.mark.parametrize(("template", "messages", "wanted"), CASES)
async def test_they_see_conversations_as_the_checkpoints_own_does(client, template, messages, wanted) -> None:
    status, text = await _tokenize(client, template, messages, add_generation_prompt=False)
    assert (status, text.removesuffix("\n")) == (200, wanted)


async def test_they_see_tools_and_variables(client) -> None:
    more = {"tools": [{"name": "f"}], "chat_template_kwargs": {"x": "y"}, "add_generation_prompt": True}
    found = await _tokenize(client, "{{ tools[0].name }}{{ x }}{{ add_generation_prompt }}", **more)
    assert found == (200, "fyTrue")


@pytest.mark.parametrize("route", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize("trusted", [False])
async def test_they_are_refused_by_default_and_the_option_is_named(client, trusted, route) -> None:
    reply = await client.post(route, json={"messages": HI, "chat_template": "{{ 1 }}"})
    assert reply.status_code == 400
    assert "api.trust_request_chat_template" in reply.json()["error"]["message"]
    assert (await client.post(route, json={"messages": HI, "max_tokens": 1})).status_code == 200


def test_the_option_is_what_makes_a_process(config, model_dir) -> None:
    (model_dir / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
    assert Model.load(config).template_process is None
    assert Model.load(config.model_copy(update={"trust_request_chat_template": True})).template_process is not None


@pytest.mark.timeout(60)
async def test_one_that_does_not_end_is_ended_and_the_next_is_written(client) -> None:
    assert await _tokenize(client, "warm") == (200, "warm")
    began = time.monotonic()
    forever = asyncio.create_task(_tokenize(client, FOREVER))
    await asyncio.sleep(0.2)
    health = await client.get("/health")  # others are served meanwhile
    assert (health.status_code, forever.done()) == (200, False)
    status, said = await forever
    assert (status, "took more than 1 s" in said) == (400, True)
    assert time.monotonic() - began < 10
    assert await _tokenize(client, "{{ messages[0].content }}!") == (200, "Hi!")


@pytest.mark.timeout(60)
async def test_one_that_takes_all_memory_is_ended_and_the_next_is_written(client) -> None:
    status, said = await _tokenize(client, HUGE)
    assert status == 400
    assert "memory" in said or "took more than" in said
    assert await _tokenize(client, "{{ messages[0].content }}!") == (200, "Hi!")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if %}", "chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "chat template"),
        ("{{ 'x' * 90000 }}", "90000 characters"),
    ],
)
async def test_what_it_refuses_is_said(client, template, said) -> None:
    status, message = await _tokenize(client, template)
    assert status == 400
    assert said in message


async def test_a_value_that_cannot_be_sent_is_a_bad_request(client) -> None:
    status, message = await _tokenize(client, "{{ x }}", chat_template_kwargs={"x": 1 << 80})
    assert (status, "cannot be given" in message) == (400, True)


async def test_many_at_once_are_written_one_by_one(client) -> None:
    found = await asyncio.gather(*(_tokenize(client, f"{n}{{{{ messages[0].content }}}}") for n in range(30)))
    assert found == [(200, f"{n}Hi") for n in range(30)]


async def test_a_process_that_does_not_start_is_an_error_that_may_be_tried_again(client, monkeypatch) -> None:
    monkeypatch.setattr(template_process.sys, "executable", "/bin/false")
    assert (await _tokenize(client, "x"))[0] == 503
    monkeypatch.undo()
    assert await _tokenize(client, "x") == (200, "x")


async def test_the_process_ends_with_the_service(model) -> None:
    assert model.template_process is not None
    rendering = model.text.rendering([{"role": "user", "content": "a"}], chat_template="{{ messages[0].content }}")
    assert await model.template_process.text(rendering) == "a"
    process = model.template_process._process
    await model.template_process.close()
    assert process.returncode is not None

"""What output is held to, in the words of every dialect: the grammar that replicas get, followed as they follow it."""

import json
import time
from typing import Any

import numpy as np
import pytest

from api.model import Model
from api.reading.calls import FORMATS
from api.reading.parts import Call
from tests.unit.api.byte_tokenizer import EOS, VOCAB, ByteTokenizer
from worker.grammar import Compiled, Grammars, Refused
from worker.messages import Generate

GRAMMARS = Grammars(ByteTokenizer(), VOCAB, (EOS,))  # type: ignore[arg-type]
HI = [{"role": "user", "content": "A"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
YES = ['{"a": 1}', '{ "a":12 }', '{\n  "a": -3\n}']
NO = ["{}", '{"a": "x"}', '{"a": 1', '{"a": 1} ', "x", '{"a": 1, "b": 2}', '{"a":' + 17 * " " + "1}"]


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"replicas": 1}


@pytest.fixture
def of_model() -> dict[str, Any]:
    return {"tool_format": "hermes"}


@pytest.fixture
def model(config, of_model) -> Model:
    tokenizer: Any = ByteTokenizer()
    return Model(config.model_name, config.model, VOCAB, 64, "Qwen3ForCausalLM", tokenizer, (EOS,), **of_model)


def compiled(grammar: str) -> Compiled | Refused:
    while (found := GRAMMARS.look_up(grammar)) is None:
        time.sleep(0.001)
    return found


def accepts(grammar: str, text: str) -> bool:
    made = compiled(grammar)
    assert isinstance(made, Compiled), made
    matcher = made.of_request().matcher(frozenset([EOS]))
    row = np.zeros(VOCAB, np.float32)
    for token in [*text.encode(), EOS]:
        out = np.empty(VOCAB, np.float32)
        assert matcher.restrict(row, out, np.float32(-1)) == ""
        if out[token] < 0:
            return False
        matcher.record(token)
    return True


async def grammar(client, replicas, path: str, body: dict[str, Any]) -> str:
    """What the replica got."""
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return replicas[0].got(Generate)[-1].sampling.grammar


def of(route: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    match route:
        case "chat":
            return "/v1/chat/completions", {"messages": HI, "max_tokens": 1} | fields
        case "completions":
            return "/v1/completions", {"prompt": "A", "max_tokens": 1} | fields
        case "tokens":
            return "/inference/v1/generate", {"token_ids": [65], "sampling_params": {"max_tokens": 1} | fields}
        case "sglang":
            return "/generate", {"text": "A", "sampling_params": {"max_new_tokens": 1} | fields}
        case "trl":
            return "/generate", {"prompts": ["A"], "max_tokens": 1} | fields
    return "/v1/rollout/generate", {"prompt": "A", "max_tokens": 1} | fields


BOTH = ("chat", "completions")
VLLM = (*BOTH, "tokens")
JSON: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (
        BOTH,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    ),
    (BOTH, {"guided_json": SCHEMA}),
    (BOTH, {"guided_json": json.dumps(SCHEMA)}),
    (VLLM, {"structured_outputs": {"json": SCHEMA}}),
    (VLLM, {"structured_outputs": {"json": json.dumps(SCHEMA)}}),
    (("sglang",), {"json_schema": json.dumps(SCHEMA)}),
    (("native",), {"constraint": {"json_schema": SCHEMA}}),
    (VLLM, {"structured_outputs": {"grammar": json.dumps({"grammars": [{"json_schema": SCHEMA}]})}}),
]


@pytest.mark.parametrize(("route", "fields"), [(route, fields) for routes, fields in JSON for route in routes])
async def test_json_of_a_schema(client, replicas, route, fields):
    made = await grammar(client, replicas, *of(route, fields))
    assert [accepts(made, text) for text in YES] == [True] * len(YES)
    no = NO[:-1] if "grammar" in fields.get("structured_outputs", {}) else NO  # spaces are its own affair
    assert [accepts(made, text) for text in no] == [False] * len(no)


OBJECT: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"response_format": {"type": "json_object"}}),
    ("completions", {"response_format": {"type": "json_object"}}),
    ("tokens", {"structured_outputs": {"json_object": True}}),
    ("sglang", {"json_schema": "$$ANY$$"}),
]


@pytest.mark.parametrize(("route", "fields"), OBJECT)
async def test_any_object(client, replicas, route, fields):
    made = await grammar(client, replicas, *of(route, fields))
    assert accepts(made, '{"x": [1, {"y": null}], "é": "ü\\n"}')
    assert not accepts(made, "[]")
    assert not accepts(made, "3")


async def test_any_object_and_a_schema_of_objects_are_the_schema(client, replicas):
    """As instructor sends it: its own response_format, and what its user has put beside it."""
    fields = {"response_format": {"type": "json_object"}, "structured_outputs": {"json": SCHEMA}}
    made = await grammar(client, replicas, *of("chat", fields))
    assert [accepts(made, text) for text in (*YES, *NO)] == [True] * len(YES) + [False] * len(NO)
    fields["structured_outputs"] = {"json": {"type": "array"}}
    assert (await client.post("/v1/chat/completions", json=of("chat", fields)[1])).status_code == 400


REGEX: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"guided_regex": r"\d{3}/[a-c]+"}),
    ("completions", {"regex": r"\d{3}/[a-c]+"}),
    ("tokens", {"structured_outputs": {"regex": r"\d{3}/[a-c]+"}}),
    ("sglang", {"regex": r"\d{3}/[a-c]+"}),
    ("trl", {"guided_decoding_regex": r"\d{3}/[a-c]+"}),
    ("trl", {"structured_outputs_regex": r"\d{3}\/[a-c]+"}),
    ("native", {"constraint": {"regex": r"\d{3}/[a-c]+"}}),
]


@pytest.mark.parametrize(("route", "fields"), REGEX)
async def test_a_regular_expression(client, replicas, route, fields):
    made = await grammar(client, replicas, *of(route, fields))
    assert accepts(made, "123/abc")
    assert not accepts(made, "123abc")
    assert not accepts(made, "x123/abc")


CHOICE: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"guided_choice": ["yes", 'no "x"\\', "né"]}),
    ("tokens", {"structured_outputs": {"choice": ["yes", 'no "x"\\', "né"]}}),
    ("native", {"constraint": {"choice": ["yes", 'no "x"\\', "né"]}}),
]


@pytest.mark.parametrize(("route", "fields"), CHOICE)
async def test_a_choice(client, replicas, route, fields):
    made = await grammar(client, replicas, *of(route, fields))
    assert all(accepts(made, text) for text in ("yes", 'no "x"\\', "né"))
    assert not any(accepts(made, text) for text in ("ye", "yes ", "no", "maybe"))


@pytest.mark.parametrize("count", [1, 2, 4096])
async def test_as_many_choices_as_may_be_sent_can_be_followed(client, replicas, count):
    made = await grammar(client, replicas, *of("chat", {"guided_choice": [f"choice {i}." for i in range(count)]}))
    assert all(accepts(made, f"choice {i}.") for i in (0, count - 1))
    assert not any(accepts(made, text) for text in ("choice", f"choice {count}.", "choice 0.choice 0."))


ODD = [
    "\x00",
    "\t",
    "\n",
    "\r\n",
    "\x1b[0m",
    "\x7f",
    "\x85",
    "\u2028",
    "😀",
    '"',
    "\\",
    "/",
    "//",
    "#",
    " ",
    "{}",
    "%",
    "a|b",
]


@pytest.mark.parametrize("text", ODD, ids=ascii)
async def test_a_choice_is_any_text(client, replicas, text):
    made = await grammar(client, replicas, *of("native", {"constraint": {"choice": [text, "x"]}}))
    assert accepts(made, text)
    assert not accepts(made, text + text)


SUMS = {"lark": 'start: n ("+" n)*\nn: /[0-9]+/', "gbnf": 'root ::= n ("+" n)*\nn ::= [0-9]+'}
GRAMMAR: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"guided_grammar": SUMS["lark"]}),
    ("completions", {"ebnf": SUMS["gbnf"]}),
    ("tokens", {"structured_outputs": {"grammar": SUMS["gbnf"]}}),
    ("sglang", {"ebnf": SUMS["gbnf"]}),
    ("native", {"constraint": {"grammar": SUMS["lark"]}}),
]


@pytest.mark.parametrize(("route", "fields"), GRAMMAR)
async def test_a_grammar(client, replicas, route, fields):
    made = await grammar(client, replicas, *of(route, fields))
    assert accepts(made, "1+23+4")
    assert not accepts(made, "1+")


TAGS = {
    "structures": [
        {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("chat", {"response_format": {"type": "structural_tag"} | TAGS}),
        ("tokens", {"structured_outputs": {"structural_tag": json.dumps(TAGS)}}),
        ("sglang", {"structural_tag": json.dumps(TAGS)}),
    ],
)
async def test_structural_tags(client, replicas, route, fields):
    made = await grammar(client, replicas, *of(route, fields))
    assert all(accepts(made, text) for text in ("just text", 'so: <f=a>{"a": 1}</f> and <f=b>3</f>.', ""))
    assert not any(accepts(made, text) for text in ("<f=a>{}</f>", "<f=c>3</f>", "<f=b>3"))


async def test_options_of_json(client, replicas):
    compact = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    made = await grammar(client, replicas, *of("tokens", compact))
    assert accepts(made, '{"a":1}')
    assert not accepts(made, '{"a": 1}')
    loose = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for closed in (False, True):
        fields = {"structured_outputs": {"json": loose, "disable_additional_properties": closed}}
        made = await grammar(client, replicas, *of("tokens", fields))
        assert accepts(made, '{"a": 1, "b": 2}') is not closed


# tools that have to be called

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "say",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "loud": {"type": "boolean"},
                    "to": {"type": "string", "enum": ["all", "me"]},
                },
                "required": ["text"],
            },
        },
    },
]
ADD, NOW = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


async def forced(client, replicas, **fields: Any) -> str:
    return await grammar(client, replicas, *of("chat", {"tools": TOOLS, "tool_choice": "required"} | fields))


async def test_calls_that_are_required(client, replicas):
    made = await forced(client, replicas)
    assert all(accepts(made, text) for text in (ADD, NOW, f"{ADD}\n{NOW}\n{ADD}"))
    assert not any(accepts(made, text) for text in ("", "Sure.", f"Sure.\n{ADD}", ADD.replace("1", '"1"'), ADD + ADD))
    assert not accepts(made, ADD.replace('"a": 1', '"a": 1, "b": 2'))
    one = await forced(client, replicas, parallel_tool_calls=False)
    assert accepts(one, ADD)
    assert not accepts(one, f"{ADD}\n{NOW}")


async def test_the_tool_that_is_named(client, replicas):
    made = await forced(client, replicas, tool_choice=named("now"))
    assert accepts(made, NOW)
    assert not accepts(made, ADD)
    assert not accepts(made, f"{NOW}\n{NOW}")


async def test_tools_beside_a_format(client, replicas):
    """Either calls, or what the answer has to look like."""
    fields = {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    made = await grammar(client, replicas, *of("chat", fields))
    assert all(accepts(made, text) for text in ('{"a": 1}', ADD))
    assert not accepts(made, "Sure.")
    made = await grammar(client, replicas, *of("chat", fields | {"tool_choice": "none"}))
    assert accepts(made, '{"a": 1}')
    assert not accepts(made, ADD)


@pytest.mark.parametrize(
    ("form", "yes", "no"),
    [
        (
            "llama3_json",
            [
                '{"name": "add", "parameters": {"a": 1}}',
                '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
            ],
            ['{"name": "add", "arguments": {"a": 1}}'],
        ),
        (
            "qwen3_coder",
            [
                "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
                "<tool_call>\n<function=now>\n</function>\n</tool_call>",
                "<tool_call>\n<function=say>\n<parameter=text>\na < b\n\nc\n</parameter>\n"
                "<parameter=loud>\ntrue\n</parameter>\n<parameter=to>\nme\n</parameter>\n</function>\n</tool_call>",
            ],
            [
                "<tool_call>\n<function=add>\n</function>\n</tool_call>",
                "<tool_call>\n<function=add>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
                "<tool_call>\n<function=say>\n<parameter=text>\nx\n</parameter>\n<parameter=to>\nyou\n</parameter>\n"
                "</function>\n</tool_call>",
            ],
        ),
        ("ernie45", [ADD, f"{ADD}\n{NOW}"], ["x"]),
    ],
)
async def test_calls_are_forced_as_the_model_writes_them(service, client, replicas, form, yes, no):
    object.__setattr__(service.model, "tool_format", form)
    made = await forced(client, replicas)
    assert [accepts(made, text) for text in yes] == [True] * len(yes)
    assert [accepts(made, text) for text in no] == [False] * len(no)
    reader = FORMATS[form](TOOLS)
    parts = reader.push(yes[-1]) + reader.finish()
    assert any(isinstance(part, Call) for part in parts)  # what it is held to is what is read


async def test_reasoning_comes_before_what_is_held(service, client, replicas):
    fields = {"response_format": {"type": "json_object"}}
    object.__setattr__(service.model, "reasons", True)
    may = await grammar(client, replicas, *of("chat", fields))
    assert all(accepts(may, text) for text in ("{}", "<think>\nhm {\n</think>\n\n{}", "<think></think>{}"))
    assert not any(accepts(may, text) for text in ("hm</think>{}", "<think>hm", "<think>hm</think>x"))
    opened = await grammar(client, replicas, *of("chat", fields | {"messages": [{"role": "user", "content": "think"}]}))
    assert accepts(opened, "hm\n</think>\n\n{}")
    assert not accepts(opened, "{}")


@pytest.mark.parametrize(
    ("route", "fields", "said"),
    [
        ("chat", {"guided_json": {}, "guided_regex": "x"}, "one way only"),
        ("chat", {"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ("chat", {"response_format": {"type": "yaml"}}, "response_format"),
        ("chat", {"structured_outputs": {}}, "say one of"),
        ("tokens", {"structured_outputs": {"json": {}, "json_object": True}}, "two constraints"),
        ("tokens", {"structured_outputs": {"json": "no JSON"}}, "is JSON"),
        ("tokens", {"structured_outputs": {"json": "3"}}, "a JSON schema is an object"),
        ("tokens", {"structured_outputs": {"regex": ""}}, "regex"),
        ("tokens", {"structured_outputs": {"choice": []}}, "choice"),
        ("sglang", {"regex": "x", "ebnf": "root ::= x"}, "one way only"),
        ("sglang", {"ebnf": "this is no grammar"}, "neither Lark nor EBNF"),
        ("native", {"constraint": {"grammar": 'start: "a" start'}}, "no end: each alternative of rule 'start'"),
        ("sglang", {"ebnf": 'root ::= "a" root'}, "no end"),
        ("chat", {"guided_grammar": '{"grammars": [{"lark_grammar": "start: /a+/ start"}]}'}, "no end"),
        ("chat", {"guided_grammar": '{"grammars": [5]}'}, '{"grammars": [...]}'),
        ("chat", {"guided_grammar": '{"grammars": {}}'}, '{"grammars": [...]}'),
        ("native", {"constraint": {"grammar": '{"grammars": [5]}'}}, '{"grammars": [...]}'),
        ("native", {"constraint": {"grammar": "{"}}, '{"grammars": [...]}'),
        ("sglang", {"structural_tag": "{}"}, "structures with triggers"),
        ("native", {"constraint": {}}, "send one of"),
        ("native", {"constraint": {"regexp": "x"}}, "regexp"),
        ("native", {"constraint": {"choice": ["x" * 300_000]}}, "too long"),
        ("chat", {"tools": TOOLS, "tool_choice": "required", "guided_regex": "x"}, "not both"),
    ],
)
async def test_what_is_no_constraint_is_said_before_anything_runs(client, replicas, route, fields, said):
    path, body = of(route, fields)
    reply = await client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert said in reply.json()["error"]["message"]
    assert not replicas[0].got(Generate)


# A limit that falls into a callback of the garbage collection, or of a weak reference, is told, and comes again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_grammar_whose_end_is_not_found_in_time_is_refused(client, replicas, monkeypatch):
    monkeypatch.setattr("api.constraint._TRANSLATION_S", 0.001)
    path, body = of("native", {"constraint": {"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000}})
    reply = await client.post(path, json=body)
    assert (reply.status_code, "too long to read" in reply.text) == (400, True)
    assert not replicas[0].got(Generate)


async def test_nothing_asked_is_no_grammar(client, replicas):
    for route, fields in (("chat", {"response_format": {"type": "text"}}), ("sglang", {"regex": None}), ("native", {})):
        assert await grammar(client, replicas, *of(route, fields)) == ""


async def test_a_rendered_request_has_it(client, replicas):
    for path, body in (of("chat", {"guided_json": SCHEMA}), of("completions", {"ebnf": SUMS["gbnf"]})):
        rendered = (await client.post(f"{path}/render", json=body)).json()
        made = rendered[0] if isinstance(rendered, list) else rendered
        there = await grammar(client, replicas, "/inference/v1/generate", made)
        assert there == await grammar(client, replicas, path, body)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "llama3_json", "ernie45"])
@pytest.mark.parametrize(
    "parameters",
    [
        *([], [1], "x", 5, True, {"type": 5}, {"properties": 5}, {"properties": [1]}, {"properties": {"a": 5}}),
        *({"properties": {"a": {}}, "required": r} for r in (5, None, True, "a", {"a": 1}, [5], [["a"]])),
        *({"properties": {"a": {"enum": e}}} for e in (5, None, "xy", {"a": 1}, [], [5], [""], [None])),
        *({"properties": {"a": {"type": t}}} for t in (5, None, [], ["string", "null"], {"a": 1})),
        *({"$defs": 5}, {"properties": {"a": {"$ref": "#/$defs/a"}}}, {"properties": {"": {}}}, {"x-guidance": 5}),
        *({"properties": {"a": {"const": 5}}}, {"properties": {"a>\n<": {}}}, {"properties": {"properties": {}}}),
    ],
    ids=json.dumps,
)
async def test_parameters_of_any_form_are_a_grammar_or_a_400(service, client, replicas, form, parameters):
    object.__setattr__(service.model, "tool_format", form)
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    path, body = of("chat", {"tools": tools, "tool_choice": "required"})
    reply = await client.post(path, json=body)
    if not isinstance(parameters, dict):
        assert "parameters" in reply.json()["error"]["message"]
    if reply.status_code != 400:
        assert reply.status_code == 200, reply.text
        assert compiled(replicas[0].got(Generate)[-1].sampling.grammar)  # or it is refused there


SLOW_TO_READ = {
    "empty lines": "\n" * 250_000,
    "empty lines after start": "start" + "\n" * 250_000,
    "brackets": "start[\n" * 35_000,
    "empty lines of EBNF": 'root ::= "a"\n' + "\n" * 16_000,
}


@pytest.mark.parametrize("text", SLOW_TO_READ.values(), ids=SLOW_TO_READ)
async def test_a_grammar_is_read_in_a_bearable_time_whatever_it_is(client, text):
    path, body = of("native", {"constraint": {"grammar": text}})
    began = time.process_time()
    reply = await client.post(path, json=body)
    assert time.process_time() - began < 3, "in which nobody else was answered"
    assert (reply.status_code, "EBNF" in reply.text) == (400, True)

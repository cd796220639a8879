"""Whatever the request schemas of vLLM, SGLang and OpenAI list is done, refused by its name, or called harmless."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from api.fields import HARMLESS, MISPLACED, REFUSED
from scripts.peer_fields import FACTS
from scripts.render_dialects import BODIES
from weight_manager.messages import ReadTensor, Result
from worker.messages import Generate

HI = [{"role": "user", "content": "A"}]
PEERS: dict[str, Any] = json.loads(FACTS.read_text())
OF_NO_LIST = {
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_regex"),
    *("structured_outputs_regex", "images", "logits_processors", "reasoning"),
}
"""Names of older releases, or that a server reads without listing them."""

UNDONE = {
    "/pause_generation": "/continue_generation",
    "/release_memory_occupation": "/resume_memory_occupation",
}
"""What a test of a control route asks for next, so that the others are answered."""
CONTROL = {*UNDONE, *UNDONE.values(), "/weights_checker"}


@pytest.fixture(autouse=True)
def a_tensor(store):
    data = {"dtype": "float32", "shape": [1], "version": 0, "epoch": 1, "digest": "d" * 16, "bytes": bytes(4)}
    store.results[ReadTensor] = Result("", True, data=data)


def listed() -> Iterator[tuple[str, str, str]]:
    """(project, route or part, field)."""
    for project, facts in PEERS.items():
        for part, names in facts["bodies"].items():
            for name in names:
                yield project, part, name


def valid(part: str, field: str, value: Any) -> tuple[str, dict[str, Any]]:
    """A route, and a body that is right but for this field."""
    match part:
        case "/v1/completions":
            return part, {"prompt": "A", "max_tokens": 1, field: value}
        case "/v1/chat/completions":
            return part, {"messages": HI, "max_tokens": 1, field: value}
        case "stream_options":
            return "/v1/completions", {"prompt": "A", "max_tokens": 1, part: {field: value}}
        case "/inference/v1/generate":
            return part, {"token_ids": [65], "sampling_params": {"max_tokens": 1}, field: value}
        case "/inference/v1/generate sampling_params":
            return "/inference/v1/generate", {"token_ids": [65], "sampling_params": {"max_tokens": 1, field: value}}
        case "/generate":
            return part, {"text": "A", "sampling_params": {"max_new_tokens": 1}, field: value}
        case "/generate sampling_params":
            return "/generate", {"text": "A", "sampling_params": {"max_new_tokens": 1, field: value}}
        case "/tokenize":
            return part, {"prompt": "A", field: value}
        case "/detokenize":
            return part, {"tokens": [65], field: value}
        case "/update_weights_from_disk":
            return part, {"model_path": "/ckpt", field: value}
        case "/update_weight_version":
            return part, {"new_version": "a", field: value}
        case "/abort_request":
            return part, {"abort_all": True, field: value}
        case "/get_weights_by_name":
            return part, {"name": "w", field: value}
        case _ if part in CONTROL:
            return part, {field: value}
    raise AssertionError(part)


@pytest.mark.parametrize(("project", "part"), [(p, part) for p, facts in PEERS.items() for part in facts["bodies"]])
def test_every_listed_field_is_decided(project, part):
    done = BODIES[part].model_fields.keys()
    undecided = set(PEERS[project]["bodies"][part]) - done - REFUSED.keys() - HARMLESS.keys()
    assert not undecided, f"decide in api/fields.py, or do: {sorted(undecided)}"


def test_nothing_is_decided_twice_or_for_nobody():
    assert not (REFUSED.keys() | MISPLACED.keys()) & HARMLESS.keys()
    assert not REFUSED.keys() & MISPLACED.keys()
    names = {name for _, _, name in listed()} | OF_NO_LIST
    assert not (REFUSED.keys() | MISPLACED.keys() | HARMLESS.keys()) - names


GENERATING = (
    *("/v1/completions", "/v1/chat/completions", "/generate", "/generate sampling_params"),
    *("/inference/v1/generate", "/inference/v1/generate sampling_params"),
)
OF_THE_REPORT = {
    *("model", "request_id", "session_id", "stream_options", "truncation_side", "return_token_ids"),
    *("return_tokens_as_token_ids", "return_text_in_logprobs", "return_prompt_text"),
}
"""Names, the form of what is reported in any case, and what goes with a field that is refused itself."""


@pytest.mark.parametrize("part", GENERATING)
def test_a_field_of_another_route_is_decided_too(part):
    """Clients are moved from one dialect to the next, and put fields beside sampling_params that belong into them."""
    everywhere = {name for _, other, name in listed() if other in GENERATING}
    decided = REFUSED.keys() | MISPLACED.keys() | HARMLESS.keys()
    undecided = everywhere - BODIES[part].model_fields.keys() - decided
    assert undecided <= OF_THE_REPORT


@pytest.mark.parametrize("part", GENERATING)
async def test_a_field_of_another_route_is_refused_by_its_name(client, part):
    asked = 0
    for name in {name for _, other, name in listed() if other in GENERATING}:
        if name in REFUSED | MISPLACED and name not in BODIES[part].model_fields:
            path, body = valid(part, name, "x")
            reply = await client.post(path, json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), reply.text
            asked += 1
    assert asked > 20


async def test_what_changes_the_answer_is_refused_by_its_name(client):
    """Every field of every list, on its own route."""
    asked = 0
    for project, part, name in listed():
        if name in REFUSED and name not in BODIES[part].model_fields:
            path, body = valid(part, name, "x")
            reply = await client.post(path, json=body)
            assert reply.status_code == 400, (project, part, name, reply.text)
            error = reply.json()["error"]
            assert error["message"] == f"{name}: {REFUSED[name].advice}", (project, part, name)
            assert error["param"] == name
            asked += 1
    assert asked > 90


async def test_what_asks_for_nothing_is_accepted(client):
    for _, part, name in listed():
        if name in REFUSED and name not in BODIES[part].model_fields:
            for value in (None, False, [], [None], *REFUSED[name].unless):
                path, body = valid(part, name, value)
                reply = await client.post(path, json=body)
                assert reply.status_code == 200, (part, name, value, reply.text)


async def test_what_leaves_the_answer_as_it_is_is_accepted(client, replicas, store):
    for _, part, name in listed():
        if name in HARMLESS and name not in BODIES[part].model_fields:
            path, body = valid(part, name, "x")
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, (part, name, reply.text)
            for replica in replicas:
                replica.move(replica.state, store.live.version)  # as they do when a directory was loaded
            if path in UNDONE:
                assert (await client.post(UNDONE[path])).status_code == 200


@pytest.mark.parametrize("part", ["/v1/completions", "/v1/chat/completions", "/generate sampling_params"])
async def test_what_nobody_lists_is_accepted(client, part):
    path, body = valid(part, "a_field_of_next_year", "x")
    assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "function": {"name": "f"}}, None])
async def test_tools_are_refused_where_calls_are_not_read_out(client, choice):
    body = {"messages": HI, "max_tokens": 1, "tools": [{"type": "function", "function": {"name": "f"}}]}
    reply = await client.post("/v1/chat/completions", json=body | {"tool_choice": choice})
    assert reply.status_code == 400
    assert "tool_choice" in reply.json()["error"]["message"]
    assert '"none"' in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", ["self", "args", "kwargs", "template", "read", "namespace", "__class__", ""])
async def test_a_chat_template_is_given_variables_of_any_name(client, name):
    body = {"messages": HI, "max_tokens": 1, "chat_template_kwargs": {name: 1}}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_tools_in_the_prompt_only(client):
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": HI, "max_tokens": 1, "tools": tools, "tool_choice": "none"}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", ["request_id", "rid"])
async def test_a_request_s_id_under_both_names(client, replicas, path, name):
    _, body = valid(path, name, "mine")
    assert (await client.post(path, json=body)).json()["id"] == "mine"


@pytest.mark.parametrize("part", ["/v1/completions", "/v1/chat/completions", "/generate", "/inference/v1/generate"])
async def test_requests_of_one_session_go_to_one_replica(client, replicas, until, part):
    """Also while it has more to do than the other."""
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    path, body = valid(part, "session_id", "s")
    asked = [asyncio.create_task(client.post(path, json=body)) for _ in range(4)]
    await until(lambda: sum(len(replica.running) for replica in replicas) == 4)
    assert sorted(len(replica.running) for replica in replicas) == [0, 4]
    for replica in replicas:
        for _ in asked:
            replica.gate.release()
    assert [reply.status_code for reply in await asyncio.gather(*asked)] == [200] * 4


async def test_salts_of_a_batch(client, replicas):
    body = {"text": ["A", "B"], "cache_salt": ["a", "b"], "sampling_params": {"max_new_tokens": 1}}
    assert (await client.post("/generate", json=body)).status_code == 200
    got = {tuple(m.prompt_ids): m.cache_salt for replica in replicas for m in replica.got(Generate)}
    assert got == {(65,): "a", (66,): "b"}


@pytest.mark.parametrize("part", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
async def test_usage_of_every_event(client, part):
    path, body = valid(part, "stream", True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body.setdefault("sampling_params", body)["max_tokens"] = 3
    body = {k: v for k, v in body.items() if v is not body} | {"stream_options": options}
    text = (await client.post(path, json=body)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events if "usage" in event]
    assert counts[-2:] == [3, 3]  # of the last event with tokens, and of the one that ends the stream
    assert counts[:-1] == sorted(set(counts))


async def test_what_a_chat_template_is_given(client, model, monkeypatch):
    seen: list[dict[str, Any]] = []

    rendering = model.tokenizer.rendering

    def noted(messages, **variables):
        seen.append(variables)
        return rendering(messages, **variables)

    monkeypatch.setattr(model.tokenizer, "rendering", noted)
    documents = [{"title": "t", "text": "words"}]
    body = {"messages": HI, "max_tokens": 1, "documents": documents, "reasoning_effort": "low"}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert seen[0]["documents"] == documents
    assert (seen[0]["reasoning_effort"], seen[0]["enable_thinking"]) == ("low", True)
    body |= {"reasoning_effort": "none"}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert seen[1]["enable_thinking"] is False


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"text": "A", "temperature": 0}, "temperature: it belongs into sampling_params"),
        ({"input_ids": [65], "max_tokens": 1}, "max_tokens: it belongs into sampling_params"),
        ({"prompts": ["A"], "max_tokens": 1, "stream": True}, "stream: with prompts it is not read"),
        ({"prompts": ["A"], "max_tokens": 1, "sampling_params": {"n": 2}}, "sampling_params: with prompts"),
        ({"prompts": ["A"], "generation_kwargs": {"suffix": "x"}}, "suffix: "),
        ({"prompts": ["A"], "images": ["x"]}, "images: "),
    ],
)
async def test_neither_form_of_generate_reads_the_other_s_fields(client, body, says):
    reply = await client.post("/generate", json=body)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize("stop", ["", [""], ["", "x"]])
@pytest.mark.parametrize("part", ["/v1/completions", "/v1/chat/completions", "/generate sampling_params"])
async def test_an_empty_stop_stops_nothing_however_it_is_said(client, replicas, part, stop):
    path, body = valid(part, "stop", stop)
    assert (await client.post(path, json=body)).status_code == 200
    (message,) = [m for replica in replicas for m in replica.got(Generate)]
    assert message.sampling.stop == [s for s in stop if s]


@pytest.mark.parametrize(
    "part", ["/v1/completions", "/inference/v1/generate sampling_params", "/generate sampling_params"]
)
async def test_min_p_may_be_one(client, part):
    path, body = valid(part, "min_p", 1.0)
    assert (await client.post(path, json=body)).status_code == 200


async def test_what_is_wrong_with_a_field_names_it(client):
    reply = await client.post("/v1/completions", json={"prompt": "A", "temperature": -1})
    assert reply.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_that_the_chat_template_wrote(client, stream):
    body = {"messages": HI, "max_tokens": 1, "return_prompt_text": True, "stream": stream}
    text = (await client.post("/v1/chat/completions", json=body)).text
    first = json.loads(text.split("\n\n")[0].removeprefix("data: "))
    assert first["prompt_text"] == "u:A;a:"
    del body["return_prompt_text"]
    assert "prompt_text" not in (await client.post("/v1/chat/completions", json=body)).text

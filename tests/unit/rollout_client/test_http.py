import json
import socket

import httpx
import msgspec
import numpy as np
import pytest

from rollout_client import http
from rollout_client.errors import RolloutError
from rollout_client.http import AsyncRolloutClient, RequestFailed, RolloutClient, Span, Unreachable
from tests.ready_server import ready_server

OUTPUT = {
    "prompt_index": 0,
    "index": 0,
    "token_ids": [4, 5],
    "text": "ab",
    "logprobs": [-0.1, -0.2],
    "finish_reason": "stop",
    "spans": [{"version": 3, "start": 0, "end": 2}],
    "a_field_of_tomorrow": 1,
}
GENERATION = {"request_id": "r", "model": "m", "outputs": [OUTPUT]}


class Server:
    """Stands for the service: records requests and answers from a table of path -> (status, body)."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.replies = {"/v1/rollout/generate": (200, json.dumps(GENERATION))}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        status, body = self.replies[request.url.path]
        return httpx.Response(status, content=body)

    @property
    def body(self) -> dict:
        return json.loads(self.requests[-1].content)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def client(server):
    with RolloutClient(token="secret", transport=httpx.MockTransport(server)) as made:
        yield made


def test_generate_sends_what_was_asked_and_reads_the_reply(client, server):
    result = client.generate(prompt_ids=np.array([[1, 2], [3, 4]]), n=2, max_tokens=8, top_k=5)
    assert server.body == {"n": 2, "max_tokens": 8, "temperature": 1.0, "top_k": 5, "prompt_ids": [[1, 2], [3, 4]]}
    assert server.requests[0].headers["authorization"] == "Bearer secret"
    assert result.outputs[0].spans == [Span(3, 0, 2)]
    assert result.outputs[0].token_ids == [4, 5]


def test_one_prompt_of_numpy_integers(client, server):
    client.generate(prompt_ids=[np.int64(1), np.int64(2)])
    assert server.body["prompt_ids"] == [1, 2]


def test_a_stream_ends_at_done(client, server):
    pieces = f"data: {json.dumps(GENERATION)}\n\n" * 2 + "data: [DONE]\n\n"
    server.replies["/v1/rollout/generate"] = (200, pieces)
    assert [p.outputs[0].text for p in client.stream("hello")] == ["ab", "ab"]
    assert server.body == {"prompt": "hello", "stream": True}


def test_a_late_error_of_a_stream_has_its_status(client, server):
    error = json.dumps({"error": {"code": "Conflict", "message": "no", "status": 409}}, separators=(",", ":"))
    server.replies["/v1/rollout/generate"] = (200, f": keep-alive\n\ndata: {error}\n\ndata: [DONE]\n\n")
    with pytest.raises(RequestFailed) as caught:
        list(client.stream("A"))
    assert (caught.value.status, caught.value.code) == (409, "Conflict")


def test_an_error_inside_a_stream_is_raised(client, server):
    error = json.dumps({"error": {"code": "Unavailable", "message": "gone"}}, separators=(",", ":"))
    server.replies["/v1/rollout/generate"] = (200, f"data: {error}\n\ndata: [DONE]\n\n")
    with pytest.raises(RequestFailed, match="gone"):
        list(client.stream("hello"))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_carries_status_code_and_tensors(client, server, streamed):
    detail = {"message": "prompt is empty", "code": "BadInput", "tensors": ["w"]}
    server.replies["/v1/rollout/generate"] = (400, json.dumps({"error": detail}))
    with pytest.raises(RequestFailed, match="prompt is empty") as caught:
        list(client.stream("")) if streamed else client.generate("")
    assert (caught.value.status, caught.value.code, caught.value.tensors) == (400, "BadInput", ["w"])


def test_a_reply_of_something_else_is_an_error_too(client, server):
    server.replies["/v1/rollout/generate"] = (502, "<html>bad gateway")
    with pytest.raises(RequestFailed, match="bad gateway"):
        client.generate("a")


def test_nobody_listening_is_unreachable():
    with RolloutClient("http://127.0.0.1:9") as client, pytest.raises(Unreachable):
        client.weights()


@pytest.fixture
def listening():
    """The URL of a service on a real socket, which answers /ready."""
    with ready_server({}, "HTTP/1.1") as url:
        yield url


def gives_up_after_s(response):
    """Seconds of silence after which the kernel ends the connection of a reply; infinite if it asks nobody."""
    end = response.extensions["network_stream"].get_extra_info("socket")
    if not end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        return float("inf")
    first, every, times = (
        end.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    return first + every * times


async def test_a_service_whose_host_is_gone_is_not_waited_for_without_end(listening):
    """A reply that takes long has no timeout: the kernel looks whether the other side is there."""
    with RolloutClient(listening) as client:
        assert client.ready() == {}
        assert gives_up_after_s(client._http.get("/ready")) <= 120
    async with AsyncRolloutClient(listening) as client:
        assert await client.ready() == {}
        assert gives_up_after_s(await client._http.get("/ready")) <= 120


@pytest.fixture
def mute():
    """The URL of what takes connections and says nothing, as the port for pushes does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


async def test_what_never_answers_is_not_waited_for_without_end(mute, monkeypatch):
    monkeypatch.setattr(http, "_MEET_S", 0.2)
    monkeypatch.setattr(http, "SILENCE_S", 0.2)
    with RolloutClient(mute) as client:
        with pytest.raises(Unreachable, match="is this the service's HTTP address"):
            client.generate("A")
        with pytest.raises(Unreachable):
            list(client.stream("A"))
    async with AsyncRolloutClient(mute) as client:
        with pytest.raises(Unreachable, match="is this the service's HTTP address"):
            await client.generate("A")
        with pytest.raises(Unreachable):
            _ = [piece async for piece in client.stream("A")]


async def test_a_service_is_met_once(listening, monkeypatch):
    asked = []
    real = httpx.HTTPTransport.handle_request
    monkeypatch.setattr(
        httpx.HTTPTransport, "handle_request", lambda self, r: asked.append(r.url.path) or real(self, r)
    )
    with RolloutClient(listening) as client:
        for _ in range(2):
            with pytest.raises(RolloutError):  # it knows no such route
                client.generate("A")
    assert asked == ["/live", "/v1/rollout/generate", "/v1/rollout/generate"]


def test_control_verbs(client, server):
    state = {"paused": True, "held": 2, "mode": "keep", "lease_left_s": 4.0}
    server.replies |= {
        "/v1/rollout/pause": (200, json.dumps(state)),
        "/v1/rollout/resume": (200, json.dumps(state | {"paused": False})),
        "/v1/rollout/abort": (200, '{"aborted": 3}'),
        "/v1/rollout/weights/load": (200, '{"version": 9, "report": {}}'),
    }
    assert client.pause("keep", lease_s=5).lease_left_s == 4.0
    assert server.body == {"mode": "keep", "lease_s": 5, "clear_cache": True, "deadline_s": 60.0}
    assert client.resume().paused is False
    assert client.abort(["x"]) == 3
    assert client.load_weights("/ckpt", in_flight="abort").version == 9
    assert server.body["in_flight"] == "abort"


async def test_async_client_does_the_same(server):
    weights = {"live": None, "replicas": [], "store_connected": True}
    server.replies["/v1/rollout/weights/wait"] = (200, json.dumps(weights))
    async with AsyncRolloutClient(transport=httpx.MockTransport(server)) as client:
        result = await client.generate("hello")
        assert result == msgspec.convert(GENERATION, type(result))
        assert (await client.wait_for_version(7, timeout_s=1)).store_connected
        assert server.requests[-1].url.params["version"] == "7"
        pieces = f"data: {json.dumps(GENERATION)}\n\ndata: [DONE]\n\n"
        server.replies["/v1/rollout/generate"] = (200, pieces)
        assert len([piece async for piece in client.stream("x")]) == 1


def test_rollback_names_what_is_live_again(client, server):
    server.replies["/v1/rollout/weights/rollback"] = (200, json.dumps({"version": 6, "report": {"seconds": {}}}))
    assert client.rollback(in_flight="recompute").version == 6
    assert server.body == {"in_flight": "recompute", "deadline_s": 60.0}


@pytest.mark.parametrize("prompt", [[[1, 2]], [1, 2], 1, np.array([[1, 2]])], ids=["lists", "list", "id", "array"])
def test_ids_where_the_text_goes_are_told_where_they_go(client, server, prompt):
    for ask in (client.generate, lambda prompt: list(client.stream(prompt))):
        with pytest.raises(TypeError, match=r"prompt is text, or a list of texts; token ids are prompt_ids=\.\.\."):
            ask(prompt)
    assert server.requests == []


@pytest.mark.parametrize("ids", ["hello", ["hello", "there"], [1, "2"], [[1], "2"]])
def test_text_where_the_ids_go_is_told_where_it_goes(client, server, ids):
    with pytest.raises(TypeError, match=r"prompt_ids are whole numbers, not '.*'; text is prompt="):
        client.generate(prompt_ids=ids)
    with pytest.raises(TypeError, match="token_ids are whole numbers, not '"):
        client.score([[1]], ids)
    assert server.requests == []


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda client, version: client.wait_for_version(version), "version"),
        (lambda client, version: client.load_weights("/x", version=version), "version"),
        (lambda client, version: client.load_adapter("x", "/x", version=version), "version"),
        (lambda client, version: client.generate("x", min_weight_version=version), "min_weight_version"),
        (lambda client, version: list(client.stream("x", min_weight_version=version)), "min_weight_version"),
        (lambda client, version: client.score([[1]], [[2]], weight_version=version), "weight_version"),
    ],
)
def test_what_is_no_version_is_said_before_anything_is_sent(client, server, ask, what):
    for version in ("13", 13.0, True):
        with pytest.raises(TypeError, match=f"^{what} is a whole number, not {version!r}"):
            ask(client, version)
    for version in (-1, 2**63):
        with pytest.raises(ValueError, match=f"^{what} {version} is out of range"):
            ask(client, version)
    assert server.requests == []


def test_a_version_may_be_an_integer_of_numpy(client, server):
    client.generate("x", min_weight_version=np.int64(3))
    assert server.body["min_weight_version"] == 3

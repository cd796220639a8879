"""Streams whose events C makes and writes, on real sockets: they say what they say without it, byte for byte."""

import asyncio
import contextlib
import json
import re
import socket
from types import SimpleNamespace

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api import answering, lanes
from api.generation import Flight, Reader
from api.lanes import Holes, Lanes, Words
from api.service import Service
from tests.unit.api.conftest import served
from worker.messages import Chunk, Generate, SamplingParams, Span

TOKENS = 40
SEND_BUFFER = 4096
GET = b"GET /live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
IDS = [*b'a "b"\\\n', *"é€".encode(), *b"xyz", 260, *b"0123456789abcdef<>&'"]
"""Of the tests' byte tokenizer: escapes, parts of characters, and a special token, between plain ones."""


@pytest.fixture
def settings():
    return {"replicas": 1}


@pytest.fixture
async def service(config, model, replicas, store, until, same_signals):
    """Of a whole server, whose streams may have lanes."""
    made = Service(config, model)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    async with served(made, listener) as server:
        made.address, made.clients = listener.getsockname(), []
        made.connections = lambda: server.server_state.connections
        await until(lambda: made.outlet.lanes._library is not None)
        for replica in replicas:
            replica.gate = asyncio.Semaphore(0)
        yield made
        for client in made.clients:
            client.socket.close()


class Client:
    """One stream."""

    def __init__(self, service, path="/v1/rollout/generate", body=None, **more):
        self._address = service.address
        self._path = path
        self.body = (body or {"prompt": "A", "max_tokens": TOKENS}) | {"stream": True} | more
        self.got = b""
        self.socket = socket.socket()
        service.clients.append(self)

    async def start(self, receive_buffer=None):
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.socket, self._address)
        await self.ask(self._path, self.body)
        return self

    async def ask(self, path, body):
        text = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(text)}\r\n\r\n".encode()
        await asyncio.get_running_loop().sock_sendall(self.socket, head + text)

    async def read(self, enough):
        async with asyncio.timeout(30):
            while not enough():
                part = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)
                assert part, self.got
                self.got += part

    async def rest(self):
        await self.read(lambda: b"data: [DONE]" in self.got and self.got.endswith(b"0\r\n\r\n"))

    @property
    def said(self):
        """The body, without its transfer coding."""
        _, _, coded = self.got.partition(b"\r\n\r\n")
        body = b""
        while coded:
            size, _, coded = coded.partition(b"\r\n")
            length = int(size, 16)
            if len(coded) < length + 2:
                break
            assert coded[length : length + 2] == b"\r\n"
            body, coded = body + coded[:length], coded[length + 2 :]
        return body

    @property
    def events(self):
        return [json.loads(e[6:]) for e in self.said.split(b"\n\n") if e.startswith(b"data: {")]

    @property
    def tokens(self):
        return [token for event in self.events for token in event["outputs"][0]["token_ids"]]


def release(replicas, count=1):
    for replica in replicas:
        for _ in range(count):
            replica.gate.release()


def is_open(service):
    return any(lane._is_open for lane in service.outlet.lanes._taken.values())


@pytest.fixture
def by_lane(service):
    """Ids that came out of lanes."""
    through, settle = [], service.outlet.lanes.settle

    def counted(handle):
        found = settle(handle)
        through.extend(found[0])
        return found

    service.outlet.lanes.settle = counted
    return through


async def in_turns(replicas, client, tokens=TOKENS, each=1, before=0):
    """Each token when the one before it has been said and a lane had the time to open.

    each: events of a token. before: those that go before the first.
    """
    for made in range(1, tokens + 1):
        release(replicas)
        wanted = before + each * made
        if made == tokens:
            await client.rest()
        else:
            await client.read(lambda wanted=wanted: client.said.count(b"data: {") >= wanted)
        await turns()


async def turns():
    """Of the loop: what a stream gave to its transport is written, and its lane is open if it may be."""
    for _ in range(5):
        await asyncio.sleep(0)


SAMPLING = {"max_tokens": len(IDS)}
RUNNING = {"include_usage": True, "continuous_usage_stats": True}
ONE = {"request_id": "one"}
ROUTES = {
    "native": ("/v1/rollout/generate", ONE, True),
    "completions": ("/v1/completions", ONE | {"logprobs": 0, "return_token_ids": True}, True),
    "completions plain": ("/v1/completions", ONE, True),
    "completions by id": ("/v1/completions", ONE | {"logprobs": 0, "return_tokens_as_token_ids": True}, True),
    "completions counted": ("/v1/completions", ONE | {"stream_options": {"include_usage": True}}, True),
    "completions echoed": ("/v1/completions", ONE | {"logprobs": 0, "echo": True}, True),
    "chat": ("/v1/chat/completions", ONE | {"logprobs": True}, True),
    "chat plain": ("/v1/chat/completions", ONE | {"stream_options": {"include_usage": True}}, True),
    "tokens": ("/inference/v1/generate", ONE | {"token_ids": [65], "sampling_params": SAMPLING}, True),
    "native with special": ("/v1/rollout/generate", ONE | {"skip_special_tokens": False}, True),
    "stop strings": ("/v1/rollout/generate", ONE | {"stop": ["never"]}, False),
    "others' logprobs": ("/v1/rollout/generate", ONE | {"logprobs": 2}, False),
    "counted as it goes": (
        "/v1/completions",
        ONE | {"stream_options": RUNNING},
        False,
    ),
    "sglang": ("/generate", {"rid": "one", "text": "A", "sampling_params": {"max_new_tokens": len(IDS)}}, False),
    "two samples": ("/v1/rollout/generate", ONE | {"n": 2}, False),
}


@pytest.mark.parametrize("route", ROUTES)
async def test_what_is_said_is_what_is_said_without_lanes(service, replicas, until, by_lane, route):
    path, more, fits = ROUTES[route]
    replicas[0].script = IDS
    body = dict(more) if "sampling_params" in more else {"max_tokens": len(IDS)} | more
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "hi"}]
    elif "sampling_params" not in more:
        body["prompt"] = "A"
    said = []
    for with_lanes in (True, False):
        if not with_lanes:
            service.outlet.lanes.unload()
        client = await Client(service, path, body).start()
        await in_turns(replicas, client, len(IDS), more.get("n", 1), int("chat" in path))
        said.append(re.sub(rb'"(created|e2e_latency)":[\d.e-]+', b"", client.said))
        await until(lambda: not service.generations._jobs)
    at = next((i for i, (a, b) in enumerate(zip(*said, strict=False)) if a != b), 0)
    assert said[0] == said[1], (said[0][at - 200 : at + 50], said[1][at - 200 : at + 50])
    plain = {token for token in IDS if token < 128}
    if fits:
        assert len(by_lane) > len(IDS) * 0.6, "lanes were open"
        assert set(by_lane) <= plain or route == "tokens", "which has no text"
    else:
        assert not by_lane


async def test_numbers_are_written_as_json_writes_them(model):
    """Tokens and logprobs of any length, to a socket."""
    ours, theirs = socket.socketpair()
    lanes, words = await table(model)
    values = [-0.0, -1e-9, -123456.789012345, -1e300, -0.1, -2.2250738585072014e-308]
    lane = opened(lanes, words, ours)
    for number, value in enumerate(values):
        assert list(taken(lanes, [lane], [number], [value])) == []
        lanes.say(1.0)
    got = theirs.recv(1 << 16)
    assert got == b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in (event(i, v, i + 1) for i, v in enumerate(values)))
    assert lanes.settle(lane) == (list(range(len(values))), values, False)
    assert lanes.said_at(lane) == 1.0
    lanes.unload()
    ours.close(), theirs.close()


def event(token, logprob, length, before=b""):
    return answering.event([before.decode(), [token], [logprob], length])


async def table(model, before=b""):
    made = Lanes(model, lambda: None)
    await made.load()
    pattern = answering.event([before.decode(), [Holes.token], [Holes.logprob], Holes.length])
    return made, Words(lambda chunk: b"", lambda chunk: pattern)


def opened(lanes, words, to):
    to.setblocking(False)
    handle = lanes._library.take(lanes._table)
    lanes._taken[handle] = _Stuck(lanes, handle)
    assert lanes.open(handle, to.fileno(), 0, 0, words.pattern(None))
    return handle


class _Stuck:
    """In place of a Lane: what it was asked to do."""

    def __init__(self, lanes, handle):
        self._lanes, self._handle = lanes, handle
        self.found, self.rest = None, b""

    def settle(self):
        self.found = self._lanes.settle(self._handle)

    def close(self):
        pass

    def write_rest(self, rest):
        self.rest += rest


def taken(lanes, handles, tokens, logprobs):
    from array import array

    from worker.messages import Tokens

    message = Tokens(array("i", tokens).tobytes(), array("d", logprobs).tobytes())
    return lanes.take_in(array("q", handles), message, tuple(logprobs))


async def test_what_a_socket_takes_a_part_of_is_handed_over_with_the_rest(model):
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    lanes, words = await table(model, b"x" * 500_000)
    lane = opened(lanes, words, ours)
    assert list(taken(lanes, [lane], [7], [-0.5])) == []
    lanes.say(1.0)
    stuck = lanes._taken[lane]
    assert stuck.found == ([7], [-0.5], False), "it counts as said"
    whole = event(7, -0.5, 1, b"x" * 500_000)
    begun = theirs.recv(1 << 20)
    assert 0 < len(begun) < len(whole)
    assert begun + stuck.rest == b"%x\r\n%b\r\n" % (len(whole), whole)
    assert list(taken(lanes, [lane], [8], [-0.5])) == [0], "what comes then is the stream's"
    lanes.unload()
    ours.close(), theirs.close()


async def test_what_a_socket_does_not_take_is_the_streams(model):
    ours, theirs = socket.socketpair()
    lanes, words = await table(model)
    full, gone = opened(lanes, words, ours), None
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(b"x" * 4096)
    ours2, theirs2 = socket.socketpair()
    gone = opened(lanes, words, ours2)
    theirs2.close()
    assert list(taken(lanes, [full, gone], [7, 9], [-0.5, -0.25])) == []
    lanes.say(1.0)
    assert lanes._taken[full].found == ([7], [-0.5], True)
    assert lanes._taken[gone].found == ([9], [-0.25], True)
    assert not lanes._taken[full].rest + lanes._taken[gone].rest
    lanes.unload()
    ours.close(), theirs.close(), ours2.close()


async def test_a_second_token_before_the_first_is_said_is_the_streams(model):
    ours, theirs = socket.socketpair()
    lanes, words = await table(model)
    lane = opened(lanes, words, ours)
    assert list(taken(lanes, [lane, 0], [7, 1], [-0.5, -1.0])) == [1]
    assert list(taken(lanes, [lane], [8], [-0.5])) == [0]
    assert lanes.settle(lane) == ([7], [-0.5], True)
    assert lanes.open(lane, ours.fileno(), 1, 0, words.pattern(None))
    assert list(taken(lanes, [lane], [9], [-0.5])) == []
    lanes.say(1.0)
    whole = event(9, -0.5, 2)
    assert theirs.recv(1 << 16) == b"%x\r\n%b\r\n" % (len(whole), whole), "once, though it was due twice"
    lanes.unload()
    ours.close(), theirs.close()


async def test_a_handle_of_a_lane_that_was_given_back_fits_no_other(model):
    ours, theirs = socket.socketpair()
    lanes, words = await table(model)
    handles = [opened(lanes, words, ours) for _ in range(40)]
    lanes.give_back(type("", (), {"handle": handles[3]}))
    new = opened(lanes, words, ours)
    assert new not in handles
    assert list(taken(lanes, [handles[3], new], [1, 2], [-0.5, -0.5])) == [0]
    lanes.say(1.0)
    assert b"[2]" in theirs.recv(1 << 16)
    lanes.unload()
    ours.close(), theirs.close()


async def test_what_was_not_said_stirs_the_stream(model):
    """Nothing else may come after it for a long time."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    lanes, words = await table(model)
    flight, stirred = Flight(Generate("r", [1], SamplingParams(), stream=True)), []
    reader = Reader(flight, 0, stirred.append, words.event)
    flight.add(Chunk("r", 0, [5], [-1.0], [Span(0, 0, 1)]))
    lane = lanes.take(flight, reader, words)
    lane.open(ours.fileno(), reader.take())
    assert lane._is_open
    assert list(taken(lanes, [lane.handle], [6], [-2.0])) == []
    lanes.say(1.0)
    assert list(taken(lanes, [lane.handle], [7], [-3.0])) == []
    theirs.close()
    assert stirred == [reader]
    lanes.say(1.0)
    assert stirred == [reader] * 2
    assert (reader.take().token_ids, flight.samples[0].token_ids) == ([7], [5, 6, 7])
    lanes.unload()
    ours.close()


async def test_a_socket_is_given_out_when_nothing_waits_on_its_connection(service, until):
    """Or what waits would come after what the lane says."""
    _, writer = await asyncio.open_connection(*service.address)
    await until(service.connections)
    (connection,) = service.connections()
    cycle = SimpleNamespace(chunked_encoding=True, response_complete=False, response_started=True)
    assert connection._idle_socket(cycle, lambda: None) >= 0
    for name, value in (("chunked_encoding", None), ("response_complete", True), ("response_started", False)):
        assert connection._idle_socket(SimpleNamespace(**vars(cycle) | {name: value}), lambda: None) == -1
    connection.transport.write(b"x" * (64 << 20))
    connection.resume_writing()
    assert connection._idle_socket(cycle, lambda: None) == -1
    connection.transport.abort()
    writer.close()


async def test_a_slow_client_gets_all_of_it_in_order(service, replicas, until, by_lane):
    slow, quick = await Client(service).start(receive_buffer=2048), await Client(service, prompt="B").start()
    quickly = asyncio.create_task(quick.rest())
    while not quickly.done():
        release(replicas, 2)
        await asyncio.sleep(0.005)
    await quickly
    release(replicas, TOKENS)
    assert quick.tokens == [ord("B") + 1 + i for i in range(TOKENS)]
    await slow.rest()
    assert slow.tokens == [ord("A") + 1 + i for i in range(TOKENS)]
    assert max(len(e["outputs"][0]["token_ids"]) for e in slow.events) > 1, "it was slow"
    assert by_lane


async def test_a_client_that_goes_away_ends_its_request_alone(service, replicas, until):
    gone, stays = await Client(service).start(), await Client(service, prompt="B").start()
    while not all(lane._is_open for lane in service.outlet.lanes._taken.values()) or not gone.tokens:
        release(replicas)
        await asyncio.sleep(0.01)
        with contextlib.suppress(BlockingIOError):
            gone.got += gone.socket.recv(1 << 16)
    assert is_open(service)
    gone.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
    gone.socket.close()
    await until(lambda: len(service.generations._jobs) == 1)
    assert len(service.outlet.lanes._taken) == 1
    release(replicas, TOKENS * 2)
    await stays.rest()
    assert stays.tokens == [ord("B") + 1 + i for i in range(TOKENS)]
    await until(lambda: not service.outlet.lanes._taken)


async def test_a_socket_is_let_go_before_it_is_closed(service, replicas, until, monkeypatch):
    """Another connection may get its descriptor at once."""
    client = await Client(service).start()
    for made in (1, 2, 3):
        release(replicas)
        await client.read(lambda made=made: len(client.tokens) >= made)
        await turns()
    (lane,) = service.outlet.lanes._taken.values()
    assert lane._is_open
    (flight,) = service.fleet.flights
    seen, lost = [], HttpToolsProtocol.connection_lost

    def connection_lost(self, exc):
        seen.append(lane._is_open)
        lost(self, exc)

    monkeypatch.setattr(HttpToolsProtocol, "connection_lost", connection_lost)
    client.socket.close()
    await until(lambda: seen)
    assert seen == [False]
    assert flight.samples[0].token_ids[:3] == [66, 67, 68]


async def test_a_kept_connection_has_one_answer_after_the_other(service, replicas, until, by_lane):
    client = await Client(service).start()
    for _ in range(3):
        await in_turns(replicas, client)
        assert client.tokens == [ord("A") + 1 + i for i in range(TOKENS)]
        client.got = b""
        await asyncio.get_running_loop().sock_sendall(client.socket, GET)
        await client.read(lambda: client.got.endswith(b"}"))
        assert client.got.startswith(b"HTTP/1.1 200")
        client.got = b""
        await client.ask("/v1/rollout/generate", client.body)
    assert len(by_lane) > TOKENS
    release(replicas, TOKENS)
    await client.rest()


async def test_one_that_joins_gets_all_of_it_and_so_does_the_first(service, replicas, until):
    first = await Client(service, request_id="same").start()
    for made in (1, 2, 3, 4):
        release(replicas)
        await first.read(lambda made=made: len(first.tokens) >= made)
        await turns()
    assert is_open(service)
    second = await Client(service, request_id="same").start()
    await second.read(lambda: len(second.tokens) >= 4)
    assert not service.outlet.lanes._taken
    release(replicas, TOKENS)
    await first.rest()
    await second.rest()
    assert first.tokens == second.tokens == [ord("A") + 1 + i for i in range(TOKENS)]


async def test_an_abort_and_a_dead_replica_end_with_what_came_by_a_lane(service, replicas, until):
    for end in ("abort", "death"):
        client = await Client(service).start()
        for made in (1, 2, 3, 4):
            release(replicas)
            await client.read(lambda client=client, made=made: len(client.tokens) >= made)
            await turns()
        assert is_open(service)
        if end == "abort":
            await service.generations.abort(None)
        else:
            await replicas[0].die()
        await client.rest()
        assert client.tokens == [66, 67, 68, 69]
        last = client.events[-1]["outputs"][0]
        assert (last["finish_reason"], last["spans"][-1]["end"]) == ("abort", 4)
        client.socket.close()


async def test_other_weights_begin_another_span(service, replicas, until, by_lane):
    replicas[0].recomputed_after = 20
    client = await Client(service).start()
    await in_turns(replicas, client)
    assert client.tokens == [ord("A") + 1 + i for i in range(TOKENS)]
    for made, one in enumerate(client.events, 1):
        spans = [(s["start"], s["end"], s["recomputed"]) for s in one["outputs"][0]["spans"]]
        assert spans == ([(0, made, False)] if made <= 20 else [(0, 20, False), (20, made, True)])
    assert len(by_lane) > TOKENS / 2


async def test_a_name_that_a_version_is_given_meanwhile_is_said_with_the_next_token(service, replicas, until, by_lane):
    client = await Client(service, "/v1/completions", {"prompt": "A", "max_tokens": TOKENS}).start()

    async def more(made):
        release(replicas)
        if made == TOKENS:
            await client.rest()
        else:
            await client.read(lambda: client.said.count(b"data: {") >= made)
        await turns()

    for made in range(1, 11):
        await more(made)
    assert is_open(service)
    (before,) = {span["version"] for one in client.events for span in one["choices"][0]["weight_versions"]}
    await service.versions.give("harvest")
    for made in range(11, TOKENS + 1):
        await more(made)
    names = [one["choices"][0]["weight_versions"][-1]["version"] for one in client.events]
    assert names == [before] * 10 + ["harvest"] * (TOKENS - 10)
    assert len(by_lane) > TOKENS / 2  # by a lane again


async def test_what_a_lane_says_counts_against_silence(service, replicas, until, monkeypatch):
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", 3.0)
    client = await Client(service).start()
    loop = asyncio.get_running_loop()
    began, made = loop.time(), 0
    while loop.time() < began + 3.5 and made < TOKENS - 5:
        release(replicas)
        made += 1
        await client.read(lambda made=made: len(client.tokens) >= made)
        await asyncio.sleep(0.1)
    (lane,) = service.outlet.lanes._taken.values()
    assert lane._is_open
    assert b"keep-alive" not in client.got
    assert lane.said_at > began + 3.0
    await client.read(lambda: b"keep-alive" in client.got)
    assert not lane._is_open, "others wrote"
    release(replicas, TOKENS)
    await client.rest()
    assert client.tokens == [ord("A") + 1 + i for i in range(TOKENS)]


async def test_no_lane_opens_while_a_comment_waits_to_be_written(service, replicas, until, monkeypatch):
    """It would be written between an event's beginning and its rest, if the socket took a part."""
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", 0.05)
    waits, written, send = asyncio.Event(), asyncio.Event(), RequestResponseCycle.send

    async def behind_others(self, message):
        if message.get("body") == answering.KEEP_ALIVE:
            waits.set()
            await written.wait()
        await send(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", behind_others)
    client = await Client(service).start()
    await until(waits.is_set)
    for made in range(1, 9):
        release(replicas)
        await client.read(lambda made=made: len(client.tokens) >= made)
        await turns()
        assert not is_open(service)
    written.set()
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", 30.0)
    while not is_open(service):
        made += 1
        release(replicas)
        await client.read(lambda made=made: len(client.tokens) >= made)
        await turns()
    release(replicas, TOKENS)
    await client.rest()
    assert client.tokens == [ord("A") + 1 + i for i in range(TOKENS)]


async def test_without_a_compiler_streams_write_all_themselves(model, monkeypatch, caplog):
    def none(name, sources):
        raise OSError("no C compiler")

    monkeypatch.setattr(lanes, "compiled", none)
    caplog.set_level("INFO")
    made = Lanes(model, lambda: None)
    await made.load()
    assert "no compiled lanes" in caplog.text
    assert made.take(None, None, None) is None
    assert not made.any_open
    made.say(1.0)
    made.unload()

"""Clients that are slow, silent or too many, on real sockets.

What is cut off is waited for as long as a busy machine may take; that it is the right thing that cut it shows in what
else would have come first. Whoever must not be cut off has limits that a busy machine does not reach.
"""

import asyncio
import contextlib
import json
import socket

import pytest

from api.connections import PACE, Connection, Room, places
from api.service import Service
from tests.unit.api.conftest import served

HEAD_S, STALL_S, ROOM = 0.4, 0.4, 8
GET = b"GET /live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
DEADLINE_S = 30.0
STALL_OF_PATIENT_S = 1.5


@pytest.fixture
def settings(request):
    """Those of a test that is marked with others are beside these."""
    limits = {"head_timeout_s": HEAD_S, "stall_timeout_s": STALL_S, "max_connections": ROOM}
    return limits | {"max_body_bytes": 16 << 20} | getattr(request, "param", {})


def where(**limits):
    return pytest.mark.parametrize("settings", [limits], indirect=True, ids=[""])


class Clients:
    """Connections to the server; `status` also sends a request and reads how it was answered."""

    def __init__(self, address):
        self.address = address
        self._writers = []

    async def open(self):
        reader, writer = await asyncio.open_connection(*self.address)
        self._writers.append(writer)
        return reader, writer

    async def answered(self, request=GET):
        reader, writer = await self.open()
        writer.write(request)
        line = await asyncio.wait_for(reader.readline(), DEADLINE_S)
        return int(line.split()[1]), reader, writer

    async def status(self, request=GET):
        status, _, writer = await self.answered(request)
        writer.close()
        return status

    async def close(self):
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
async def clients(address):
    made = Clients(address)
    yield made
    await made.close()


@pytest.fixture
async def server(config, model, replicas, store, same_signals):
    """A whole one."""
    async with served(Service(config, model), socket.create_server(("127.0.0.1", 0))) as made:
        yield made


@pytest.fixture
def address(server):
    return server.servers[0].sockets[0].getsockname()


async def until_closed(reader):
    """What came before the end, and after how long it came."""
    clock = asyncio.get_running_loop().time
    began, got = clock(), b""
    with contextlib.suppress(ConnectionError):
        got = await asyncio.wait_for(reader.read(), DEADLINE_S)
    return got, clock() - began


@contextlib.asynccontextmanager
async def dribbling(writer, data, every_s=0.05):
    """One byte after the other goes on being sent meanwhile; data are more than can be sent before DEADLINE_S."""
    assert len(data) * every_s > DEADLINE_S

    async def dribble():
        with contextlib.suppress(ConnectionError):
            for byte in data:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(every_s)

    task = asyncio.create_task(dribble())
    yield
    task.cancel()


def body_of(length, text=b"x"):
    head = b"POST /v1/rollout/generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % length
    return head + text


async def test_a_head_that_dribbles_is_cut_off(clients):
    reader, writer = await clients.open()
    async with dribbling(writer, b"GET /live HTTP/1.1\r\nhost: " + b"a" * 1000):
        got, after_s = await until_closed(reader)
    assert got.startswith(b"HTTP/1.1 408 ")
    assert after_s > HEAD_S * 0.9


async def test_a_client_that_says_nothing_is_cut_off(clients):
    reader, _ = await clients.open()
    _, after_s = await until_closed(reader)
    assert after_s > HEAD_S * 0.9


async def test_a_second_head_that_dribbles_is_cut_off(clients):
    status, reader, writer = await clients.answered(GET.replace(b"GET", b"HEAD"))
    assert status == 200
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    await asyncio.sleep(HEAD_S * 2)
    assert not reader.at_eof(), "a connection that is kept open may be silent"
    async with dribbling(writer, GET + b"x" * 200, 0.2):
        got, _ = await until_closed(reader)
    assert got.startswith(b"HTTP/1.1 408 "), "before it was complete"


async def test_a_kept_connection_serves_many_requests(clients):
    _, reader, writer = await clients.answered()
    for _ in range(4):
        await asyncio.sleep(HEAD_S / 2)
        writer.write(GET)
        await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 200"), DEADLINE_S)


async def test_requests_in_one_packet_are_all_answered(clients):
    _, reader, writer = await clients.answered(GET * 3)
    await asyncio.sleep(0.1)
    writer.write(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    assert (await asyncio.wait_for(reader.read(), DEADLINE_S)).count(b"HTTP/1.1 200") == 3


async def test_a_body_that_dribbles_is_cut_off(clients):
    reader, writer = await clients.open()
    writer.write(body_of(10_000))
    async with dribbling(writer, b"y" * 1000):
        got, after_s = await until_closed(reader)
    assert got.startswith(b"HTTP/1.1 408 ")
    assert after_s > STALL_S * 0.9


@where(stall_timeout_s=STALL_OF_PATIENT_S)
async def test_a_long_body_that_gets_on_is_taken(clients):
    """Longer in all than any timeout."""
    parts = 12
    part_s, part = STALL_OF_PATIENT_S * 1.5 / parts, int(PACE * STALL_OF_PATIENT_S) + 1
    body = json.dumps({"prompt": "A", "max_tokens": 1, "session_id": ""}).encode().ljust(parts * part)
    reader, writer = await clients.open()
    writer.write(body_of(len(body), b""))
    for start in range(0, len(body), part):
        writer.write(body[start : start + part])
        await asyncio.sleep(part_s)
    assert b" 408 " not in await asyncio.wait_for(reader.readline(), DEADLINE_S)


async def test_an_answer_may_take_longer_than_any_client(clients, replicas):
    """Held while paused: the client has sent all of its request and waits for us."""
    await clients.answered(b"POST /pause HTTP/1.1\r\nhost: localhost\r\n\r\n")
    body = json.dumps({"prompt": "A", "max_tokens": 1}).encode()
    reader, writer = await clients.open()
    writer.write(body_of(len(body), body))
    await asyncio.sleep(max(HEAD_S, STALL_S) * 2.5)
    assert not reader.at_eof()
    await clients.answered(b"POST /resume HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert b" 200 " in await asyncio.wait_for(reader.readline(), DEADLINE_S)


async def test_a_client_that_does_not_read_is_cut_off(clients, server, until):
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, clients.address)
    await loop.sock_sendall(raw, b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 8)
    await until(lambda: server.server_state.connections)
    await until(lambda: not server.server_state.connections)
    got = 0
    with contextlib.suppress(ConnectionError):
        while part := await asyncio.wait_for(loop.sock_recv(raw, 1 << 20), DEADLINE_S):
            got += len(part)
    assert 0 < got < 8 * 1_500_000, "it ends before all was sent"
    raw.close()


@where(stall_timeout_s=STALL_OF_PATIENT_S)
async def test_a_client_that_reads_slowly_gets_it_all(clients):
    """Over longer than any timeout."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, clients.address)
    await loop.sock_sendall(
        raw, b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    )
    began, got = loop.time(), b""
    while part := await asyncio.wait_for(loop.sock_recv(raw, 4 << 10), DEADLINE_S):
        got += part
        await asyncio.sleep(0.01)
    assert loop.time() - began > STALL_OF_PATIENT_S * 1.5
    head, _, body = got.partition(b"\r\n\r\n")
    length = next(int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    assert len(body) == length
    raw.close()


async def test_slow_clients_do_not_keep_others_out(clients):
    """As many as there are places, each with half a head: the oldest goes, for each that comes."""
    for _, writer in [await clients.open() for _ in range(ROOM)]:
        writer.write(b"GET /li")
    await asyncio.sleep(0.05)
    for _ in range(3):
        assert await clients.status() == 200


async def test_silent_kept_connections_make_room_too(clients):
    kept = [await clients.answered() for _ in range(ROOM)]
    assert await clients.status() == 200
    await until_closed(kept[0][1])  # the one that rested longest
    assert not any(reader.at_eof() for _, reader, _ in kept[1:])


async def test_when_all_are_at_work_the_next_is_told_to_come_again(clients, server, until):
    assert await clients.status(b"POST /pause HTTP/1.1\r\nhost: localhost\r\n\r\n") == 200
    body = json.dumps({"prompt": "A", "max_tokens": 1}).encode()
    busy = [await clients.open() for _ in range(ROOM)]
    for _, writer in busy:
        writer.write(body_of(len(body), body))
    await until(lambda: len(server.server_state.tasks) == ROOM)
    got, _ = await until_closed((await clients.open())[0])
    assert got.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in got
    busy[0][1].close()
    await until(lambda: len(server.server_state.tasks) < ROOM)
    assert await clients.status(b"POST /resume HTTP/1.1\r\nhost: localhost\r\n\r\n") == 200
    for reader, _ in busy[1:]:
        assert b" 200 " in await asyncio.wait_for(reader.readline(), DEADLINE_S)


async def test_a_head_without_an_end_is_refused(clients):
    reader, writer = await clients.open()
    writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + b"x: " + b"a" * 66_000)
    got, _ = await until_closed(reader)
    assert got.startswith(b"HTTP/1.1 431 "), "not because of its time"


async def test_a_part_of_a_head_that_came_with_a_request_is_due(clients):
    _, reader, _ = await clients.answered(GET + b"GET /li")
    assert b"HTTP/1.1 408 " in (await until_closed(reader))[0]


async def test_what_a_second_request_lacks_does_not_end_up_in_the_first_answer(clients):
    """The first is held in a pause; the second is none of HTTP, or has no end, or its body does not come."""
    body = json.dumps({"prompt": "A", "max_tokens": 1}).encode()
    for second in (b"nonsense", b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000, body_of(1000)):
        await clients.answered(b"POST /pause HTTP/1.1\r\nhost: localhost\r\n\r\n")
        reader, writer = await clients.open()
        writer.write(body_of(len(body), body))
        await asyncio.sleep(0.1)
        writer.write(second)
        await asyncio.sleep(STALL_S * 2.5)
        await clients.answered(b"POST /resume HTTP/1.1\r\nhost: localhost\r\n\r\n")
        got, _ = await until_closed(reader)
        assert not got or got.startswith(b"HTTP/1.1 200 "), "the first answer is the first"
        assert got.count(b"HTTP/1.1 408 ") == got.count(b"HTTP/1.1 200 "), "the second is late once it is its turn"


async def test_requests_without_end_before_an_answer_are_refused(clients):
    await clients.answered(b"POST /pause HTTP/1.1\r\nhost: localhost\r\n\r\n")
    body = json.dumps({"prompt": "A", "max_tokens": 1}).encode()
    reader, writer = await clients.open()
    writer.write(body_of(len(body), body) + GET * 2000)
    await asyncio.wait_for(reader.read(), DEADLINE_S)
    await clients.answered(b"POST /resume HTTP/1.1\r\nhost: localhost\r\n\r\n")


async def test_fields_after_a_body_are_not_taken_for_its_head(clients):
    """Among them could be what says who somebody is."""
    head = b"POST /resume HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    status = await clients.status(head + b"2\r\n{}\r\n0\r\norigin: http://elsewhere\r\n\r\n")
    assert status == 200


@pytest.mark.parametrize("body", [{"n": 2, "max_tokens": 3}, {"max_tokens": 40}])
async def test_a_stream_to_a_client_that_knows_no_chunks_ends_with_the_connection(clients, body):
    """HTTP/1.0, as some proxies and benchmarks speak it."""
    asked = json.dumps({"prompt": "A", "stream": True} | body).encode()
    reader, writer = await clients.open()
    writer.write(body_of(len(asked), asked).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, said = (await asyncio.wait_for(reader.read(), DEADLINE_S)).partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"chunked" not in head.lower()
    *events, end, nothing = said.split(b"\n\n")
    assert (end, nothing) == (b"data: [DONE]", b"")
    outputs = [output for event in events for output in json.loads(event.removeprefix(b"data: "))["outputs"]]
    assert sum(len(output["token_ids"]) for output in outputs) == body.get("n", 1) * body["max_tokens"]


@pytest.mark.parametrize(
    "request_of",
    [GET, GET.replace(b"GET", b"HEAD"), GET.replace(b"/live", b"/nowhere"), body_of(2, b"{}")],
)
async def test_a_client_that_knows_no_chunks_gets_whole_answers_too(clients, request_of):
    reader, writer = await clients.open()
    writer.write(request_of.replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, said = (await asyncio.wait_for(reader.read(), DEADLINE_S)).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    if not request_of.startswith(b"HEAD"):
        json.loads(said)


async def test_a_client_that_offers_another_protocol_is_served_by_this_one(clients):
    """As curl and Java do on a first request; the connection goes on."""
    offer = GET.replace(b"\r\n\r\n", b"\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n\r\n")
    _, reader, writer = await clients.answered(offer)
    writer.write(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.read(), DEADLINE_S)


def test_room_is_what_the_system_gives(monkeypatch):
    import resource

    asked = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    assert places(100) == 100
    assert places(2000) == 2000
    assert places(8192) == 4096 - 512
    assert asked == [(2512, 4096), (4096, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    assert places(8192) == 128


def test_nothing_is_left_of_connections_that_are_gone():
    room = Room(2, 1.0, 1.0)
    gone = []

    class One:
        def give_way(self):
            gone.append(self)

    a, b, c = One(), One(), One()
    assert room.enter(a)
    assert room.enter(b)
    room.works(a)
    room.rests(a)
    assert room.enter(c), "b has waited for a head, a rests"
    assert gone == [b]
    for one in (a, c):
        room.leave(one)
    assert not room.taken | set(room.waiting) | set(room.kept)
    assert issubclass(Connection, asyncio.Protocol)


@where(stall_timeout_s=2 * DEADLINE_S)
async def test_a_stream_to_a_client_that_reads_slowly_is_whole_and_piles_up_no_further_than_its_buffer(
    server, address, replicas, until
):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop, samples, tokens = asyncio.get_running_loop(), 256, 40
    await loop.sock_connect(raw, address)
    body = json.dumps({"prompt": "A", "n": samples, "max_tokens": tokens, "stream": True}).encode()
    head = b"POST /v1/rollout/generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    await loop.sock_sendall(raw, head % len(body) + body)
    await until(lambda: len(server.server_state.connections) == 1)
    (connection,) = server.server_state.connections
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    most = 0
    for _ in range(tokens):
        for replica in replicas:
            replica.gate.release()
        await asyncio.sleep(0.002)
        most = max(most, connection.transport.get_write_buffer_size())
    await until(lambda: any(replica.gate.locked() for replica in replicas))  # all of them are made
    step = 400 * samples  # bytes of a token of each
    assert most < (64 << 10) + 2 * step, "the high-water mark, and what went over it"
    got = b""
    while part := await asyncio.wait_for(loop.sock_recv(raw, 64 << 10), DEADLINE_S):
        got += part
    raw.close()
    said = b"".join(_chunks(got.partition(b"\r\n\r\n")[2])).split(b"\n\n")
    assert said[-2:] == [b"data: [DONE]", b""]
    outputs = [json.loads(one[6:])["outputs"][0] for one in said if one.startswith(b"data: {")]
    for index in range(samples):
        ids = [token for output in outputs if output["index"] == index for token in output["token_ids"]]
        assert ids == [ord("A") + 1 + i for i in range(tokens)]
    assert len(outputs) < samples * tokens / 2, "what was not taken came in larger events"


def _chunks(body):
    """Of the transfer coding."""
    while body:
        length, _, body = body.partition(b"\r\n")
        yield body[: int(length, 16)]
        body = body[int(length, 16) + 2 :]

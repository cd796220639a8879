"""Clients that are refused while they send: what a server closes with bytes unread, the kernel resets, and most clients
then look at no answer. On sockets, with the event loop that the service runs on and with asyncio's own."""

import asyncio
import contextlib
import functools
import os
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from api.connections import LINGER_BYTES, Connection, Room

SHORT_S = 0.3
AT_LEISURE_S = 60.0
"""Longer than any client here needs, beside whatever else runs."""
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
UNREAD = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 1000000000\r\n\r\n"


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def run(request):
    """Runs a coroutine."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


class Server:
    """Connections to an application that refuses bodies over 1 MB unread, and answers others when `answers` is set."""

    def __init__(self, places=8, head_timeout_s=SHORT_S, stall_timeout_s=SHORT_S, **limits):
        self.room = Room(places, head_timeout_s, stall_timeout_s, **limits)
        self.state = ServerState()
        self.answers = asyncio.Event()
        self.answer = b"ok"
        self.disconnects = 0
        self.answers.set()

    async def __aenter__(self):
        config = uvicorn.Config(self._app, log_config=None, access_log=False, interface="asgi3")
        made = functools.partial(Connection, config, self.state, {}, room=self.room)
        self._server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
        self.address = self._server.sockets[0].getsockname()
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for connection in list(self.state.connections):
            connection.transport.abort()
        self.answers.set()
        await until(lambda: not self.state.connections and not self.state.tasks)
        assert not self.room.taken | set(self.room.waiting) | set(self.room.kept) | set(self.room.lingering)

    async def _app(self, scope, receive, send):
        status = 413 if int(dict(scope["headers"]).get(b"content-length", 0)) > 1_000_000 else 200
        while status == 200:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            if not message["more_body"]:
                break
        await self.answers.wait()
        length = [(b"content-length", b"%d" % len(self.answer))]
        await send({"type": "http.response.start", "status": status, "headers": length})
        await send({"type": "http.response.body", "body": self.answer})


async def until(condition, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  there is no one event for what tests wait for
            await asyncio.sleep(0.005)


def send_on(address, first, more, every_s=0.0):
    """What a client gets that sends on and on, also after it was refused, and reads when it has no more to say.

    Until the end that the server said. Raises ConnectionError where it cut: most clients then look at nothing.
    """
    with socket.create_connection(address, timeout=60) as raw:
        raw.sendall(first)
        while not select.select([raw], [], [], every_s)[0]:
            raw.sendall(more)
        return go_on(raw, more)


def go_on(raw, more):
    """What a client gets that has more to say first."""
    for _ in range(10):
        raw.sendall(more)
        time.sleep(0.002)
    return read_all(raw)


def can_read(raw):
    return bool(select.select([raw], [], [], 0)[0])


def read_all(raw):
    parts = []
    while part := raw.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


async def answers_to(address, *sends):
    """Those that 30 clients got, six at a time; ConnectionError for who got none."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(6) as threads:
        asked = [loop.run_in_executor(threads, send_on, address, *sends) for _ in range(30)]
        return await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize(
    ("status", "sends"),
    [
        pytest.param(400, (b"nonsense\r\n\r\n", b"x" * 100), id="nonsense"),
        pytest.param(
            400,
            (POST.replace(b"content-length: %d", b"transfer-encoding: chunked") + b"none\r\n", b"x"),
            id="nonsense for a body",
        ),
        pytest.param(408, (b"GET /", b"v", 0.02), id="a late head"),
        pytest.param(408, (POST % 10_000, b"y", 0.02), id="a late body"),
        pytest.param(413, (UNREAD, b"y" * 4000), id="unread"),
        pytest.param(431, (b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000, b"a" * 4000), id="a long head"),
    ],
)
def test_who_goes_on_sending_still_reads_why_it_was_refused(run, status, sends):
    async def main():
        async with Server(linger_s=AT_LEISURE_S) as server:
            answers = await answers_to(server.address, *sends)
            assert [one for one in answers if isinstance(one, Exception)] == []
            assert {one.partition(b" ")[2][:4] for one in answers} == {b"%d " % status}
            assert {one.count(b"HTTP/1.1 ") for one in answers} == {1}

    run(main())


def test_who_goes_on_sending_still_reads_that_all_places_are_taken(run):
    async def main():
        async with Server(linger_s=AT_LEISURE_S, head_timeout_s=AT_LEISURE_S) as server:
            server.answers.clear()
            busy = [socket.create_connection(server.address) for _ in range(server.room.places)]
            for raw in busy:
                raw.sendall(GET)
            await until(lambda: len(server.state.tasks) == len(busy))
            answers = await answers_to(server.address, POST % (1 << 20) + b"x" * 50_000, b"y" * 4000)
            assert [one for one in answers if isinstance(one, Exception)] == []
            assert {one.partition(b" ")[2][:4] for one in answers} == {b"503 "}
            for raw in busy:
                raw.close()

    run(main())


def test_a_refusal_ends_its_request_and_gives_its_place_back_at_once(run):
    """What lingers is a socket, and nothing that anybody waits for."""

    async def main():
        async with Server(places=1, linger_s=AT_LEISURE_S) as server:
            late = socket.create_connection(server.address, timeout=60)
            late.sendall(POST % 10_000)
            await until(lambda: server.room.lingering)
            await until(lambda: server.disconnects == 1 and not server.state.tasks)
            assert not server.room.taken
            late.sendall(GET)  # is not a request any more
            with socket.create_connection(server.address, timeout=60) as other:
                other.sendall(GET)
                assert (await asyncio.to_thread(other.recv, 100)).startswith(b"HTTP/1.1 200 ")
            assert (await asyncio.to_thread(read_all, late)).count(b"HTTP/1.1 ") == 1
            late.close()
            await until(lambda: not server.room.lingering)

    run(main())


def test_who_does_not_close_is_closed_when_its_time_is_over(run):
    async def main():
        async with Server(linger_s=SHORT_S) as server:
            with socket.create_connection(server.address, timeout=60) as raw:
                raw.sendall(b"nonsense\r\n\r\n")
                await until(lambda: server.room.lingering)
                began = time.monotonic()
                await until(lambda: not server.state.connections)
                assert time.monotonic() - began > SHORT_S * 0.8
                assert (await asyncio.to_thread(raw.recv, 100)).startswith(b"HTTP/1.1 400 ")

    run(main())


def test_what_a_refused_client_sends_is_read_up_to_a_bound(run):
    """Then it has to wait, and is not cut off before its time is over: its answer has been there all the while."""

    async def main():
        async with Server(linger_s=AT_LEISURE_S) as server:
            with socket.create_connection(server.address) as raw:
                raw.setblocking(False)
                raw.send(b"nonsense\r\n\r\n")
                await until(lambda: server.room.lingering)
                sent, still_since = 0, time.monotonic()
                while time.monotonic() - still_since < 1.0:
                    with contextlib.suppress(BlockingIOError):
                        sent, still_since = sent + raw.send(b"x" * 100_000), time.monotonic()
                    await asyncio.sleep(0)
                assert LINGER_BYTES <= sent < LINGER_BYTES + (32 << 20), "and what the kernel keeps for both"
                assert raw.recv(100).startswith(b"HTTP/1.1 400 ")

    run(main())


def test_a_flood_of_refused_clients_keeps_no_descriptors(run):
    """Those that were refused first go first."""

    async def main():
        async with Server(linger_s=AT_LEISURE_S, lingerers=4) as server:
            before = len(os.listdir("/proc/self/fd"))
            refused = []
            for _ in range(20):
                raw = socket.create_connection(server.address, timeout=60)
                raw.sendall(b"nonsense\r\n\r\n")
                refused.append(raw)
                await until(functools.partial(can_read, raw))
            await until(lambda: len(server.state.connections) == 4)
            assert len(server.room.lingering) == 4
            assert len(os.listdir("/proc/self/fd")) - before == 20 + 4
            for raw in refused[-4:]:
                raw.sendall(b"more")
                assert raw.recv(100).startswith(b"HTTP/1.1 400 ")
            for raw in refused:
                raw.close()

    run(main())


def test_a_server_that_leaves_lets_those_read_who_were_refused(run):
    async def main():
        async with Server(linger_s=AT_LEISURE_S) as server:
            with socket.create_connection(server.address, timeout=60) as raw:
                raw.sendall(b"nonsense\r\n\r\n")
                await until(lambda: server.room.lingering)
                for connection in list(server.state.connections):
                    connection.shutdown()
                assert (await asyncio.to_thread(go_on, raw, b"more")).startswith(b"HTTP/1.1 400 ")
            await until(lambda: not server.state.connections)

    run(main())


@contextlib.asynccontextmanager
async def long_answer_to_an_unread_body(**settings):
    """A server that has begun it and lingers, and the client's socket."""
    async with Server(linger_s=SHORT_S, **settings) as server:
        server.answer = b"a" * (20 << 20)
        with socket.create_connection(server.address, timeout=60) as raw:
            raw.sendall(UNREAD)
            await until(lambda: server.room.lingering)
            yield server, raw


def test_a_long_answer_to_a_body_that_was_not_read_is_not_cut_while_it_is_read(run):
    async def main():
        async with long_answer_to_an_unread_body(stall_timeout_s=AT_LEISURE_S) as (server, raw):
            await asyncio.sleep(SHORT_S * 3)
            answer = await asyncio.to_thread(go_on, raw, b"y")
            assert answer.partition(b"\r\n\r\n")[2] == server.answer

    run(main())


def test_a_long_answer_that_is_not_read_is_cut(run):
    async def main():
        async with long_answer_to_an_unread_body(stall_timeout_s=SHORT_S) as (server, _):
            await until(lambda: not server.state.connections)

    run(main())

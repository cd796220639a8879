"""What a request leaves in the API's process, which serves millions of them: nothing that stays, and next to nothing
that only the collector of cycles finds, as that comes seldom (weight_manager/garbage.py).
"""

import asyncio
import gc
import json
import socket

import pytest

from api.service import Service
from tests.unit.api.conftest import served

ROUNDS, REQUESTS = 4, 40
PER_1000 = 500
"""Objects that 1,000 requests may leave. Of one that is held by a cycle there are 30 and more, of a stream 80."""
PER_1000_CONNECTED = 12_000
"""The same where each has its own connection: asyncio's transport, for which the service has uvloop's, leaves 8."""
MESSAGES = [{"role": "user", "content": "hi"}]
ASKED = {
    "native": ("/v1/rollout/generate", {"prompt_ids": [65], "max_tokens": 3}),
    "completions": ("/v1/completions", {"prompt": "A", "max_tokens": 3}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
    "vllm": ("/inference/v1/generate", {"token_ids": [65], "sampling_params": {"max_tokens": 3}}),
    "sglang": ("/generate", {"input_ids": [65], "sampling_params": {"max_new_tokens": 3}}),
}
STREAMED = [name for name in ASKED if name != "vllm"]


@pytest.fixture
def settings():
    return {"replicas": 1}


class Forgetful(list):
    """What a stand-in has received would be counted too."""

    def append(self, message):
        pass


@pytest.fixture
async def address(config, model, replicas, store, until, same_signals):
    """Of a whole server; streams may have lanes."""
    service = Service(config, model)
    listener = socket.create_server(("127.0.0.1", 0))
    async with served(service, listener):
        await until(lambda: service.outlet.lanes._library is not None)
        replicas[0].received, store.received = Forgetful(), Forgetful()
        yield listener.getsockname()


async def connected(address):
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, address)
    return client


async def send(client, path, body):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(text)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(client, head.encode() + text)


async def answer(client, *, until=b""):
    """The status. until: stop reading where this has come."""
    got = b""
    async with asyncio.timeout(30):
        while not is_whole(got) and not (until and until in got):
            more = await asyncio.get_running_loop().sock_recv(client, 1 << 16)
            assert more, got
            got += more
    return int(got.split(b" ", 2)[1])


def is_whole(got):
    head, _, body = got.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if b"content-length" in fields:
        return len(body) == int(fields[b"content-length"])
    return body.endswith(b"0\r\n\r\n")


async def left_by(ask):
    """Objects: those that stay, and those that only the collector of cycles frees."""
    await asyncio.sleep(0.1)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(REQUESTS):
            await ask()
        await asyncio.sleep(0.1)
        in_cycles = gc.collect()
        return len(gc.get_objects()) - before, in_cycles
    finally:
        gc.enable()


async def few_are_left(ask, limit=PER_1000):
    """The fewest of some rounds: what is made once, or every second, is not what requests leave."""
    stay, in_cycles = zip(*[await left_by(ask) for _ in range(ROUNDS)], strict=True)
    assert min(stay) * 1000 < PER_1000 * REQUESTS
    assert min(in_cycles) * 1000 < limit * REQUESTS


@pytest.mark.parametrize(
    ("dialect", "more"),
    [
        *((name, {}) for name in ASKED),
        *((name, {"stream": True}) for name in STREAMED),
        ("native", {"prompt_ids": "x"}),
    ],
    ids=[*ASKED, *(f"{name} streamed" for name in STREAMED), "refused"],
)
async def test_requests_leave_nothing_behind(address, dialect, more):
    path, body = ASKED[dialect]
    client = await connected(address)

    async def ask():
        await send(client, path, body | more)
        assert await answer(client) == (400 if "prompt_ids" in more else 200)

    with client:
        await few_are_left(ask)


@pytest.mark.parametrize("path", ["/v1/rollout/generate", "/v1/abort_requests"])
@pytest.mark.parametrize(
    "body",
    [b"{", b"\xff", b"[" * 2_000, b"5", b"{}"],
    ids=["cut off", "no text", "deep", "a number", "without what is needed"],
)
async def test_a_body_that_says_nothing_leaves_nothing_behind(address, path, body):
    client = await connected(address)

    async def ask():
        await send(client, path, body)
        assert await answer(client) == 400

    with client:
        await few_are_left(ask)


async def test_a_connection_leaves_nothing_behind(address):
    async def ask():
        with await connected(address) as client:
            await send(client, *ASKED["native"])
            assert await answer(client) == 200

    await few_are_left(ask, PER_1000_CONNECTED)


async def test_a_client_that_hangs_up_leaves_nothing_behind(address, replicas):
    path, body = ASKED["native"]

    async def ask():
        with await connected(address) as client:
            await send(client, path, body | {"stream": True, "max_tokens": 50})
            assert await answer(client, until=b"data: ") == 200

    await few_are_left(ask, PER_1000_CONNECTED)

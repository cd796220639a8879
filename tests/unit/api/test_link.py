"""Which silence is a death: that of a process, not that of a loop."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from api.link import Link
from worker import messages
from worker.messages import Done

PROCESS = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
print("bound", flush=True)
time.sleep(60)
"""
"""Its loop never says a word."""


class Heard:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.down: list[str] = []
        self.gone = asyncio.Event()

    def on_up(self) -> None:
        self.up.set()

    def on_message(self, message: bytes) -> None: ...

    def on_quiet(self) -> None: ...

    def on_down(self, reason: str) -> None:
        self.down.append(reason)
        self.gone.set()


@pytest.fixture
def endpoint(run_dir: Path) -> str:
    return f"ipc://{run_dir}/x.sock"


@pytest.fixture
def process(endpoint: str):
    with subprocess.Popen([sys.executable, "-c", PROCESS, endpoint], stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        made.stdout.readline()
        yield made
        made.kill()


@contextlib.asynccontextmanager
async def linked(endpoint: str, **waits: float) -> AsyncIterator[Heard]:
    heard = Heard()
    link = Link(endpoint, heard, encode=bytes, decode=bytes, quiet_s=0.2, **waits)
    task = asyncio.create_task(link.run())
    try:
        await asyncio.wait_for(heard.up.wait(), 10)
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_process_that_says_nothing_is_kept(endpoint, process):
    async with linked(endpoint, silence_s=0.8, stuck_s=60) as heard:
        await asyncio.sleep(3)
        assert heard.down == []


async def test_a_stopped_process_is_lost(endpoint, process):
    async with linked(endpoint, silence_s=0.8, stuck_s=60) as heard:
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.wait_for(heard.gone.wait(), 10)
        os.kill(process.pid, signal.SIGCONT)


async def test_who_was_given_no_time_has_not_found_others_silent(endpoint, process):
    """An API that a loaded machine let stand still for 20 s hung up on its store, which was fine."""
    async with linked(endpoint, silence_s=0.8, stuck_s=2) as heard:
        await asyncio.sleep(0.5)
        time.sleep(3)  # noqa: ASYNC251  that is what is tested
        await asyncio.sleep(0.5)
        assert heard.down == []
        await asyncio.wait_for(heard.gone.wait(), 10)
        assert heard.down[0].startswith("silent for 2 s")


async def test_a_killed_process_is_lost_at_once(endpoint, process):
    async with linked(endpoint, silence_s=30, stuck_s=60) as heard:
        process.kill()
        await asyncio.wait_for(heard.gone.wait(), 30)


async def test_a_process_that_never_gets_on_is_lost(endpoint, process):
    async with linked(endpoint, silence_s=0.8, stuck_s=2) as heard:
        await asyncio.wait_for(heard.gone.wait(), 10)
        assert heard.down[0].startswith("silent for 2 s")


@pytest.mark.parametrize(
    "unreadable",
    [b"\xc1", b"\x82\xa1t\xa4done\xa4call\xa2\xff\xfe", b"\x91" * 100_000 + b"\xc0"],
    ids=["no message", "no text", "deep"],
)
async def test_bytes_that_cannot_be_read_cost_no_connection(endpoint, unreadable):
    """Only a process of another build writes such; what it says next may be read."""
    heard, read, came = Heard(), [], asyncio.Event()
    heard.on_message = lambda message: (read.append(message), came.set())  # type: ignore[method-assign]
    heard.on_down = lambda reason: (heard.down.append(reason), came.set())  # type: ignore[method-assign]
    decode = msgspec.msgpack.Decoder(Done | list[int]).decode
    link = Link(endpoint, heard, encode=bytes, decode=decode, quiet_s=60, silence_s=60, stuck_s=60)
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(endpoint)
        task = asyncio.create_task(link.run())
        await asyncio.wait_for(heard.up.wait(), 30)
        link.post(b"hello")
        peer, _ = await router.recv_multipart()
        for frame in (unreadable, messages.encode(Done("next"))):
            await router.send_multipart([peer, frame])
        await asyncio.wait_for(came.wait(), 30)
        assert (read, heard.down) == ([Done("next")], [])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""Two API processes behind one port: real sockets, real deaths. What each holds by itself, the unit tests say."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fake_engine import ENGINE
from tests.integration.conftest import running
from tests.integration.live import LiveService
from tests.reference.checkpoint import Checkpoint

CLIENTS = 16
"""Connections that the system deals out: all of them to one process once in 2 ** 15."""
BACK_S = 30.0


@pytest.fixture(scope="module")
def two(tiny: Checkpoint) -> Iterator[LiveService]:
    yield from running(tiny.directory, "--replicas", "2", "--api-workers", "2")


@pytest.fixture
def paced(tiny: Checkpoint) -> Iterator[LiveService]:
    """As `two`, with the engine that stands for one: a step takes 20 ms, so no request ends before it is aborted."""
    pace = ("--set", ENGINE, "--set", 'worker.engine_options={"step_s": 0.02}')
    yield from running(tiny.directory, "--replicas", "2", "--api-workers", "2", *pace)


def api_process(live: LiveService, index: int) -> int:
    """Its pid; waits for one that is being restarted."""
    until = time.monotonic() + BACK_S
    while time.monotonic() < until:
        for pid in live.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if words[1:3] == ["-m", "api"] and ("--index" in words) == bool(index):
                    return pid
        time.sleep(0.05)
    raise AssertionError(f"API process {index} is not there: {live.tail()}")


def connections(live: LiveService, pid: int) -> int:
    """TCP connections of clients that a process has."""
    port = int(live.url.rpartition(":")[2])
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "01":
            inodes.add(f"socket:[{fields[9]}]")
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if fd.isdigit()]
    return sum(link in inodes for link in links)


def asked(tokens: int, **more: object) -> dict[str, object]:
    return {"prompt_ids": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True} | more


def clients(live: LiveService) -> list[httpx.AsyncClient]:
    return [httpx.AsyncClient(base_url=live.url, timeout=60) for _ in range(CLIENTS)]


async def test_both_serve_and_a_pause_holds_both(two: LiveService) -> None:
    made = clients(two)
    try:
        assert {r.status_code for r in await asyncio.gather(*(c.get("/ready") for c in made))} == {200}
        for index in range(2):
            assert connections(two, api_process(two, index)) > 0
        assert (await made[0].post("/v1/rollout/pause", json={"mode": "keep"})).json()["paused"]
        tasks = [asyncio.create_task(c.post("/v1/rollout/generate", json=asked(4))) for c in made]
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in tasks)
        async with httpx.AsyncClient(base_url=two.url) as other:
            state = (await other.get("/v1/rollout/pause")).json()
            assert (state["paused"], state["held"]) == (True, CLIENTS)
            assert (await other.post("/v1/rollout/resume")).status_code == 200
        assert {reply.status_code for reply in await asyncio.gather(*tasks)} == {200}
    finally:
        for client in made:
            await client.aclose()


async def test_an_abort_by_id_finds_it_wherever_it_runs(paced: LiveService) -> None:
    made = clients(paced)
    try:
        body = [asked(400, request_id=f"long-{i}") for i in range(CLIENTS)]
        tasks = [asyncio.create_task(c.post("/v1/rollout/generate", json=b)) for c, b in zip(made, body, strict=True)]
        await asyncio.sleep(0.3)
        async with httpx.AsyncClient(base_url=paced.url, timeout=30) as operator:
            ids = [f"long-{i}" for i in range(CLIENTS)]
            ended = (await operator.post("/v1/rollout/abort", json={"request_ids": ids})).json()["aborted"]
        reasons = [(await task).json()["outputs"][0]["finish_reason"] for task in tasks]
        assert reasons.count("abort") == ended == CLIENTS
    finally:
        for client in made:
            await client.aclose()


async def test_metrics_are_of_both_whichever_answers(two: LiveService) -> None:
    name = 'rollout_http_requests_total{route="/live",status="200"} '

    async def count() -> float:
        async with httpx.AsyncClient(base_url=two.url) as client:
            page = (await client.get("/metrics")).text
        return next((float(line[len(name) :]) for line in page.splitlines() if line.startswith(name)), 0.0)

    before = await count()
    for _ in range(CLIENTS):
        async with httpx.AsyncClient(base_url=two.url) as client:
            assert (await client.get("/live")).status_code == 200
    assert [await count() for _ in range(8)] == [before + CLIENTS] * 8


async def test_a_slow_reader_costs_only_itself(two: LiveService) -> None:
    """As many of them as make sure that each process has one; others are answered meanwhile."""
    slow = []
    body = b'{"prompt_ids": [[1, 2, 3]], "max_tokens": 400, "ignore_eos": true, "stream": true, "n": 8}'
    head = b"POST /v1/rollout/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    port = int(two.url.rpartition(":")[2])
    for _ in range(8):
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.connect(("127.0.0.1", port))
        raw.sendall(head + body)
        slow.append(raw)
    try:
        for _ in range(CLIENTS):
            async with httpx.AsyncClient(base_url=two.url, timeout=20) as client:
                assert (await client.post("/v1/rollout/generate", json=asked(2))).status_code == 200
                assert (await client.get("/health")).status_code == 200
    finally:
        for raw in slow:
            raw.close()


@pytest.mark.parametrize("index", [1, 0], ids=["a worker", "the lead"])
async def test_a_death_under_load_hangs_and_tears_nothing(two: LiveService, index: int) -> None:
    """Its connections break at once; all other requests end whole, and the port goes on answering."""
    until, answers, broken = time.monotonic() + 6.0, [], 0

    async def client_of_many(seed: int) -> None:
        nonlocal broken
        while time.monotonic() < until:
            try:
                async with httpx.AsyncClient(base_url=two.url, timeout=30) as client:
                    for turn in range(3):
                        body = asked(20, seed=seed, prompt_ids=[seed + 1, turn + 1])
                        answers.append((await client.post("/v1/rollout/generate", json=body)).json())
            except httpx.TransportError:
                broken += 1

    load = [asyncio.create_task(client_of_many(i)) for i in range(CLIENTS)]
    await asyncio.sleep(2.0)
    victim = api_process(two, index)
    os.kill(victim, signal.SIGKILL)
    await asyncio.wait_for(asyncio.gather(*load), 60)
    assert 0 < broken <= CLIENTS * 4
    for answer in answers:
        (output,) = answer["outputs"]
        assert output["finish_reason"] == "length", "a request of the other process was ended"
        assert len(output["token_ids"]) == len(output["logprobs"]) == 20
    assert api_process(two, index) != victim
    async with httpx.AsyncClient(base_url=two.url, timeout=30) as operator:
        assert (await operator.post("/v1/rollout/pause", json={"mode": "keep"})).status_code == 200
        assert (await operator.post("/v1/rollout/resume")).status_code == 200


async def test_a_pause_outlives_the_lead(two: LiveService) -> None:
    async with httpx.AsyncClient(base_url=two.url, timeout=30) as operator:
        assert (await operator.post("/v1/rollout/pause", json={"mode": "keep"})).status_code == 200
    made = clients(two)
    victim = api_process(two, 0)
    tasks = [asyncio.create_task(c.post("/v1/rollout/generate", json=asked(4))) for c in made]
    await asyncio.sleep(0.5)
    os.kill(victim, signal.SIGKILL)
    try:
        await asyncio.sleep(0.5)
        while api_process(two, 0) == victim:  # noqa: ASYNC110  a process has no event
            await asyncio.sleep(0.05)
        async with httpx.AsyncClient(base_url=two.url, timeout=30) as operator:
            deadline = time.monotonic() + BACK_S
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    if (await operator.get("/is_paused")).json().get("is_paused"):
                        break
                await asyncio.sleep(0.1)
            else:
                raise AssertionError("the new lead does not know of the pause")
            assert not any(t.done() and t.exception() is None for t in tasks), "nothing ran in the pause"
            assert (await operator.post("/v1/rollout/resume")).status_code == 200
        replies = await asyncio.gather(*tasks, return_exceptions=True)
        whole = [r for r in replies if isinstance(r, httpx.Response)]
        assert whole
        assert {r.status_code for r in whole} == {200}
    finally:
        for client in made:
            await client.aclose()

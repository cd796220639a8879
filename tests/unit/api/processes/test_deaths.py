"""Real API processes on one port, as `serve` starts them, between stand-ins of replicas and store; and kills."""

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections import Counter

import httpx
import pytest

from worker.messages import Generate

BODY = {"prompt_ids": [65], "max_tokens": 3}
GENERATE = "/v1/rollout/generate"
CLIENTS = 12
START_S = 30.0


class Fleet:
    """The processes; `start` one again after its `kill`, as the supervisor does."""

    def __init__(self, config):
        self._config = config
        self._path = config.run_dir / "config.json"
        self._path.write_text(json.dumps({"api": config.model_dump(mode="json") | {"port": 0}}))
        self.processes = {}
        self.url = ""

    async def start(self, index):
        words = (sys.executable, "-m", "api", "--config", str(self._path), "--index", str(index))
        self.processes[index] = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stderr=DEVNULL)

    async def ready(self, index):
        """Asked over its own socket: the port is everybody's."""
        transport = httpx.AsyncHTTPTransport(uds=str(self._config.run_dir / f"api-{index}.sock"))
        async with asyncio.timeout(START_S), httpx.AsyncClient(base_url="http://localhost", transport=transport) as own:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if all(r["ready"] for r in (await own.get("/ready")).json()["replicas"]):
                        break
                await asyncio.sleep(0.05)
        self.url = (self._config.run_dir / "http_url").read_text().strip()

    async def kill(self, index):
        self.processes[index].send_signal(signal.SIGKILL)
        await self.processes[index].wait()

    def client(self):
        return httpx.AsyncClient(base_url=self.url, timeout=30)

    async def once(self, method, path, **more):
        """On a connection of its own, which the system gives to any of them; broken ones are tried again."""
        for _ in range(50):
            with contextlib.suppress(httpx.TransportError):
                async with self.client() as client:
                    return await client.request(method, path, **more)
            await asyncio.sleep(0.05)
        raise AssertionError(f"nobody answers {path}")


@pytest.fixture
async def fleet(config, replicas, store):
    made = Fleet(config)
    await made.start(1)  # also when it comes first
    await made.start(0)
    for index in range(2):
        await made.ready(index)
    yield made
    for process in made.processes.values():
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
    ends = [await asyncio.wait_for(process.wait(), 20) for process in made.processes.values()]
    assert set(ends) <= {0, -signal.SIGKILL}


async def requests_total(fleet):
    name = 'rollout_http_requests_total{route="/live",status="200"} '
    page = (await fleet.once("GET", "/metrics")).text
    return next((float(line[len(name) :]) for line in page.splitlines() if line.startswith(name)), 0.0)


async def test_kills_under_load_hang_and_tear_nothing(fleet, replicas, until):
    for replica in replicas:
        replica.script = [7, 8, 9]
    told, broken, stop = Counter(), 0, asyncio.Event()

    async def one():
        nonlocal broken
        while not stop.is_set():
            with contextlib.suppress(httpx.ConnectError):
                try:
                    async with fleet.client() as client:
                        for streamed in (False, True):
                            reply = await client.post(GENERATE, json=BODY | {"stream": streamed})
                            if streamed:
                                assert reply.text.endswith("data: [DONE]\n\n")
                                events = [e for e in reply.text.split("\n\n") if e.startswith("data: {")]
                                outputs = [json.loads(e[6:])["outputs"][0] for e in events]
                                ids = [i for o in outputs for i in o["token_ids"]]
                            else:
                                outputs = reply.json()["outputs"]
                                ids = outputs[0]["token_ids"]
                            told[tuple(ids), outputs[-1]["finish_reason"]] += 1
                except (httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError):
                    broken += 1
            await asyncio.sleep(0.01)

    load = [asyncio.create_task(one()) for _ in range(CLIENTS)]
    for index in (1, 0):
        await asyncio.sleep(0.7)
        before = told.total()
        await fleet.kill(index)
        await until(lambda before=before: told.total() > before)  # the other goes on
        await fleet.start(index)
        await fleet.ready(index)
    stop.set()
    await asyncio.wait_for(asyncio.gather(*load), 30)
    assert set(told) == {((7, 8, 9), "length")}, "whole, and none of them ended by the death of another's process"
    assert broken <= 2 * CLIENTS


async def test_a_pause_holds_in_all_and_outlives_the_lead(fleet, replicas):
    assert (await fleet.once("POST", "/pause")).status_code == 200
    tasks = [asyncio.create_task(fleet.once("POST", GENERATE, json=BODY)) for _ in range(CLIENTS)]
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in tasks)
    await fleet.kill(0)
    await fleet.start(0)
    await fleet.ready(0)
    for _ in range(6):
        assert (await fleet.once("GET", "/is_paused")).json()["is_paused"]
    assert not any(task.done() for task in tasks)
    assert not any(r.got(Generate) for r in replicas)
    assert (await fleet.once("POST", "/resume")).status_code == 200
    assert {(await task).status_code for task in tasks} == {200}


async def test_one_page_of_metrics_which_a_death_does_not_shorten(fleet):
    for _ in range(CLIENTS):
        await fleet.once("GET", "/live")
    assert {await requests_total(fleet) for _ in range(5)} == {CLIENTS}
    for index in (1, 0):
        await fleet.kill(index)
        await fleet.start(index)
        await fleet.ready(index)
        assert await requests_total(fleet) == CLIENTS


async def test_a_slow_reader_costs_only_itself(fleet, replicas):
    """Eight that read nothing: each process has some of them. The others are answered."""
    port = int(fleet.url.rpartition(":")[2])
    slow = []
    for _ in range(8):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 4)
        slow.append(writer)
    await asyncio.sleep(0.2)
    async with asyncio.timeout(10):
        replies = await asyncio.gather(*(fleet.once("POST", GENERATE, json=BODY) for _ in range(CLIENTS)))
    assert {reply.status_code for reply in replies} == {200}
    for writer in slow:
        writer.transport.abort()

"""/v1/loads says what is, not what was a second ago."""

import asyncio

import pytest

from api import loads
from worker.messages import GetStats, Resume

BODY = {"text": "A", "sampling_params": {"max_new_tokens": 3}}


@pytest.fixture(autouse=True)
def gated(replicas):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)


async def asked(client, path="/v1/loads", **query):
    reply = await client.get(path, params=query)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    found = body["loads"] if path == "/v1/loads" else body
    return [(load["num_running_reqs"], load["num_waiting_reqs"], load["num_reqs"]) for load in found]


def generated(client, n=1):
    body = BODY | {"sampling_params": {"max_new_tokens": 3, "n": n}}
    return asyncio.create_task(client.post("/generate", json=body))


@pytest.mark.parametrize("path", ["/v1/loads", "/get_load"])
async def test_requests_count_from_their_start_to_their_end(client, replicas, until, path):
    assert await asked(client, path) == [(0, 0, 0), (0, 0, 0)]
    tasks = [generated(client) for _ in range(4)]
    await until(lambda: sum(len(r.running) for r in replicas) == 4)
    assert await asked(client, path) == [(2, 0, 2), (2, 0, 2)]
    for replica in replicas:
        for _ in range(12):
            replica.gate.release()
    await asyncio.gather(*tasks)
    assert await asked(client, path) == [(0, 0, 0), (0, 0, 0)]


async def test_a_replica_in_a_long_step_is_not_waited_for(client, service, replicas, until, monkeypatch):
    """What was sent to it since it spoke last counts as waiting."""
    monkeypatch.setattr(loads, "LIVE_S", 1.0)
    silence = asyncio.Event()
    replicas[0].waits[GetStats] = silence
    clock = asyncio.get_running_loop().time
    began, first = clock(), asyncio.create_task(asked(client))
    await asyncio.sleep(0.02)
    tasks = [generated(client) for _ in range(2)]
    await until(lambda: len(service.fleet.flights) == 2)
    assert (await first)[0] == (0, 1, 1)
    assert clock() - began < loads.LIVE_S + 4
    silence.set()
    for replica in replicas:
        for _ in range(6):
            replica.gate.release()
    await asyncio.gather(*tasks)
    assert await asked(client) == [(0, 0, 0), (0, 0, 0)]


async def test_requests_held_in_a_pause_are_waiting(client, service, replicas, until):
    await client.post("/pause")
    tasks = [generated(client) for _ in range(3)]
    await until(lambda: len(service.fleet.held) == 3)
    assert await asked(client) == [(0, 2, 2), (0, 1, 1)]
    for replica in replicas:
        for _ in range(12):
            replica.gate.release()
    await client.post("/resume")
    assert replicas[0].got(Resume)
    await asyncio.gather(*tasks)


async def test_a_lost_replica_has_no_load(client, service, replicas, until):
    await replicas[1].die()
    await until(lambda: not service.fleet.replicas[1].link.up)
    assert await asked(client) == [(0, 0, 0), (0, 0, 0)]


async def test_one_replica_of_several(client):
    assert await asked(client, dp_rank=1) == [(0, 0, 0)]
    assert (await client.get("/v1/loads", params={"dp_rank": 1})).json()["loads"][0]["dp_rank"] == 1
    assert (await client.get("/v1/loads", params={"dp_rank": 7})).status_code == 400
    assert (await client.get("/v1/loads", params={"format": "prometheus"})).status_code == 400
    assert (await client.get("/v1/loads", params={"format": "json", "include": "core"})).status_code == 200

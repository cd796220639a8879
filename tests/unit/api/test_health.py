import asyncio
import time

import pytest

from api import snapshot
from api.routes import health
from api.schemas.health import Health
from worker.messages import Generate


async def codes(client):
    return [(await client.get(path)).status_code for path in ("/live", "/health", "/ready")]


async def test_serving(client):
    assert await codes(client) == [200, 200, 200]
    body = (await client.get("/ready")).json()
    Health.model_validate(body)
    assert [r["ready"] for r in body["replicas"]] == [True, True]
    assert (body["weight_version"], body["store_connected"]) == (0, True)


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/rollout/weights"])
async def test_which_kernels_run_is_said_and_why_not_the_fastest(client, replicas, path):
    body = (await client.get(path)).json()
    said = [(replica["kernels"], replica["kernels_why"]) for replica in body["replicas"]]
    assert said == [("onednn", "no C compiler")] * len(replicas)


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/rollout/weights"])
async def test_whether_bits_depend_on_the_batch_is_said(client, replicas, path):
    assert len(replicas) == 2
    said = [replica["deterministic"] for replica in (await client.get(path)).json()["replicas"]]
    assert said == ["on", "off, because of the test"]
    info = (await client.get("/get_server_info")).json()
    assert info["enable_deterministic_inference"] is False
    assert [state["deterministic"] for state in info["internal_states"]] == said
    metrics = (await client.get("/metrics")).text
    assert 'rollout_deterministic{replica="0"} 1.0' in metrics
    assert 'rollout_deterministic{replica="1"} 0.0' in metrics


async def test_paused_is_ready_since_requests_are_held(client):
    await client.post("/v1/rollout/pause")
    assert await codes(client) == [200, 200, 200]
    assert (await client.get("/ready")).json()["paused"] is True


async def test_cleared_is_healthy_but_not_ready(client):
    await client.post("/v1/rollout/memory/release")
    assert await codes(client) == [200, 200, 503]


async def test_starting_and_dead_are_neither(client, replicas, until, service):
    replicas[0].move("starting")
    await replicas[1].die()
    await until(lambda: [r.state for r in service.fleet.replicas] == ["starting", "unreachable"])
    assert await codes(client) == [200, 503, 503]
    body = (await client.get("/health")).json()
    assert body["replicas"][1]["reason"] == "the process is gone, stood still, or cannot be reached"


async def test_a_replica_behind_the_live_version_is_not_ready(client, replicas, store, until, service):
    store.commit(5)
    await until(lambda: service.fleet.live.version == 5)
    assert (await client.get("/ready")).status_code == 503
    replicas[0].move("serving", 5)
    await until(lambda: service.fleet.replicas[0].version == 5)
    body = (await client.get("/ready")).json()
    assert [r["ready"] for r in body["replicas"]] == [True, False]


async def test_serving_goes_on_without_the_store(client, store, until, service):
    await store.close()
    await until(lambda: not service.weights.link.up)
    assert (await client.get("/ready")).json()["store_connected"] is False
    assert (await client.post("/v1/rollout/generate", json={"prompt": "A", "max_tokens": 1})).status_code == 200
    reply = await client.post("/v1/rollout/weights/load", json={"path": "/x"})
    assert reply.status_code == 503
    assert "weight store is not there" in reply.json()["error"]["message"]


async def test_health_generate_makes_a_token(client, replicas):
    assert (await client.get("/health_generate")).json() == {"status": "ok", "generated": True}
    assert sum(len(r.got(Generate)) for r in replicas) == 1


async def test_who_asks_for_a_token_while_one_is_made_gets_the_same_answer(client, replicas):
    """It asks for no token of access, and what it makes goes first: any number of such requests takes one place."""
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    replies = await asyncio.gather(*(client.get("/health_generate") for _ in range(20)))
    assert {reply.status_code for reply in replies} == {200}
    assert sum(len(r.got(Generate)) for r in replicas) == 1
    for replica in replicas:
        replica.gate = None
    assert (await client.get("/health_generate")).json()["generated"] is True


async def test_a_clock_that_is_set_back_makes_nobody_younger(client, monkeypatch, service):
    monkeypatch.setattr("time.time", lambda: service.started - 3600.0)
    assert 0 <= (await client.get("/live")).json()["uptime_s"] < 60
    assert 0 <= snapshot.take(service).uptime_s < 60


async def test_health_generate_asks_the_loops_when_a_token_takes_long(client, replicas, until, service):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    began = time.monotonic()
    assert (await client.get("/health_generate")).json() == {"status": "ok", "generated": False}
    assert time.monotonic() - began < 2
    await until(lambda: not any(r.running for r in replicas))
    await client.post("/v1/rollout/pause")
    assert (await client.get("/health_generate")).json()["generated"] is False


async def test_health_generate_asks_the_loops_of_a_service_that_has_all_it_takes(client, service, replicas, until):
    """Routers end an engine that does not say that it is well, and one that is at its limit is."""
    service.generations._max_requests = 1
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    request = asyncio.create_task(client.post("/v1/rollout/generate", json={"prompt": "A", "max_tokens": 1}))
    await until(lambda: any(r.running for r in replicas))
    reply = await client.get("/health_generate")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok", "generated": False})
    for replica in replicas:
        replica.gate.release()
    assert (await request).status_code == 200


async def test_health_generate_fails_when_no_loop_turns(client, replicas, until, service):
    for replica in replicas:
        await replica.die()
    await until(lambda: not any(r.link.up for r in service.fleet.replicas))
    assert (await client.get("/health_generate")).status_code == 503


async def test_health_generate_believes_a_loop_that_spoke_lately(client, replicas, monkeypatch):
    """In the middle of a long step nobody answers; whoever has been silent for longer is not believed."""
    for replica in replicas:
        replica.mute = True
    began = time.monotonic()
    assert (await client.get("/health_generate")).json() == {"status": "ok", "generated": False}
    assert time.monotonic() - began < 3.0
    monkeypatch.setattr(health, "LATELY_S", 0.1)
    assert (await client.get("/health_generate")).status_code == 503


async def test_one_turning_loop_is_enough(client, replicas, monkeypatch):
    monkeypatch.setattr(health, "LOOP_S", 30.0)
    await client.post("/v1/rollout/memory/release")
    replicas[0].mute = True
    began = time.monotonic()
    assert (await client.get("/health_generate")).json() == {"status": "ok", "generated": False}
    assert time.monotonic() - began < 10.0

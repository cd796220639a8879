"""What one request, one message or one bug of ours breaks is that alone: the rest goes on, and the log says what."""

import asyncio
import logging

import pytest

from api import link
from api.errors import EngineFailed
from api.generation import Flight
from worker import background
from worker.messages import Generate, SamplingParams

URL = "/v1/rollout/generate"
BODY = {"prompt": "A", "max_tokens": 3}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(background, "AGAIN_S", 0.01)
    monkeypatch.setattr(link, "AGAIN_S", 0.01)


def tracebacks(caplog):
    return [r for r in caplog.records if r.levelno == logging.ERROR and r.exc_info]


async def test_a_flight_that_cannot_be_sent_fails_alone_and_the_others_keep_their_order(
    client, service, replicas, until, caplog
):
    await client.post("/v1/rollout/pause", json={"mode": "keep"})
    first = asyncio.create_task(client.post(URL, json=BODY))
    await until(lambda: len(service.fleet.held) == 1)
    poison = Flight(Generate("poison", [1], SamplingParams(max_tokens=2**70)))
    service.fleet.submit(poison)
    last = asyncio.create_task(client.post(URL, json=BODY | {"prompt": "B"}))
    await until(lambda: len(service.fleet.held) == 3)
    assert (await client.post("/v1/rollout/resume")).status_code == 200
    assert {r.status_code for r in await asyncio.gather(first, last)} == {200}
    await asyncio.wait_for(poison.done.wait(), 30)
    assert isinstance(poison.error, EngineFailed)
    assert poison not in service.fleet.flights
    assert tracebacks(caplog)
    assert (await client.get("/ready")).status_code == 200
    assert (await client.post(URL, json=BODY)).status_code == 200


async def test_what_still_waits_behind_it_keeps_its_place(client, service, until):
    await client.post("/v1/rollout/pause", json={"mode": "keep"})
    wait = {"min_version": 9, "deadline": float("inf")}
    flights = [Flight(Generate(f"f{i}", [1], SamplingParams(max_tokens=1)), **wait) for i in range(4)]
    flights[1] = Flight(Generate("poison", [1], SamplingParams(max_tokens=2**70)))
    for flight in flights:
        service.fleet.submit(flight)
    await client.post("/v1/rollout/resume")
    assert list(service.fleet.held) == [flights[0], flights[2], flights[3]]


@pytest.mark.parametrize("of", ["replica", "store"])
async def test_a_link_whose_listener_fails_says_so_and_starts_over(
    of, client, service, replicas, store, until, caplog, monkeypatch
):
    failing = service.fleet.replicas[0] if of == "replica" else service.weights
    on_message, failures = failing.on_message, []

    def fail_once(message):
        if not failures:
            failures.append(message)
            raise RuntimeError("a bug")
        on_message(message)

    monkeypatch.setattr(failing, "on_message", fail_once)
    if of == "replica":
        replicas[0].move("paused")
    else:
        store.publish()
    await until(lambda: failures)
    await until(lambda: not failing.link.up)
    assert any("a bug" in str(r.exc_info[1]) for r in tracebacks(caplog))
    await until(lambda: failing.link.up)
    if of == "replica":
        assert failing.lost == 1
        replicas[0].move("serving")
    await until(lambda: all(r.serves(service.fleet.live) for r in service.fleet.replicas))
    assert (await client.post(URL, json=BODY)).status_code == 200


async def test_a_replica_whose_link_keeps_failing_is_not_ready(client, service, until, monkeypatch):
    def fail(message):
        raise RuntimeError("a bug")

    for replica in service.fleet.replicas:
        monkeypatch.setattr(replica, "on_message", fail)
    await until(lambda: all(r.lost for r in service.fleet.replicas))
    reply = await client.get("/ready")
    assert reply.status_code == 503
    assert "a bug" in reply.text


async def test_deadlines_are_kept_after_a_failure(client, service, until, caplog, monkeypatch):
    sweep, failures = service.fleet.sweep, []

    def fail_once(now):
        if not failures:
            failures.append(now)
            raise RuntimeError("a bug")
        sweep(now)

    monkeypatch.setattr(service.fleet, "sweep", fail_once)
    await client.post("/v1/rollout/pause", json={"lease_s": 0.2})
    await until(lambda: service.fleet.intents.paused is None)
    assert failures
    assert tracebacks(caplog)


async def test_work_that_ends_or_fails_starts_over(until, caplog):
    runs = []

    async def work():
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("a bug")
        if len(runs) > 2:
            await asyncio.Event().wait()

    task = asyncio.create_task(background.kept("counting", work))
    await until(lambda: len(runs) == 3)
    assert [r.getMessage() for r in caplog.records] == [
        f"counting failed; it starts over in {background.AGAIN_S:g} s",
        f"counting has ended; it starts over in {background.AGAIN_S:g} s",
    ]
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)


async def test_a_call_that_cannot_be_written_leaves_nothing_behind(service):
    replica = service.fleet.replicas[0]
    with pytest.raises(OverflowError):
        replica.link.start_call(lambda call: Generate(call, [2**70], SamplingParams()))
    await asyncio.sleep(0)
    assert not replica.link._calls


async def test_a_request_that_the_only_replica_refused_is_offered_again(client, service, replicas, until):
    """Nothing else has to happen: no other request, no change of the replica's state."""
    await replicas[1].die()
    await until(lambda: not service.fleet.replicas[1].link.up)
    replicas[0].refuse = "4096 requests are held already"
    request = asyncio.create_task(client.post(URL, json=BODY))
    await until(lambda: service.fleet.retried)
    replicas[0].refuse = ""
    assert (await asyncio.wait_for(request, 30)).status_code == 200

"""What becomes of requests when replicas refuse, die, fall silent or lag behind."""

import asyncio
from typing import Any

import pytest

from api.errors import Unavailable
from api.generation import Ask, Flight
from tests.unit.api.scripted import span
from worker.messages import Abort, Generate, SamplingParams

URL = "/v1/rollout/generate"
BODY = {"prompt": "A", "max_tokens": 3}


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"unready_hold_s": 0.5, "silence_s": 0.6, "stuck_s": 3.0}


def busy(replicas):
    return [r for r in replicas if r.running]


def gate(replicas, count=0):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(count)


def open_gate(replicas):
    for replica in replicas:
        for _ in range(100):
            replica.gate.release()


async def test_a_replica_of_other_weights_under_the_live_number_gets_nothing(service, store, replicas, until):
    """It missed that the number was gone back from and pushed again; its own word says that it serves."""
    store.commit(7, digest="b" * 16)
    replicas[0].digest, replicas[1].digest = "a" * 16, "b" * 16
    for replica in replicas:
        replica.move("serving", 7)
    await until(lambda: [r.version for r in service.fleet.replicas] == [7, 7] and service.fleet.live.version == 7)
    assert [r.serves(service.fleet.live) for r in service.fleet.replicas] == [False, True]
    replicas[0].digest = "b" * 16
    replicas[0].move("serving", 7)
    await until(lambda: all(r.serves(service.fleet.live) for r in service.fleet.replicas))


async def test_requests_spread_over_the_least_loaded(client, replicas, until):
    gate(replicas)
    tasks = [asyncio.create_task(client.post(URL, json=BODY)) for _ in range(6)]
    await until(lambda: sum(len(r.running) for r in replicas) == 6)
    assert [len(r.running) for r in replicas] == [3, 3]
    open_gate(replicas)
    assert {r.status_code for r in await asyncio.gather(*tasks)} == {200}


async def test_a_session_stays_on_its_replica(client, replicas):
    for _ in range(5):
        await client.post(URL, json=BODY, headers={"X-Session-ID": "s1"})
        await client.post(URL, json=BODY)
    ones = [len(r.got(Generate)) for r in replicas]
    assert max(ones) >= 5
    home = max(replicas, key=lambda r: len(r.got(Generate)))
    await home.die()
    await client.post(URL, json=BODY, headers={"X-Session-ID": "s1"})
    (other,) = [r for r in replicas if r is not home]
    assert len(other.got(Generate)) > min(ones)


async def test_a_dead_replicas_unseen_request_starts_over_elsewhere(client, replicas, until, service):
    gate(replicas)
    task = asyncio.create_task(client.post(URL, json=BODY))
    await until(lambda: busy(replicas))
    (dying,) = busy(replicas)
    await dying.die()
    await until(lambda: busy(replicas))
    open_gate(replicas)
    reply = await task
    assert reply.json()["outputs"][0]["text"] == "BCD"
    assert reply.json()["outputs"][0]["finish_reason"] == "length"
    assert service.fleet.retried == 1


async def test_a_dead_replicas_seen_stream_ends_with_abort_and_partials(client, service, replicas, until):
    gate(replicas)
    task = asyncio.create_task(client.post(URL, json=BODY | {"stream": True}))
    await until(lambda: busy(replicas))
    (dying,) = busy(replicas)
    dying.gate.release()
    flight = next(iter(service.fleet.flights))
    await until(lambda: sum(len(sample.token_ids) for sample in flight.samples) == 1)
    await dying.die()
    text = (await task).text
    assert '"token_ids":[66]' in text
    assert '"finish_reason":"abort"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert (
        '"spans":[{"version":0,"start":0,"end":1,"recomputed":false,"digest":"d000000000000000"}]'
        in text.split("\n\n")[-3]
    )


@pytest.mark.parametrize("settings", [{"silence_s": 3.0, "stuck_s": 120.0}])
async def test_a_replica_in_a_long_step_is_kept(client, replicas, until, service, settings):
    """Its loop says nothing for longer than a dead process may, while ZMQ's thread in it answers."""
    gate(replicas)
    task = asyncio.create_task(client.post(URL, json=BODY))
    await until(lambda: busy(replicas))
    (stepping,) = busy(replicas)
    stepping.mute = True
    await until(lambda: service.fleet.replicas[stepping.index].link.silent_s > 1.5 * settings["silence_s"])
    body = (await client.get("/health")).json()
    assert "in a long step" in body["replicas"][stepping.index]["reason"]
    open_gate([replicas[1 - stepping.index]])
    others = [asyncio.create_task(client.post(URL, json=BODY)) for _ in range(3)]  # they go where there is an answer
    assert {reply.status_code for reply in await asyncio.gather(*others)} == {200}
    stepping.mute = False
    open_gate(replicas)
    reply = await task
    assert (reply.status_code, reply.json()["outputs"][0]["finish_reason"]) == (200, "length")
    assert service.fleet.replicas[stepping.index].lost == 0
    assert service.fleet.retried == 0
    assert (await client.get("/health")).json()["replicas"][stepping.index]["reason"] == ""


async def test_a_silent_replica_is_given_up_by_deadline(client, replicas, until, service):
    gate(replicas)
    task = asyncio.create_task(client.post(URL, json=BODY))
    await until(lambda: busy(replicas))
    (stuck,) = busy(replicas)
    stuck.mute = True
    await until(lambda: replicas[1 - stuck.index].running)
    open_gate(replicas)
    assert (await task).status_code == 200
    assert service.fleet.replicas[stuck.index].lost == 1


async def test_a_refusal_goes_elsewhere(client, replicas):
    replicas[0].refuse = "draining"
    replies = await asyncio.gather(*(client.post(URL, json=BODY) for _ in range(4)))
    assert {r.status_code for r in replies} == {200}
    assert len(replicas[1].got(Generate)) == 4


async def test_nobody_ready_is_503_after_the_hold(client, replicas):
    for replica in replicas:
        replica.move("starting")
    await asyncio.sleep(0.05)
    reply = await client.post(URL, json=BODY)
    assert reply.status_code == 503
    assert "replica 0 is starting" in reply.json()["error"]["message"]


async def test_a_replica_of_another_version_gets_nothing(client, replicas, store, until, service):
    store.commit(7)
    replicas[1].move("serving", 7)
    await until(lambda: service.fleet.replicas[1].version == 7 and service.fleet.live.version == 7)
    for _ in range(4):
        reply = await client.post(URL, json=BODY)
        assert reply.json()["outputs"][0]["spans"][0]["version"] == 7
    assert replicas[0].got(Generate) == []


async def test_a_new_connection_ends_what_an_earlier_one_left_running(replicas, service, until):
    await until(lambda: all(r.got(Abort) for r in replicas))
    assert all(r.got(Abort)[0].request_ids is None for r in replicas)


async def test_min_version_waits_and_then_says_409(client, replicas, store, until, service):
    body = BODY | {"min_weight_version": 3, "version_timeout_s": 0.3}
    reply = await client.post(URL, json=body)
    assert reply.status_code == 409
    assert "version 3; live is 0" in reply.json()["error"]["message"]
    task = asyncio.create_task(client.post(URL, json=body | {"version_timeout_s": 5}))
    await asyncio.sleep(0.05)
    for replica in replicas:
        replica.move("serving", 3)
    store.commit(3)
    assert (await task).json()["outputs"][0]["spans"] == [span(3, 0, 3)]


async def test_a_request_gone_stale_is_aborted(client, replicas, store, until):
    gate(replicas)
    task = asyncio.create_task(client.post(URL, json=BODY | {"max_staleness": 1}))
    await until(lambda: busy(replicas))
    store.commit(1)
    await asyncio.sleep(0.1)
    assert not task.done()
    store.commit(2)
    assert (await task).json()["outputs"][0]["finish_reason"] == "abort"


async def test_abort_by_id_gives_partials_and_counts(client, replicas, until):
    gate(replicas, 1)
    one = asyncio.create_task(client.post(URL, json=BODY | {"request_id": "one"}))
    two = asyncio.create_task(client.post(URL, json=BODY | {"request_id": "one-and-a-half"}))
    await until(lambda: len(busy(replicas)) == 2 and all(r.gate.locked() for r in replicas))
    assert (await client.post("/v1/rollout/abort", json={"request_ids": ["one", "nobody"]})).json() == {
        "aborted": 1,
        "unreached": [],
    }
    output = (await one).json()["outputs"][0]
    assert (output["finish_reason"], output["token_ids"], output["text"]) == ("abort", [66], "B")
    assert not two.done()
    assert (await client.post("/v1/rollout/abort")).json() == {"aborted": 1, "unreached": []}
    assert (await two).json()["outputs"][0]["finish_reason"] == "abort"


async def test_aborting_a_held_request_answers_it_with_no_tokens(client, until, service):
    await client.post("/v1/rollout/pause")
    task = asyncio.create_task(client.post(URL, json=BODY | {"n": 2}))
    await until(lambda: service.fleet.held)
    assert (await client.post("/v1/rollout/abort")).json() == {"aborted": 1, "unreached": []}
    for output in (await task).json()["outputs"]:
        assert (output["token_ids"], output["finish_reason"]) == ([], "abort")
        assert output["spans"] == [span(0, 0, 0)]


async def test_a_sequence_that_dies_in_the_engine_is_an_error(client, replicas):
    for replica in replicas:
        replica.finish = "error"
    assert (await client.post(URL, json=BODY)).status_code == 500
    text = (await client.post(URL, json=BODY | {"stream": True})).text
    assert '"error":' in text


@pytest.mark.parametrize("settings", [{"request_timeout_s": 0.3}])
async def test_a_request_that_takes_too_long_ends_with_what_it_has(client, replicas, service, until):
    gate(replicas, 1)
    output = (await client.post(URL, json=BODY)).json()["outputs"][0]
    assert (output["finish_reason"], output["token_ids"]) == ("abort", [66])
    assert not service.fleet.flights


async def test_leaving_sends_away_what_is_held_and_takes_nothing_more(client, service, until):
    await client.post("/v1/rollout/pause")
    task = asyncio.create_task(client.post(URL, json=BODY))
    await until(lambda: service.fleet.held)
    service.fleet.close()
    for reply in (await task, await client.post(URL, json=BODY)):
        assert reply.status_code == 503
        assert "stopping" in reply.json()["error"]["message"]


async def test_too_many_requests(client, service, until):
    service.generations._max_requests = 2
    await client.post("/v1/rollout/pause")
    tasks = [asyncio.create_task(client.post(URL, json=BODY)) for _ in range(2)]
    await until(lambda: len(service.fleet.held) == 2)
    reply = await client.post(URL, json=BODY)
    assert reply.status_code == 429
    await client.post("/v1/rollout/resume")
    await asyncio.gather(*tasks)


async def test_a_request_that_comes_is_not_paid_for_by_all_that_are_held(service, replicas, until, monkeypatch):
    """Thousands may be held while a replica restarts."""
    for replica in replicas:
        replica.move("starting")
    fleet = service.fleet
    await until(lambda: not any(r.serves(fleet.live) for r in fleet.replicas))
    looked, choose = [], fleet._choose
    monkeypatch.setattr(fleet, "_choose", lambda flight: looked.append(flight) or choose(flight))
    flights = [Flight(Generate(f"f{i}", [1], SamplingParams(max_tokens=1))) for i in range(50)]
    for flight in flights:
        fleet.submit(flight)
    assert len(looked) == len(flights)
    assert list(fleet.held) == flights
    replicas[0].move("serving")
    await until(lambda: all(flight.done.is_set() for flight in flights))


async def test_an_aborted_request_does_not_begin_again_when_its_replica_dies_before_it_has_ended(
    client, replicas, until, service
):
    """As where a replica hangs, somebody ends everything because of that, and the replica is then given up."""
    gate(replicas)
    task = asyncio.create_task(client.post(URL, json=BODY))
    await until(lambda: busy(replicas))
    (dying,) = busy(replicas)
    dying.mute = True  # it hears the abort, and does not get to saying so
    aborted = asyncio.create_task(client.post("/v1/rollout/abort"))
    await until(lambda: [a for a in dying.got(Abort) if a.request_ids])
    await dying.die()
    assert (await aborted).json() == {"aborted": 1, "unreached": []}
    output = (await task).json()["outputs"][0]
    assert (output["finish_reason"], output["token_ids"]) == ("abort", [])
    assert output["spans"] == [span(0, 0, 0)]
    assert not replicas[1 - dying.index].got(Generate)
    assert service.fleet.retried == 0


async def test_an_aborted_request_does_not_go_elsewhere_when_its_replica_refuses_it(service, replicas, until):
    """The abort passes the refusal on the way: the replica knows no such request then."""
    for replica in replicas:
        replica.refuse = "draining"
    flight = Flight(Generate("one", [1], SamplingParams(max_tokens=1)))
    service.fleet.submit(flight)
    service.fleet.cancel(flight)
    await until(flight.done.is_set)
    assert [sample.finish for sample in flight.samples] == ["abort"]
    assert sum(len(replica.got(Generate)) for replica in replicas) == 1


async def test_a_request_that_was_not_taken_on_does_not_keep_its_id(service):
    """Else a client that tries again joins a request that nobody runs, and waits for ever."""
    ask = Ask([[1]], SamplingParams(max_tokens=1), request_id="one")
    service.fleet.close()
    for _ in range(2):
        with pytest.raises(Unavailable):
            service.generations.submit(ask)
    assert service.generations.open == 0

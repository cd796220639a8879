"""What operators asked of the fleet, pauses and clears, and replicas that were away meanwhile."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from api.intents import Intents
from api.service import Service
from worker.messages import CallFailed, Clear, Pause, Reload, Resume

URL = "/v1/rollout/generate"
BODY = {"prompt": "A", "max_tokens": 3}


async def test_paused_requests_are_held_until_resume(client, replicas, until, service):
    assert (await client.post("/v1/rollout/pause", json={"mode": "keep"})).json()["paused"] is True
    for replica in replicas:
        replica.move("serving")  # what holds requests is the pause, not only the state of replicas
    await until(lambda: all(r.state == "serving" for r in service.fleet.replicas))
    task = asyncio.create_task(client.post(URL, json=BODY))
    await asyncio.sleep(0.7)  # longer than the hold of a fleet that is not ready
    assert not task.done()
    state = (await client.get("/v1/rollout/pause")).json()
    assert (state["paused"], state["mode"], state["held"]) == (True, "keep", 1)
    assert 3590 < state["lease_left_s"] <= 3600, "a pause that names no lease has the configured one"
    assert (await client.post("/v1/rollout/resume")).json()["paused"] is False
    assert (await task).status_code == 200


async def test_a_pause_reaches_a_replica_that_comes_late(client, replicas, until, service):
    await replicas[1].die()
    await until(lambda: not service.fleet.replicas[1].link.up)
    await client.post("/v1/rollout/pause", json={"mode": "keep", "lease_s": 30})
    replicas[1].start()
    await until(lambda: replicas[1].got(Pause))
    (late,) = replicas[1].got(Pause)
    assert late.mode == "keep"
    assert 28 < late.lease_s < 30


async def test_an_expired_lease_resumes_and_says_so(client, replicas, until, service):
    await client.post("/v1/rollout/pause", json={"lease_s": 0.3})
    task = asyncio.create_task(client.post(URL, json=BODY))
    assert (await task).status_code == 200
    assert service.fleet.intents.lease_expiries == 1
    assert all(r.got(Resume) for r in replicas)


async def test_a_failed_pause_is_undone_everywhere(client, replicas, service, until):
    replicas[1].fail[Pause] = CallFailed("", "timeout", "3 sequences still ran", rank=0)
    reply = await client.post("/v1/rollout/pause", json={"mode": "wait"})
    assert reply.status_code == 409
    assert "replica 1" in reply.json()["error"]["message"]
    assert service.fleet.intents.paused is None
    assert (await client.get("/v1/rollout/pause")).json()["paused"] is False
    await until(lambda: replicas[0].state == "serving")
    assert (await client.post(URL, json=BODY)).status_code == 200


async def test_a_failed_second_pause_leaves_the_first(client, replicas, service):
    await client.post("/v1/rollout/pause", json={"mode": "keep"})
    replicas[1].fail[Pause] = CallFailed("", "conflict", "not now")
    assert (await client.post("/v1/rollout/pause", json={"mode": "wait"})).status_code == 409
    assert service.fleet.intents.paused.mode == "keep"


async def test_a_restarted_api_finds_replicas_and_pause_again(config, model, replicas, store, service, until):
    for replica in replicas:
        replica.move("paused")
        replica.pause_mode = "keep"
    second = Service(config, model)
    async with second.running():
        await until(lambda: second.fleet.intents.paused is not None)
        assert second.fleet.intents.paused.mode == "keep"
        for replica in replicas:
            replica.move("serving")
        await until(lambda: second.fleet.intents.paused is None)


async def test_a_restarted_api_passes_on_no_more_of_a_pause_than_is_left_of_its_lease(
    config, model, replicas, store, service, until
):
    """The API and a replica are killed in a pause. Without a lease the replica would stand still for ever."""
    replicas[0].move("paused")
    replicas[0].pause_mode, replicas[0].pause_left_s = "keep", 1.5
    second = Service(config, model)
    async with second.running():
        await until(lambda: replicas[1].got(Pause))
        (late,) = replicas[1].got(Pause)
        assert late.mode == "keep"
        assert 0.0 < late.lease_s <= 1.5
        await until(lambda: second.fleet.intents.paused is None)


@pytest.mark.parametrize("state", ["cleared", "starting"])
async def test_a_restarted_api_learns_of_a_pause_that_waits_behind_another_state(
    config, model, replicas, store, service, until, state
):
    """Else what comes is refused after a while once the replicas stand still again, and `is_paused` says no."""
    for replica in replicas:
        replica.released = {"weights"} if state == "cleared" else set()
        replica.pause_mode = "keep"
        replica.move(state)
    second = Service(config, model)
    async with second.running():
        await until(lambda: all(r.stats for r in second.fleet.replicas))
        assert second.fleet.intents.paused is not None
        for replica in replicas:
            replica.move("paused")
        await until(lambda: all(r.state == "paused" for r in second.fleet.replicas))
        assert second.fleet.intents.paused is not None


async def test_a_pause_that_comes_late_treats_caches_as_it_was_asked_to(client, replicas, until, service):
    await away(replicas[1], service, until)
    await client.post("/v1/rollout/pause", json={"mode": "keep", "clear_cache": False})
    replicas[1].start()
    await until(lambda: replicas[1].got(Pause))
    assert [late.clear_cache for late in replicas[1].got(Pause)] == [False]


@pytest.mark.parametrize("what", ["the clock is set back", "a second pause", "a second pause that fails", "a failure"])
async def test_seconds_of_pauses_never_become_less(client, replicas, service, until, monkeypatch, what):
    """For Prometheus a counter that falls has begun anew: all of it is added once more."""
    intents, pause = service.fleet.intents, "/v1/rollout/pause"
    done = asyncio.Event()
    if what == "a failure":
        replicas[0].waits[Pause], replicas[1].fail[Pause] = done, CallFailed("", "conflict", "not now")
        task = asyncio.create_task(client.post(pause, json={"mode": "keep"}))
    else:
        await client.post(pause, json={"mode": "keep"})
    await until(lambda: intents.paused is not None)
    await asyncio.sleep(0.1)
    before = intents.paused_seconds
    assert before >= 0.05
    match what:
        case "the clock is set back":
            monkeypatch.setattr(time, "time", lambda: 1e9)
        case "a second pause":
            await client.post(pause, json={"mode": "abort"})
        case "a second pause that fails":
            replicas[1].fail[Pause] = CallFailed("", "conflict", "not now")
            assert (await client.post(pause, json={"mode": "wait"})).status_code == 409
        case "a failure":
            done.set()
            assert (await task).status_code == 409
    assert before <= intents.paused_seconds < before + 20
    await client.post("/v1/rollout/resume")
    assert before <= intents.paused_seconds < before + 20


def test_the_api_of_a_node_adds_up_the_pauses_that_its_replicas_show():
    replica = SimpleNamespace(state="serving")
    intents = Intents(SimpleNamespace(replicas=[replica], count_unready_from_now=lambda: None), None, of_node=True)
    seen = [intents.paused_seconds]
    for state in ("paused", "cleared", "paused", "serving", "paused"):
        replica.state = state
        intents.replicas_changed()
        time.sleep(0.01)
        seen.append(intents.paused_seconds)
    assert seen == sorted(seen)
    assert seen[-1] >= 0.03


async def test_cleared_replicas_are_kept_cleared(client, replicas, service, until):
    reply = await client.post("/v1/rollout/memory/release")
    assert reply.json() == {"released_bytes": 2000, "cleared": ["kv_cache", "weights"]}
    await replicas[0].die()
    await until(lambda: not service.fleet.replicas[0].link.up)
    replicas[0].state = "serving"
    replicas[0].start()
    await until(lambda: len(replicas[0].got(Clear)) == 2)
    assert (await client.post("/v1/rollout/memory/resume")).json()["cleared"] == []
    assert (await client.post(URL, json=BODY)).status_code == 200


@pytest.mark.parametrize("who", [(1,), (0, 1)], ids=["one cannot", "none can"])
async def test_a_clear_that_some_have_done_stays_what_is_wanted(client, replicas, service, until, who):
    for index in who:
        replicas[index].fail[Clear] = CallFailed("", "conflict", "its version is not mapped yet")
    assert (await client.post("/v1/rollout/memory/release")).status_code == 409
    assert service.fleet.intents.cleared == (set() if len(who) == 2 else {"kv_cache", "weights"})
    if len(who) == 1:
        replicas[1].fail.clear()
        replicas[1].move("starting")
        replicas[1].move("serving")
        await until(lambda: replicas[1].state == "cleared")
    assert (await client.post("/v1/rollout/memory/resume")).json()["cleared"] == []
    await until(lambda: [r.state for r in service.fleet.replicas] == ["serving", "serving"])


async def away(replica, service, until):
    await replica.die()
    await until(lambda: not service.fleet.replicas[replica.index].link.up)


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"], ["kv_cache", "weights"]])
async def test_a_replica_that_was_away_when_the_fleet_was_reloaded_is_reloaded_too(
    client, replicas, service, until, tags
):
    await client.post("/v1/rollout/memory/release", json={"tags": tags})
    await away(replicas[1], service, until)
    assert (await client.post("/v1/rollout/memory/resume", json={"tags": tags})).json()["cleared"] == []
    replicas[1].start()
    await until(lambda: [r.state for r in service.fleet.replicas] == ["serving", "serving"])
    assert service.fleet.intents.cleared == set()
    assert [sorted(reload.tags) for reload in replicas[1].got(Reload)] == [tags]
    assert len(replicas[0].got(Clear)) == 1


async def test_a_replica_that_was_away_when_the_fleet_was_resumed_is_resumed_too(client, replicas, service, until):
    await client.post("/v1/rollout/pause", json={"mode": "keep", "lease_s": 0})
    await away(replicas[1], service, until)
    await client.post("/v1/rollout/resume")
    replicas[1].start()
    await until(lambda: [r.state for r in service.fleet.replicas] == ["serving", "serving"])
    assert service.fleet.intents.paused is None
    assert (await client.post(URL, json=BODY)).status_code == 200


async def test_a_restarted_api_learns_what_is_released_and_no_more(client, replicas, service, until):
    for replica in replicas:
        await away(replica, service, until)
        replica.state, replica.released = "cleared", {"weights"}
        replica.start()
    await until(lambda: service.fleet.intents.cleared == {"weights"})
    await client.post("/v1/rollout/memory/resume", json={"tags": ["weights"]})
    await until(lambda: [r.state for r in service.fleet.replicas] == ["serving", "serving"])
    assert [replica.got(Clear) for replica in replicas] == [[], []]


async def test_a_reload_that_is_refused_leaves_the_one_under_way_alone(client, replicas, service, until):
    await client.post("/v1/rollout/memory/release")
    done = asyncio.Event()
    for replica in replicas:
        replica.waits[Reload] = done
    first = asyncio.create_task(client.post("/v1/rollout/memory/resume"))
    await until(lambda: all(replica.got(Reload) for replica in replicas))
    second = await client.post("/v1/rollout/memory/resume", json={"tags": ["kv_cache"]})
    assert second.status_code == 409
    done.set()
    assert (await first).json()["cleared"] == []
    assert (await client.post(URL, json=BODY)).status_code == 200
    assert [len(replica.got(Clear)) for replica in replicas] == [1, 1], "nobody asked to clear them again"


def test_one_that_is_first_heard_while_the_others_are_reloaded_follows_them():
    intents = Intents(SimpleNamespace(), None, of_node=False)
    intents.reloaded, intents.cleared, intents.returning = True, {"weights", "kv_cache"}, {"weights"}
    posted = []
    replica = SimpleNamespace(link=SimpleNamespace(post=posted.append))
    intents.meet(replica, SimpleNamespace(state="cleared", pause_mode=None, released=["kv_cache", "weights"]))
    assert [(type(message), message.tags) for message in posted] == [(Reload, ("weights",))]


async def test_a_pause_may_have_no_lease(client):
    assert (await client.post("/v1/rollout/pause", json={"lease_s": 0})).json()["lease_left_s"] is None

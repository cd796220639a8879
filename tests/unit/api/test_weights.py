import asyncio

from api.schemas.rollout import WeightsResponse
from tests.unit.api.scripted import digest_of
from weight_manager.messages import AbortSession, LoadDisk, Result

WEIGHTS = "/v1/rollout/weights"


async def test_what_is_live_and_who_holds_it(client, store, until, service):
    store.session = {"version": 1, "state": "staging"}
    store.publish()
    await until(lambda: service.weights.status.session)
    body = (await client.get(WEIGHTS)).json()
    WeightsResponse.model_validate(body)
    assert body["live"] == {"run_id": "", "version": 0, "epoch": 1, "digest": digest_of(0)}
    assert body["session"]["state"] == "staging"
    assert [r["ready"] for r in body["replicas"]] == [True, True]
    assert body["replicas"][0]["store"] == {"ready": True, "adapters": {"live": {}}}


async def test_waiting_for_a_version(client, store):
    task = asyncio.create_task(client.get(f"{WEIGHTS}/wait", params={"version": 2, "timeout_s": 5}))
    await asyncio.sleep(0.05)
    store.commit(1)
    await asyncio.sleep(0.05)
    assert not task.done()
    store.commit(3)
    assert (await task).json()["live"]["version"] == 3


async def test_loading_a_directory(client, store):
    body = {"path": "/ckpt", "version": 4, "in_flight": "abort", "deadline_s": 9, "force": True}
    reply = await client.post(f"{WEIGHTS}/load", json=body)
    assert (reply.status_code, reply.json()["version"]) == (200, 4)
    (message,) = [m for m in store.received if isinstance(m, LoadDisk)]
    assert (message.path, message.version, message.in_flight, message.deadline_s, message.force) == tuple(body.values())


async def test_what_the_store_refuses_keeps_its_reason_and_tensors(client, store):
    for code, status in {
        "shape_mismatch": 400,
        "stale_version": 409,
        "busy": 409,
        "refused": 409,
        "io": 400,
        "not_ready": 503,
        "internal": 500,
    }.items():
        store.results[LoadDisk] = Result("", False, code, "because", ["w"])
        reply = await client.post(f"{WEIGHTS}/load", json={"path": "/ckpt"})
        assert reply.status_code == status, code
        error = reply.json()["error"]
        assert (error["message"], error["code"], error["tensors"]) == ("because", code, ["w"])


async def test_ending_a_push(client, store):
    assert (await client.post(f"{WEIGHTS}/abort", json={"reason": "wrong one"})).json() == {"ok": True}
    assert [m.reason for m in store.received if isinstance(m, AbortSession)] == ["wrong one"]
    store.results[AbortSession] = Result("", False, "unknown_session", "no push is running")
    assert (await client.post(f"{WEIGHTS}/abort")).status_code == 409


async def test_verify_names_what_replicas_hold_differently(client, replicas):
    body = (await client.post(f"{WEIGHTS}/verify")).json()
    assert body["replicas"]["1"]["0"] == {"model.norm.weight": "00000000000000ff"}
    assert body["differing"] == []
    replicas[1].checksum = "0000000000000001"
    assert (await client.post(f"{WEIGHTS}/verify")).json()["differing"] == ["model.norm.weight"]

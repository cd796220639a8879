import base64

from api import snapshot
from weight_manager.messages import Checksums, ReadTensor, Result, RollbackWeights

WEIGHTS = "/v1/rollout/weights"


async def test_a_rollback_is_passed_on_and_reported(client, store):
    store.results[RollbackWeights] = Result("", True, data={"version": 3, "replicas": 2})
    reply = await client.post(f"{WEIGHTS}/rollback", json={"in_flight": "abort", "deadline_s": 7})
    assert (reply.status_code, reply.json()) == (200, {"version": 3, "report": {"version": 3, "replicas": 2}})
    (message,) = [m for m in store.received if isinstance(m, RollbackWeights)]
    assert (message.in_flight, message.deadline_s) == ("abort", 7)


async def test_nothing_to_roll_back_to(client, store):
    store.results[RollbackWeights] = Result("", False, "not_ready", "no previous version is kept")
    reply = await client.post(f"{WEIGHTS}/rollback")
    assert reply.status_code == 409
    assert "no previous version" in reply.text


async def test_checksums_are_compared_with_a_baseline(client, store):
    data = {"version": 1, "digest": "d" * 16, "ranks": {"0": {"a": "1" * 16}}, "differ": ["b"]}
    store.results[Checksums] = Result("", True, data=data)
    reply = await client.post(f"{WEIGHTS}/checksums", json={"baseline": {"b": "0" * 16}})
    assert (reply.status_code, reply.json()) == (200, data)
    assert store.received[-1].baseline == {"b": "0" * 16}


async def test_one_tensor_is_read_back_within_bounds(client, store):
    data = {"name": "a", "version": 1, "epoch": 2, "dtype": "float32", "shape": [4], "offset": 4, "more": True}
    data |= {"bytes": b"abcd"}
    store.results[ReadTensor] = Result("", True, data=data)
    reply = await client.get(f"{WEIGHTS}/tensor", params={"name": "a", "offset": 4, "limit": 4})
    assert base64.b64decode(reply.json()["data"]) == b"abcd"
    assert (await client.get(f"{WEIGHTS}/tensor", params={"name": "a", "limit": (4 << 20) + 1})).status_code == 400


async def test_a_fenced_service_is_not_ready(client, store, until, service):
    assert (await client.get("/ready")).status_code == 200
    store.relay = {"above": {"fenced": True}, "below": {}}
    store.publish()
    await until(lambda: service.weights.fenced)
    reply = await client.get("/ready")
    assert (reply.status_code, reply.json()["fenced"]) == (503, True)
    assert snapshot.take(service).ready is False, "the status page says the same"
    store.relay = {"above": {"fenced": False}, "below": {}}
    store.publish()
    await until(lambda: not service.weights.fenced)
    assert (await client.get("/ready")).status_code == 200
    assert (await client.get(WEIGHTS)).json()["relay"]["above"] == {"fenced": False}

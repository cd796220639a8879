import asyncio
import json

import pytest

from api.schemas.tokens import TokenResponse
from tests.unit.api.scripted import span
from weight_manager.messages import CommitSession, LoadDisk
from worker.messages import Clear, Generate, Pause, Reload

URL = "/inference/v1/generate"


async def post(client, path, body=None, status=200, **params):
    reply = await client.post(path, json=body, params=params)
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_tokens_in_tokens_out(client, replicas):
    params = {"max_tokens": 3, "logprobs": 1, "prompt_logprobs": 0, "stop_token_ids": [9, 5000], "detokenize": False}
    body = await post(
        client, URL, {"model": "tiny", "token_ids": [65, 66], "sampling_params": params, "request_id": "r1"}
    )
    TokenResponse.model_validate(body)
    assert body["request_id"] == "r1"
    (choice,) = body["choices"]
    assert choice["token_ids"] == [67, 68, 69]
    assert len(choice["logprobs"]["content"]) == 3
    assert choice["logprobs"]["content"][0] == {
        "token": "token_id:67",
        "token_id": 67,
        "logprob": -0.5,
        "rank": 1,
        "top_logprobs": [{"token": "token_id:67", "token_id": 67, "logprob": -0.5}],
    }
    assert choice["weight_versions"] == [span("default", 0, 3)]
    assert body["prompt_logprobs"] == [None, {"66": {"logprob": -1.0, "rank": 1, "decoded_token": "B"}}]
    assert body["usage"]["completion_tokens"] == 3
    (message,) = [m for r in replicas for m in r.got(Generate)]
    assert message.sampling.stop_token_ids == [9], "a stop id the model cannot sample is dropped, not refused"


async def test_no_logprobs_unless_asked(client):
    body = await post(client, URL, {"token_ids": [65], "sampling_params": {"max_tokens": 1}})
    assert body["choices"][0]["logprobs"] is None
    body = await post(client, URL, {"token_ids": [65], "sampling_params": {"max_tokens": 1, "logprobs": 0}})
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []
    assert entry["rank"] == 1


async def test_streamed_tokens(client):
    body = {"token_ids": [65], "sampling_params": {"max_tokens": 3, "n": 2}, "stream": True}
    events = (await client.post(URL, json=body)).text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    parts = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events[:-1]]
    assert [i for p in parts if p["index"] == 1 for i in p["token_ids"]] == [66, 67, 68]


@pytest.mark.parametrize(
    ("query", "mode", "clear"),
    [
        ({}, "abort", True),
        ({"mode": "wait"}, "wait", True),
        ({"mode": "keep"}, "recompute", True),
        ({"mode": "keep", "clear_cache": "false"}, "keep", False),
    ],
)
async def test_pause(client, replicas, query, mode, clear):
    assert await post(client, "/pause", **query) == {"status": "paused"}
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    (message,) = replicas[0].got(Pause)
    assert (message.mode, message.clear_cache) == (mode, clear)
    for _ in range(2):
        assert await post(client, "/resume") == {"status": "resumed"}
    assert (await client.get("/is_paused")).json() == {"is_paused": False}


async def test_bad_pause_mode_is_400(client):
    await post(client, "/pause", status=400, mode="sleepy")


async def test_abort_requests(client):
    assert await post(client, "/abort_requests") == {"status": "aborted", "aborted": 0, "unreached": []}
    assert await post(client, "/abort_requests", {"request_ids": []}) == {
        "status": "aborted",
        "aborted": 0,
        "unreached": [],
    }


async def test_four_phases(client, store, replicas):
    ready = await post(client, "/init_weight_transfer_engine", {"init_info": {"backend": "zmq"}})
    assert ready["endpoints"] == ["tcp://127.0.0.1:5600"]
    await post(client, "/start_weight_update", {})
    await post(client, "/start_weight_update", {}, status=409)
    bucket = {"update_info": {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[1], [2]]}}
    store.push(verified=1)
    waiting = asyncio.create_task(client.post("/update_weights", json=bucket))
    await asyncio.sleep(0.1)
    store.arrived.add("a")
    await asyncio.sleep(0.1)
    assert not waiting.done()
    store.arrived.add("b")
    assert (await waiting).json() == {"message": "weights updated"}
    assert (await client.get("/weight_info")).json() == {"weight_version": "default"}
    store.push("sealed", verified=10)
    assert (await post(client, "/finish_weight_update", {"weight_version": "step 1"}))["message"]
    assert [m for m in store.received if isinstance(m, CommitSession)]
    assert (await client.get("/weight_info")).json() == {"weight_version": "step 1"}
    await post(client, "/finish_weight_update", status=409)
    await post(client, "/update_weights", bucket, status=409)


NCCL = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("info", [NCCL, {"world_size": 2}, {"backend": "nccl"}, NCCL | {"backend": "zmq"}])
async def test_a_rendezvous_that_nobody_would_join_is_refused(client, info, inside):
    asked = {"init_info": info} if inside else info
    body = await post(client, "/init_weight_transfer_engine", asked, status=400)
    said = body["error"]["message"]
    assert "ZMQ" in said
    assert "rollout_client.adapters" in said
    assert "WeightPublisher('tcp://127.0.0.1:5600'" in said
    if info is NCCL:
        assert "master_address, master_port, rank_offset, world_size" in said


@pytest.mark.parametrize("body", [None, {}, {"init_info": {}}, {"init_info": {"backend": "zmq"}}, {"backend": "zmq"}])
async def test_a_trainer_that_asks_for_zmq_learns_where_to_push(client, body):
    assert (await post(client, "/init_weight_transfer_engine", body))["endpoints"] == ["tcp://127.0.0.1:5600"]


@pytest.mark.parametrize("bytes_elsewhere", [{"ipc_handles_pickled": "gAS="}, {"num_updates_list": [1]}, {"new": 1}])
async def test_bytes_that_would_come_another_way_are_refused(client, bytes_elsewhere):
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
    body = await post(client, "/update_weights", {"update_info": info | bytes_elsewhere}, status=400)
    assert next(iter(bytes_elsewhere)) in body["error"]["message"]
    assert "ZMQ" in body["error"]["message"]


async def test_finish_does_not_commit_again_what_the_trainer_committed(client, store, until, service):
    await post(client, "/start_weight_update")
    store.commit(1)
    await until(lambda: service.weights.live.version == 1)
    await post(client, "/finish_weight_update")
    assert not [m for m in store.received if isinstance(m, CommitSession)]
    assert (await client.get("/weight_info")).json() == {"weight_version": "1"}


async def test_a_directory_is_loaded_at_once_or_at_finish(client, store):
    await post(client, "/update_weights", {"weight_dir": "/ckpt/1"})
    await post(client, "/start_weight_update")
    await post(client, "/update_weights", {"weight_dir": "/ckpt/2"})
    assert [m.path for m in store.received if isinstance(m, LoadDisk)] == ["/ckpt/1"]
    await post(client, "/finish_weight_update")
    assert [m.path for m in store.received if isinstance(m, LoadDisk)] == ["/ckpt/1", "/ckpt/2"]
    await post(client, "/update_weights", {}, status=400)
    assert (await post(client, "/shutdown_weight_transfer_engine"))["message"]


async def test_weight_checker(client):
    found = (await post(client, "/weight_checker", {"action": "checksum"}))["checksums"]
    assert set(found) == {"dp0:tp0:model.norm.weight", "dp1:tp0:model.norm.weight"}
    assert await post(client, "/weight_checker", {"action": "compare", "baseline": found}) == {
        "match": True,
        "mismatches": [],
    }
    await post(client, "/weight_checker", {"action": "compare"}, status=400)


async def test_world_size(client):
    assert (await client.get("/get_world_size")).json() == {"world_size": 2}
    assert (await client.get("/get_world_size", params={"include_dp": False})).json() == {"world_size": 1}


async def test_sleep_and_wake(client, replicas):
    assert await post(client, "/sleep", level=1) == {"status": "sleeping", "level": 1}
    assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert replicas[0].got(Clear)
    assert await post(client, "/wake_up", tags=["weights"]) == {"status": "sleeping", "tags": ["weights"]}
    assert await post(client, "/wake_up", tags=["kv_cache"]) == {"status": "awake", "tags": ["kv_cache"]}
    assert [m.tags for m in replicas[0].got(Reload)] == [("weights",), ("kv_cache",)]
    assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert (await client.get("/is_paused")).json() == {"is_paused": False}
    assert await post(client, "/sleep", level=0) == {"status": "sleeping", "level": 0}
    assert await post(client, "/wake_up") == {"status": "awake", "tags": None}
    await post(client, "/sleep", status=400, level=3)


async def test_reset_prefix_cache(client):
    assert await post(client, "/reset_prefix_cache") == {"success": True}


async def test_what_prefixes_of_running_requests_are_is_not_reset(client):
    reply = await client.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
    assert reply.status_code == 400
    assert "reset_running_requests" in reply.text
    assert (await client.post("/reset_prefix_cache", params={"reset_external": "true"})).json() == {"success": True}


async def test_scheduling_alone_is_woken_after_level_0(client, replicas):
    await post(client, "/sleep", level=0)
    assert await post(client, "/wake_up", tags=["scheduling"]) == {"status": "awake", "tags": ["scheduling"]}
    assert not replicas[0].got(Reload)
    assert (await client.get("/is_paused")).json() == {"is_paused": False}
    await post(client, "/sleep", level=1)
    assert (await post(client, "/wake_up", tags=["scheduling"]))["status"] == "sleeping"
    assert (await post(client, "/wake_up", tags=["scheduling", "weights", "kv_cache"]))["status"] == "awake"
    await post(client, "/wake_up", status=400, tags=["other"])


async def test_a_client_ends_its_own_requests_by_their_ids(client, replicas, until):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    task = asyncio.create_task(client.post(URL, json={"token_ids": [65], "request_id": "mine"}))
    await until(lambda: any(r.running for r in replicas))
    path = "/inference/v1/abort_requests"
    await post(client, path, {}, status=400)
    assert await post(client, path, {"request_ids": []}) == {"status": "aborted", "aborted": 0, "unreached": []}
    assert await post(client, path, {"request_ids": ["min"]}) == {"status": "aborted", "aborted": 0, "unreached": []}
    assert (await client.get("/load")).json() == {"server_load": 1}
    assert await post(client, path, {"request_ids": ["mine"]}) == {"status": "aborted", "aborted": 1, "unreached": []}
    assert (await task).json()["choices"][0]["finish_reason"] == "abort"


async def test_the_kv_cache_alone_is_released(client, replicas):
    assert await post(client, "/release_kv_cache_memory") == {"status": "kv_cache_released"}
    assert replicas[0].got(Clear)[0].tags == ("kv_cache",)
    assert (await post(client, "/wake_up", tags=["kv_cache"]))["status"] == "awake"


async def test_collective_rpc_runs_two_methods_and_no_code(client, replicas):
    assert await post(client, "/collective_rpc", {"method": "check_health"}) == {"results": [None, None]}
    results = (await post(client, "/collective_rpc", {"method": "compute_weight_checksums", "args": []}))["results"]
    assert [list(r) for r in results] == [["dp0:tp0:model.norm.weight"], ["dp1:tp0:model.norm.weight"]]
    for method in ("update_weights", "__reduce__", "gASV"):
        said = (await post(client, "/collective_rpc", {"method": method}, status=400))["error"]["message"]
        assert method in said
        assert "WeightPublisher" in said
    await post(client, "/collective_rpc", {}, status=400)
    await post(client, "/collective_rpc", {"method": "check_health", "args": ["x"]}, status=400)


async def test_check_health_names_a_replica_that_is_gone(client, service, replicas, until):
    await replicas[1].die()
    await until(lambda: not service.fleet.replicas[1].link.up)
    body = await post(client, "/collective_rpc", {"method": "check_health"}, status=503)
    assert "replica 1" in body["error"]["message"]


async def test_small_questions(client):
    assert (await client.get("/version")).json() == {"version": "0.1.0"}
    for method in ("GET", "POST"):
        reply = await client.request(method, "/ping")
        assert (reply.status_code, reply.json()["ready"]) == (200, True)

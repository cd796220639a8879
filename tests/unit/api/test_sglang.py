import asyncio
import json

import pytest

from api.schemas.sglang import DiskUpdated, SglangOutput
from tests.unit.api.scripted import span
from weight_manager.messages import LoadDisk, Result
from worker.messages import Clear, Generate, Pause, Reload

SHORT = {"sampling_params": {"max_new_tokens": 3}}


async def post(client, path, body=None, status=200):
    reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


@pytest.mark.parametrize("prompt", [{"text": "A"}, {"input_ids": [65]}])
async def test_one_prompt(client, prompt):
    body = await post(client, "/generate", SHORT | prompt | {"image_data": [], "unknown": 1})
    SglangOutput.model_validate(body)
    assert (body["text"], body["output_ids"]) == ("BCD", [66, 67, 68])
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (1, 3, "default")
    assert meta["weight_versions"] == [span("default", 0, 3)]
    assert 0 < meta["e2e_latency"] < 5
    assert "output_token_logprobs" not in meta


async def test_a_batch_is_a_list(client):
    body = await post(client, "/generate", SHORT | {"text": ["A", "a"], "rid": ["x", "y"]})
    assert [(o["text"], o["meta_info"]["id"]) for o in body] == [("BCD", "x"), ("bcd", "y")]
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    body = await post(client, "/generate", {"input_ids": [[65], [97]], "sampling_params": params})
    assert [o["text"] for o in body] == ["B", "bc"]
    body = await post(client, "/generate", {"text": "A", "sampling_params": {"max_new_tokens": 1, "n": 2}})
    assert len(body) == 2
    assert (await client.post("/generate", json={"text": ["A"], "rid": ["x", "y"]})).status_code == 400


async def test_logprobs(client):
    body = SHORT | {"input_ids": [65, 66, 67], "return_logprob": True, "top_logprobs_num": 1}
    meta = (await post(client, "/generate", body))["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 68, None], [-0.5, 69, None], [-0.5, 70, None]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 68, None], [-2.0, 0, None]]
    assert meta["input_token_logprobs"] == []
    body |= {"logprob_start_len": 1, "return_text_in_logprobs": True}
    meta = (await post(client, "/generate", body))["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 66, "B"], [-1.0, 67, "C"]]


async def test_a_stream_holds_the_sample_so_far(client):
    reply = await client.post("/generate", json=SHORT | {"text": "A", "stream": True})
    *events, last = reply.text.strip().split("\n\n")
    assert last == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert parts[-1]["output_ids"] == [66, 67, 68]
    assert parts[-1]["text"] == "BCD"
    assert [bool(p["meta_info"]["finish_reason"]) for p in parts].count(True) == 1
    lengths = [len(p["output_ids"]) for p in parts]
    assert lengths == sorted(lengths)


async def test_stop_reasons(client, replicas):
    for replica in replicas:
        replica.script, replica.finish = [66, 256], "stop"
    body = await post(client, "/generate", {"text": "A"})
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 256}
    assert (body["text"], body["output_ids"]) == ("B", [66, 256])


async def test_older_trl(client):
    body = await post(
        client, "/generate", {"prompts": ["A", "a"], "n": 2, "max_tokens": 2, "generation_kwargs": {"seed": 1}}
    )
    assert body["prompt_ids"] == [[65], [97]]
    assert body["completion_ids"] == [[66, 67], [66, 67], [98, 99], [98, 99]]
    assert body["logprobs"] == [[-0.5, -0.5]] * 4
    reply = await client.post("/generate", json={"prompts": ["A"], "generation_kwargs": {"seed": "x"}})
    assert reply.status_code == 400


@pytest.mark.parametrize(
    "body", [{}, {"text": "A", "input_ids": [1]}, {"text": None}, {"input_ids": []}, {"text": [1]}]
)
async def test_bad_prompts(client, body):
    assert (await client.post("/generate", json=body)).status_code == 400


@pytest.mark.parametrize(
    ("mode", "ours", "clear"), [("abort", "abort", True), ("retract", "recompute", True), ("in_place", "keep", False)]
)
async def test_pause_modes(client, replicas, mode, ours, clear):
    assert (await post(client, "/pause_generation", {"mode": mode}))["status"] == "ok"
    for replica in replicas:
        (message,) = replica.got(Pause)
        assert (message.mode, message.clear_cache) == (ours, clear)
    assert (await post(client, "/continue_generation"))["status"] == "ok"
    assert (await post(client, "/areal_pause_generation"))["success"] is True
    assert (await post(client, "/areal_continue_generation"))["success"] is True


async def test_update_from_disk_names_the_version(client, store):
    body = await post(client, "/update_weights_from_disk", {"model_path": "/ckpt", "weight_version": "step-5"})
    DiskUpdated.model_validate(body)
    assert (body["success"], body["num_paused_requests"]) == (True, 0)
    (message,) = [m for m in store.received if isinstance(m, LoadDisk)]
    assert (message.path, message.version, message.in_flight) == ("/ckpt", None, "recompute")
    assert (await client.get("/get_weight_version")).json() == {"weight_version": "step-5"}
    body = await post(client, "/areal_update_weights", {"model_path": "/ckpt", "weight_version": "7"})
    assert body["success"] is True
    assert (await client.get("/weight_version")).json() == {"weight_version": "7"}


async def test_a_refused_update_changes_nothing_and_says_why(client, store):
    store.results[LoadDisk] = Result("", False, "shape_mismatch", "w: shape (2,) is not (3,)", ["w"])
    body = await post(client, "/update_weights_from_disk", {"model_path": "/ckpt"}, status=400)
    assert body["success"] is False
    assert "shape (2,)" in body["message"]
    assert (await client.get("/get_weight_version")).json() == {"weight_version": "default"}


async def test_renaming_the_live_version(client):
    assert (await post(client, "/update_weight_version", {"new_version": "v-a"}))["success"] is True
    assert (await client.get("/weight_info")).json() == {"weight_version": "v-a"}
    assert (await post(client, "/generate", SHORT | {"text": "A"}))["meta_info"]["weight_version"] == "v-a"


async def test_flush_cache_waits_for_nobody(client, replicas, until):
    assert (await client.post("/flush_cache")).status_code == 200
    assert (await client.get("/flush_cache")).status_code == 200
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    task = asyncio.create_task(client.post("/generate", json=SHORT | {"text": "A"}))
    await until(lambda: any(r.running for r in replicas))
    reply = await client.post("/flush_cache")
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    assert (await post(client, "/abort_request", {"abort_all": True}))["aborted"] == 1
    assert (await task).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_abort_by_exact_rid(client, replicas, until):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    task = asyncio.create_task(client.post("/generate", json=SHORT | {"text": "A", "rid": "abc"}))
    await until(lambda: any(r.running for r in replicas))
    assert (await post(client, "/abort_request", {"rid": "ab"}))["aborted"] == 0
    assert (await post(client, "/abort_request", {"rid": "abc"}))["aborted"] == 1
    body = (await task).json()
    assert body["meta_info"]["weight_versions"] == [span("default", 0, 0)]
    assert (await client.post("/abort_request", json={})).status_code == 400


async def test_a_batch_is_aborted_by_the_one_id_that_it_has(client, replicas, until):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    batch, other = (
        asyncio.create_task(client.post("/generate", json=SHORT | {"text": ["A", "B"], "rid": rid}))
        for rid in ("batch", "batch_0")
    )
    await until(lambda: sum(len(r.running) for r in replicas) == 4)
    assert (await post(client, "/abort_request", {"rid": "batc"}))["aborted"] == 0
    assert (await post(client, "/abort_request", {"rid": "batch"}))["aborted"] == 2
    ended = [output["meta_info"] for output in (await batch).json()]
    assert [(meta["id"], meta["finish_reason"]["type"]) for meta in ended] == [
        ("batch_0", "abort"),
        ("batch_1", "abort"),
    ]
    assert not other.done()
    assert (await post(client, "/abort_request", {"abort_all": True}))["aborted"] == 2
    await other


async def test_memory(client, replicas):
    for _ in range(2):
        assert (await post(client, "/release_memory_occupation"))["status"] == "ok"
    assert replicas[0].got(Clear)[0].tags == ("weights", "kv_cache")
    await post(client, "/resume_memory_occupation", {"tags": ["weights"]})
    assert replicas[0].got(Reload)[0].tags == ("weights",)
    await post(client, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert replicas[0].got(Reload)[1].tags == ("kv_cache",)
    await post(client, "/release_memory_occupation", {"tags": ["cuda_graph"]})
    assert len(replicas[0].got(Clear)) == 2
    await post(client, "/resume_memory_occupation")
    assert (await client.post("/release_memory_occupation", json={"tags": ["all"]})).status_code == 400


async def test_info_routes(client, service):
    for path in ("/model_info", "/get_model_info"):
        info = (await client.get(path)).json()
        assert info["model_path"] == info["tokenizer_path"] == str(service.model.path)
        assert info["is_generation"] is True
    for path in ("/server_info", "/get_server_info"):
        info = (await client.get(path, params={"config_format": "json"})).json()
        assert (info["tp_size"], info["pp_size"], info["dp_size"], info["disaggregation_mode"]) == (1, 1, 1, "null")
        assert info["eos_token_ids"] == list(service.model.ends) == [256, 7]
        config = info["vllm_config"]
        assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
        assert config["model_config"]["dtype"] == "float32"
        assert config["weight_transfer_config"]["backend"] == "zmq"
        assert config["lora_config"] == {"max_loras": 16, "max_lora_rank": 256}
        assert config["parallel_config"]["data_parallel_size"] == 1
    loads = (await client.get("/v1/loads")).json()["loads"]
    assert loads == (await client.get("/get_load")).json()
    assert loads[0]["token_usage"] == pytest.approx(0.3)


CHECK = "/weights_checker"


async def test_checksums_of_every_rank(client):
    for body in (None, {}, {"action": "checksum"}):
        reply = await post(client, CHECK, body)
        assert reply["success"] is True
        assert reply["checksums"]["dp1:tp0:model.norm.weight"] == "00000000000000ff"
        first, second = reply["ranks"]
        assert first["checksums"] == {"model.norm.weight": "00000000000000ff"}
        assert first["per_gpu_checksum"] == second["per_gpu_checksum"]
        assert len(first["per_gpu_checksum"]) == len(reply["per_engine_checksum"]) == 64
        (place,) = second["parallelism_info"]
        assert (place["dp_rank"], place["dp_size"], place["tp_rank"], place["rank"]) == (1, 2, 0, 1)
    assert (await post(client, CHECK, {"skip_tensor_list": ["norm"]}))["checksums"] == {}


async def test_a_checksum_changes_with_the_weights(client, replicas):
    before = (await post(client, CHECK))["per_engine_checksum"]
    assert (await post(client, CHECK))["per_engine_checksum"] == before
    replicas[1].checksum = "00000000000000fe"
    assert (await post(client, CHECK))["per_engine_checksum"] != before


async def test_a_snapshot_is_compared_with_what_is_served_later(client, replicas):
    refused = await post(client, CHECK, {"action": "compare"}, status=400)
    assert "snapshot first" in refused["error"]["message"]
    assert (await post(client, CHECK, {"action": "snapshot"}))["success"] is True
    for _ in range(2):
        assert (await post(client, CHECK, {"action": "compare"}))["success"] is True
    replicas[1].checksum = "00000000000000fe"
    wrong = await post(client, CHECK, {"action": "compare"}, status=400)
    assert wrong["success"] is False
    assert wrong["mismatches"] == ["dp1:tp0:model.norm.weight"]
    assert "dp1:tp0:model.norm.weight" in wrong["message"]
    assert (await post(client, CHECK, {"action": "compare", "skip_tensor_list": ["norm"]}))["success"] is True
    replicas[0].checksum = "00000000000000fe"
    assert (await post(client, CHECK, {"action": "snapshot"}))["success"] is True, "a newer one replaces it"
    assert (await post(client, CHECK, {"action": "compare"}))["success"] is True


async def test_replicas_that_differ_are_no_snapshot(client, replicas):
    replicas[1].checksum = "00000000000000fe"
    reply = await post(client, CHECK, {"action": "snapshot"}, status=409)
    assert "model.norm.weight" in reply["error"]["message"]
    await post(client, CHECK, {"action": "compare"}, status=400)


async def test_what_is_served_is_never_reset(client, replicas):
    before = [len(r.received) for r in replicas]
    reply = await post(client, CHECK, {"action": "reset_tensors"}, status=400)
    assert reply["success"] is False
    assert "read-only" in reply["message"]
    reply = await post(client, "/weight_checker", {"action": "reset"}, status=400)
    assert "read-only" in reply["error"]["message"]
    assert [len(r.received) for r in replicas] == before
    await post(client, CHECK, {"action": "other"}, status=400)
    await post(client, CHECK, {"action": "snapshot", "selector": "draft"}, status=400)


async def test_compare_with_the_checksums_of_an_earlier_answer(client):
    found = (await post(client, CHECK, {"action": "checksum"}))["checksums"]
    body = await post(client, CHECK, {"action": "compare", "baseline": found | {"x": "1"}})
    assert (body["match"], body["mismatches"]) == (False, ["x"])


async def test_duplicate_rid_joins(client, replicas, until):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(client.post("/generate", json=SHORT | {"text": "A", "rid": "d"})) for _ in range(2)]
    await until(lambda: any(r.running for r in replicas))
    for replica in replicas:
        for _ in range(3):
            replica.gate.release()
    first, second = [reply.json() for reply in await asyncio.gather(*tasks)]
    assert first["output_ids"] == second["output_ids"]
    assert sum(len(r.got(Generate)) for r in replicas) == 1


async def test_flush_cache_waits_as_long_as_it_is_told(client, replicas, until):
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    task = asyncio.create_task(client.post("/generate", json=SHORT | {"text": "A"}))
    await until(lambda: any(r.running for r in replicas))
    assert (await client.post("/flush_cache", params={"timeout": 0.1})).status_code == 400
    flushing = asyncio.create_task(client.post("/flush_cache", params={"timeout": 5}))
    await asyncio.sleep(0.1)
    assert not flushing.done()
    for replica in replicas:
        for _ in range(3):
            replica.gate.release()
    assert (await flushing).status_code == 200
    assert (await task).status_code == 200


@pytest.mark.parametrize("form", ["dummy", "flash_rl", "sharded_state", "gguf", "pt"])
async def test_a_load_format_that_would_read_something_else_is_refused(client, store, form):
    reply = await client.post("/update_weights_from_disk", json={"model_path": "/ckpt", "load_format": form})
    assert reply.status_code == 400
    assert "load_format" in reply.text
    assert not [m for m in store.received if isinstance(m, LoadDisk)]
    body = {"model_path": "/ckpt", "load_format": "auto", "flush_cache": False}
    assert (await client.post("/update_weights_from_disk", json=body)).status_code == 200
    assert [m for m in store.received if isinstance(m, LoadDisk)][-1].in_flight == "keep"

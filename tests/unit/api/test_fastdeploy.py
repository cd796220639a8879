import asyncio

import pytest

from api.routes.fastdeploy import step_of
from weight_manager.messages import LoadDisk
from worker.messages import CallFailed, Clear, Reload


async def test_the_legacy_pair(client, replicas):
    for method in ("GET", "POST"):
        said = []
        for path in ("/clear_load_weight", "/clear_load_weight", "/update_model_weight", "/update_model_weight"):
            reply = await client.request(method, path)
            assert reply.status_code == 200
            said.append(reply.json()["msg"])
        assert said == [
            "clear model weight successfully",
            "model weight is cleared",
            "update model weight successfully",
            "model weight is updated",
        ]


async def test_transitions_that_cross(client, replicas, until, service):
    for replica in replicas:
        replica.mute = True
    clearing = asyncio.create_task(client.get("/clear_load_weight"))
    await until(lambda: service.control.transition == "clear")
    assert (await client.get("/clear_load_weight")).status_code == 400
    assert (await client.get("/update_model_weight")).status_code == 403
    clearing.cancel()
    await asyncio.gather(clearing, return_exceptions=True)


async def test_clearing_while_it_comes_back_is_refused(client, replicas, until, service):
    await client.post("/clear_load_weight")
    for replica in replicas:
        replica.mute = True
    loading = asyncio.create_task(client.get("/update_model_weight"))
    await until(lambda: service.control.transition == "reload")
    assert (await client.get("/update_model_weight")).status_code == 400
    assert (await client.get("/clear_load_weight")).status_code == 403
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)


async def test_a_refusal_of_a_replica(client, replicas):
    replicas[0].fail[Clear] = CallFailed("", "conflict", "cannot clear while starting")
    reply = await client.post("/clear_load_weight")
    assert reply.status_code == 403
    assert "cannot clear while starting" in reply.json()["msg"]


@pytest.mark.parametrize("path", ["/clear_load_weight", "/update_model_weight"])
async def test_get_can_be_switched_off(client, service, path):
    service.config = service.config.model_copy(update={"legacy_get": False})
    assert (await client.get(path)).status_code == 404
    assert (await client.post(path)).status_code == 200


async def test_pause_resume(client):
    body = (await client.post("/v1/pause")).json()
    assert (body["status"], body["result"]) == ("success", None)
    assert body["request_id"]
    assert (await client.get("/v1/is_paused")).json()["result"] == {"is_paused": True}
    assert (await client.post("/v1/resume")).json()["status"] == "success"
    assert (await client.get("/v1/is_paused")).json()["result"] == {"is_paused": False}


async def test_update_weights_wants_a_pause_and_reports_per_rank(client, store, service):
    reply = await client.post("/v1/update_weights")
    assert reply.status_code == 409
    assert reply.json()["status"] == "error"
    assert "pause first" in reply.json()["message"]
    await client.post("/v1/pause")
    (service.model.path / "version.yaml").write_text("step: 12\n")
    body = (await client.post("/v1/update_weights", json={"verify_checksum": True})).json()
    assert [r["rank"] for r in body["result"]] == [0, 1]
    assert body["result"][0]["version"] == "12"
    assert set(body["result"][0]) == {"sync_cost", "update_cost", "total_cost", "version", "rank"}
    (message,) = [m for m in store.received if isinstance(m, LoadDisk)]
    assert (message.version, message.path) == (12, str(service.model.path))
    assert (await client.get("/v1/is_paused")).json()["result"] == {"is_paused": True}
    body = (await client.post("/v1/update_weights", json={"version": 13})).json()
    assert body["result"][0]["version"] == "13"


async def test_sleep_pauses_and_wakeup_resumes(client, replicas):
    assert (await client.post("/v1/sleep", params={"tags": "weight,kv_cache"})).json()["status"] == "success"
    assert (await client.get("/v1/is_paused")).json()["result"] == {"is_paused": True}
    assert replicas[0].got(Clear)[0].tags == ("weights", "kv_cache")
    await client.post("/v1/wakeup", json={"tags": "weight"})
    assert replicas[0].got(Reload)[0].tags == ("weights",)
    assert (await client.get("/v1/is_paused")).json()["result"] == {"is_paused": True}
    await client.post("/v1/wakeup")
    assert (await client.get("/v1/is_paused")).json()["result"] == {"is_paused": False}
    reply = await client.post("/v1/sleep", params={"tags": "gpu"})
    assert (reply.status_code, reply.json()["status"]) == (400, "error")


async def test_abort_requests(client):
    assert (await client.post("/v1/abort_requests", json={"abort_all": True})).json()["result"] == {
        "aborted": 0,
        "unreached": [],
    }
    assert (await client.post("/v1/abort_requests", json={"req_ids": ["x"]})).json()["result"] == {
        "aborted": 0,
        "unreached": [],
    }
    for body in (b"{}", b'{"req_ids": "x"}', b"\xff", b"{"):
        reply = await client.post("/v1/abort_requests", content=body)
        assert reply.status_code == 400
        assert reply.json()["status"] == "error"
        assert reply.json()["message"]


def test_step_of_a_version_file(tmp_path):
    assert step_of(tmp_path) is None
    for text in ("step: 7\n", "name: x\nstep: '7'\n", '  step : "7"  # newest\n'):
        (tmp_path / "version.yaml").write_text(text)
        assert step_of(tmp_path) == "7"
    (tmp_path / "version.yaml").write_text("steps: 7\n")
    assert step_of(tmp_path) is None

"""What the supervisor has given up is said, and can be started again over HTTP."""

import asyncio
import inspect

import pytest
import zmq
import zmq.asyncio

from api.units import Units
from weight_manager.whole_file import replace_file
from worker.supervisor_messages import (
    GIVEN_UP_FILE,
    SPARES,
    Failed,
    GetProcesses,
    GivenUp,
    Ok,
    Process,
    Processes,
    decode_request,
    encode,
    encode_given_up,
)

STOP_S = 7.0
RESTART = "/v1/rollout/replicas/1/restart"


@pytest.fixture
async def supervisor(run_dir):
    """Stands for the supervisor's socket: keeps what it is asked, and answers as the test says."""
    asked, answers = [], []
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{run_dir / 'supervisor.sock'}")

    async def serve():
        while True:
            who, data = await socket.recv_multipart()
            request = decode_request(data)
            if isinstance(request, GetProcesses):
                one = Process("rank", "replica-1", "replica", "running", 1, 0, 1.0, "", STOP_S)
                await socket.send_multipart([who, encode(Processes(request.call, 1, [one]))])
                continue
            asked.append(request)
            answer = answers.pop(0)(request.call)
            await socket.send_multipart([who, encode(await answer if inspect.isawaitable(answer) else answer)])

    serving = asyncio.create_task(serve())
    yield asked, answers
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    socket.close(linger=0)
    context.term()


async def test_what_was_given_up_is_read_once_for_all_replicas(client, service, monkeypatch):
    """Probes come every second, and there may be thousands of replicas."""
    read = []
    monkeypatch.setattr(service.units, "given_up", lambda: read.append(1) or {})
    for path in ("/ready", "/v1/rollout/weights"):
        assert len((await client.get(path)).json()["replicas"]) == 2
    assert len(read) == 2


async def test_a_replica_is_restarted_over_http(client, supervisor):
    asked, answers = supervisor
    why = "replica-1: not ready 5 s after its start"
    answers += [Ok, lambda call: Failed(call, why)]
    assert (await client.post(RESTART)).status_code == 200
    refused = await client.post(RESTART, json={"drain_s": 1, "ready_s": 5})
    assert (refused.status_code, refused.json()["error"]["message"]) == (409, why)
    assert [(r.units, r.drain_s, r.ready_s) for r in asked] == [(["replica-1"], 30.0, 60.0), (["replica-1"], 1.0, 5.0)]


async def test_who_cannot_be_restarted_is_said(client):
    assert (await client.post("/v1/rollout/replicas/7/restart")).status_code == 404
    assert (await client.post(RESTART)).status_code == 503
    assert (await client.post("/v1/rollout/replicas/x/restart")).status_code == 400


async def test_what_was_given_up_is_in_health_and_in_metrics(client, run_dir, replicas, until, service):
    assert "rollout_units_given_up 0.0" in (await client.get("/metrics")).text
    await replicas[1].die()
    await until(lambda: service.fleet.replicas[1].state == "unreachable")
    replace_file(
        run_dir / GIVEN_UP_FILE, encode_given_up({"replica-1": GivenUp("replica-1 ended 8 times in 60 s", 1.0)})
    )
    body = (await client.get("/health")).json()
    assert body["replicas"][1]["reason"] == "given up: replica-1 ended 8 times in 60 s"
    assert body["replicas"][0]["reason"] == ""
    assert (await client.get("/v1/rollout/weights")).json()["replicas"][1]["reason"] == body["replicas"][1]["reason"]
    assert "rollout_units_given_up 1.0" in (await client.get("/metrics")).text


@pytest.mark.parametrize("content", [b"{", b'{"a": {"why": "\xff", "again_at": 1}}', b"[" * 100_000])
def test_a_file_that_says_nothing_that_can_be_read_is_none(tmp_path, content):
    (tmp_path / GIVEN_UP_FILE).write_bytes(content)
    assert Units(tmp_path).given_up() == {}


async def test_a_replica_that_hangs_may_take_the_time_of_its_requests_twice(run_dir, supervisor, monkeypatch):
    """As worker/rolling.py does: it does not answer the drain, and is drained again by SIGTERM before it is killed."""
    _, answers = supervisor
    monkeypatch.setattr("worker.supervisor_messages._MARGIN_S", -30.0)

    async def late(call):
        await asyncio.sleep(1.0)
        return Ok(call)

    answers.append(late)
    await Units(run_dir).restart("replica-1", drain_s=30.0, ready_s=0.5)


async def test_a_unit_that_is_slow_to_stop_is_waited_for(run_dir, supervisor, monkeypatch):
    """An API with a long shutdown_s: its supervisor kills it that late, and says that it is back after that."""
    _, answers = supervisor
    monkeypatch.setattr("worker.supervisor_messages._MARGIN_S", -STOP_S + 3.0)

    async def late(call):
        await asyncio.sleep(1.0)
        return Ok(call)

    answers.append(late)
    await Units(run_dir).restart("replica-1", drain_s=0.0, ready_s=0.0)


async def test_spares_that_were_given_up_have_a_metric_and_are_no_unit(client, run_dir):
    assert "rollout_spares_given_up 0.0" in (await client.get("/metrics")).text
    replace_file(run_dir / GIVEN_UP_FILE, encode_given_up({SPARES: GivenUp("3 ended before they were needed", 1.0)}))
    text = (await client.get("/metrics")).text
    assert "rollout_spares_given_up 1.0" in text
    assert "rollout_units_given_up 0.0" in text

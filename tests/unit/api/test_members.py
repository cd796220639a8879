"""Replicas that come, move and go, as run_dir/replicas.json tells them."""

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from api import versions
from api.members import ReplicasFile
from worker.messages import Generate

URL = "/v1/rollout/generate"
BODY = {"prompt": "A", "max_tokens": 3}


@pytest.fixture
def settings(run_dir) -> dict[str, Any]:
    return {"replicas_file": run_dir / "replicas.json", "unready_hold_s": 5.0}


@pytest.fixture
def tell(config, replicas):
    def write(*indices: int) -> None:
        scratch = config.run_dir / "scratch"
        scratch.write_text(json.dumps({str(i): replicas[i].endpoint for i in indices}))
        os.replace(scratch, config.replicas_file)

    return write


@pytest.fixture
def ready(service, until):
    async def wait(*indices: int) -> None:
        await until(lambda: [r.index for r in service.fleet.replicas if r.serves(service.fleet.live)] == list(indices))

    return wait


async def test_without_a_file_nobody_is_there_and_requests_are_held(client, tell, service):
    assert service.fleet.replicas == []
    assert (await client.get("/ready")).status_code == 503
    task = asyncio.create_task(client.post(URL, json=BODY))
    await asyncio.sleep(0.1)
    assert not task.done()
    tell(0)
    assert (await task).json()["outputs"][0]["text"] == "BCD"


async def test_a_replica_that_comes_is_used_and_one_that_goes_is_not(client, replicas, tell, ready):
    tell(0)
    await ready(0)
    tell(0, 1)
    await ready(0, 1)
    tell(1)
    await ready(1)
    before = len(replicas[0].got(Generate))
    for _ in range(4):
        assert (await client.post(URL, json=BODY)).status_code == 200
    assert len(replicas[0].got(Generate)) == before
    assert [r["replica"] for r in (await client.get("/ready")).json()["replicas"]] == [1]


async def test_what_ran_on_one_that_is_gone_starts_over_elsewhere(client, replicas, tell, ready, until, service):
    tell(0)
    await ready(0)
    replicas[0].gate = asyncio.Semaphore(0)
    task = asyncio.create_task(client.post(URL, json=BODY))
    await until(lambda: replicas[0].running)
    tell(1)
    assert (await task).json()["outputs"][0]["text"] == "BCD"
    assert service.fleet.retried == 1
    assert len(replicas[1].got(Generate)) == 1


async def test_one_that_moves_is_another_connection(config, replicas, tell, ready, service, until):
    tell(0)
    await ready(0)
    old = service.fleet.replicas[0]
    config.replicas_file.write_text(json.dumps({"0": replicas[1].endpoint}))
    await until(lambda: service.fleet.replicas[0] is not old)
    await ready(0)
    assert not old.link.up
    assert replicas[1].received
    assert not replicas[0].got(Generate)


async def test_how_often_a_replica_went_away_is_not_forgotten_when_it_comes_back_elsewhere(
    client, config, replicas, tell, ready, service, until
):
    """As on Ray, where each life of a replica has another endpoint: an alert counts them."""
    tell(0, 1)
    await ready(0, 1)
    series = 'rollout_replica_lost_total{replica="0"}'
    assert f"{series} 0.0" in (await client.get("/metrics")).text
    tell(1)
    await until(lambda: len(service.fleet.replicas) == 1)
    assert f"{series} 1.0" in (await client.get("/metrics")).text, "a series that ends says nothing of an increase"
    tell(0, 1)
    await ready(0, 1)
    assert f"{series} 1.0" in (await client.get("/metrics")).text
    tell(1)
    await until(lambda: len(service.fleet.replicas) == 1)
    assert f"{series} 2.0" in (await client.get("/metrics")).text


async def test_metrics_say_that_no_replica_is_ready_also_where_there_is_none(client, replicas, tell, ready, service):
    """An alert on replicas that are not ready sees nothing where there are none to see."""
    assert "rollout_ready_replicas 0.0" in (await client.get("/metrics")).text
    tell(0, 1)
    await ready(0, 1)
    assert "rollout_ready_replicas 2.0" in (await client.get("/metrics")).text


async def test_a_pause_holds_for_one_that_comes_later(client, replicas, tell, ready, until):
    tell(0)
    await ready(0)
    await client.post("/v1/rollout/pause", json={"mode": "keep"})
    tell(0, 1)
    await until(lambda: replicas[1].state == "paused")


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path):
    path = tmp_path / "replicas.json"
    file = ReplicasFile(path)
    assert file.news() is None
    path.write_text('{"2": "tcp://10.0.0.1:5"}')
    assert file.news() == {2: "tcp://10.0.0.1:5"}
    assert file.news() is None
    path.write_text("{")
    assert file.news() is None
    path.write_text("[]")
    assert file.news() is None
    path.unlink()
    assert file.news() == {}
    assert file.news() is None


@pytest.fixture
def too_many_files(monkeypatch):
    """Has so many reads fail, as they do where a process has as many files open as it may."""
    left = []

    def read_bytes(path, read=Path.read_bytes):
        if left:
            left.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    return lambda times: left.extend(range(times))


def test_what_could_not_be_read_for_a_moment_is_read_after_it(tmp_path, too_many_files, caplog):
    path = tmp_path / "replicas.json"
    file = ReplicasFile(path)
    path.write_text('{"2": "tcp://10.0.0.1:5"}')
    too_many_files(3)
    assert [file.news() for _ in range(3)] == [None] * 3
    assert file.news() == {2: "tcp://10.0.0.1:5"}
    assert len(caplog.records) == 1, "it is looked at ten times a second"


async def test_names_that_could_not_be_read_for_a_moment_are_not_forgotten(
    client, service, tell, too_many_files, until, monkeypatch
):
    monkeypatch.setattr(versions, "AGAIN_S", 0.01)
    tell(0)
    await client.post("/update_weight_version", json={"new_version": "first"})
    assert service.versions.live == "first"
    path = service.config.run_dir / versions.FILE
    path.write_bytes(path.read_bytes().replace(b"first", b"second"))
    too_many_files(2)
    service.versions.read_again()
    assert service.versions.live == "first"
    await until(lambda: service.versions.live == "second")

"""Names that trainers give to versions: kept for the weights they were given to, over restarts of the API too."""

import json
import os
from pathlib import Path

import pytest

from api.service import Service
from api.versions import FILE, VersionNames
from tests.unit.api.scripted import digest_of
from weight_manager import whole_file
from weight_manager.whole_file import scratch_of
from worker.messages import Span


async def name_it(client, name):
    reply = await client.post("/update_weight_version", json={"new_version": name})
    assert reply.json() == {"success": True, "message": "weight version updated", "new_version": name}


async def live_is(service, until, version, run_id="run"):
    await until(lambda: (service.weights.live.run_id, service.weights.live.version) == (run_id, version))


async def restarted(config, model, until):
    """Another API process over the same service."""
    made = Service(config, model)
    context = made.running()
    await context.__aenter__()
    await until(lambda: made.weights.live)
    return made, context


async def test_a_name_outlives_the_api(client, service, store, until, config, model):
    store.commit(3)
    await live_is(service, until, 3)
    await name_it(client, "step-3")
    store.commit(4)
    await live_is(service, until, 4)
    await name_it(client, "step-4")
    again, context = await restarted(config, model, until)
    try:
        assert again.versions.live == "step-4"
        spans = [Span(v, v - 2, v - 1, digest=digest_of(v)) for v in (2, 3, 4)]
        assert [s["version"] for s in again.versions.spans(spans)] == ["2", "step-3", "step-4"]
    finally:
        await context.__aexit__(None, None, None)


async def test_a_name_outlives_the_machine_s_power(client, service, store, until, config, monkeypatch):
    """As the version does that bears it: the bytes are on the disk before they have the file's name, and so is that."""
    store.commit(3)
    await live_is(service, until, 3)
    path, done = config.run_dir / FILE, []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(whole_file.os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    monkeypatch.setattr(Path, "replace", lambda one, other: (done.append("replaced"), replace(one, other)))
    await name_it(client, "step-3")
    assert done == [str(scratch_of(path)), "replaced", str(path.parent)]


async def test_a_name_given_by_finish_or_with_a_directory_does_too(client, service, store, until, config, model):
    await client.post("/start_weight_update", json={})
    store.push("sealed", verified=10)
    await client.post("/finish_weight_update", json={"weight_version": "a"})
    await live_is(service, until, 1)
    await client.post("/update_weights_from_disk", json={"model_path": "/x", "weight_version": "b"})
    await live_is(service, until, 2)
    again, context = await restarted(config, model, until)
    try:
        assert (again.versions.name(1, digest_of(1)), again.versions.name(2, digest_of(2))) == ("a", "b")
    finally:
        await context.__aexit__(None, None, None)


async def test_another_run_s_version_of_that_number_is_not_called_so(client, service, store, until):
    store.commit(3)
    await live_is(service, until, 3)
    await name_it(client, "step-3")
    store.commit(3, run_id="other", digest="f" * 16)
    await live_is(service, until, 3, "other")
    assert (await client.get("/get_weight_version")).json() == {"weight_version": "3"}


async def test_a_version_that_is_live_again_has_its_name_again(client, service, store, until):
    store.commit(3)
    await live_is(service, until, 3)
    await name_it(client, "step-3")
    store.commit(4)
    await live_is(service, until, 4)
    store.commit(3)  # rolled back
    await live_is(service, until, 3)
    assert service.versions.live == "step-3"


async def test_two_contents_of_a_number_have_names_of_their_own(client, service, store, until, config, model):
    """7 is named, gone back from, and pushed again with other weights: tokens of either keep the name they had."""
    for digest, name in (("a" * 16, "first"), ("b" * 16, "second")):
        store.commit(7, digest=digest)
        await until(lambda digest=digest: service.weights.live.digest == digest)
        assert service.versions.live == "7"
        await name_it(client, name)
        store.commit(6)
        await live_is(service, until, 6)
    spans = [Span(7, 0, 1, digest="a" * 16), Span(7, 1, 2, digest="b" * 16), Span(7, 2, 3, digest="c" * 16)]
    told = [(span["version"], span["digest"][0]) for span in service.versions.spans(spans)]
    assert told == [("first", "a"), ("second", "b"), ("7", "c")]
    again, context = await restarted(config, model, until)
    try:
        assert again.versions.spans(spans) == service.versions.spans(spans)
    finally:
        await context.__aexit__(None, None, None)


async def test_a_trainer_s_version_0_is_no_default_also_when_it_is_live_no_more(service, store, until):
    store.commit(0, digest="f" * 16)
    await live_is(service, until, 0)
    store.history = [{"run_id": "run", "version": 0, "epoch": 2, "digest": "f" * 16}]
    store.commit(1)
    await live_is(service, until, 1)
    assert [service.versions.name(0, digest) for digest in ("f" * 16, digest_of(0))] == ["0", "default"]


async def test_a_number_for_a_name_takes_the_name_away(client, service, store, until, config):
    store.commit(3)
    await live_is(service, until, 3)
    await name_it(client, "step-3")
    await name_it(client, "3")
    assert service.versions.live == "3"
    assert json.loads((config.run_dir / FILE).read_bytes()) == []


@pytest.mark.parametrize("content", [b"", b"{", b'[{"name": 5}]', b"\xff"])
async def test_a_broken_file_is_no_reason_not_to_start(config, model, store, until, content):
    (config.run_dir / FILE).write_bytes(content)
    again, context = await restarted(config, model, until)
    try:
        assert again.versions.live == "default"
    finally:
        await context.__aexit__(None, None, None)


async def test_a_full_disk_costs_the_memory_of_names_and_nothing_else(client, service, store, until, monkeypatch):
    store.commit(3)
    await live_is(service, until, 3)
    monkeypatch.setattr(service.versions, "_path", service.config.run_dir / "no such directory" / FILE)
    await name_it(client, "step-3")
    assert service.versions.live == "step-3"


async def test_a_file_that_cannot_be_read_for_long_is_told_of_once(service, monkeypatch, caplog, until):
    """It is tried again every second, over a night too."""
    monkeypatch.setattr("api.versions.AGAIN_S", 0.01)
    tries = []

    def refuse(path):
        tries.append(path)
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        service.versions.read_again()
        await until(lambda: len(tries) > 5)
    assert len([record for record in caplog.records if "cannot be read" in record.message]) == 1
    await until(lambda: service.versions._again is None)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        service.versions.read_again()
    assert len([record for record in caplog.records if "cannot be read" in record.message]) == 2


async def test_a_name_is_that_of_the_version_that_was_loaded(service, store, until, monkeypatch):
    """A trainer's push goes live right behind a load from disk: its version is not the one that was named."""

    async def loaded_and_pushed(path, **words):
        store.commit(3)
        store.previous = store.live
        store.commit(4)
        await live_is(service, until, 4)
        return {"version": 3}

    monkeypatch.setattr(service.weights, "load", loaded_and_pushed)
    await service.versions.load("/a/checkpoint", name="from disk")
    assert (service.versions.live, service.versions.name(3, digest_of(3))) == ("4", "from disk")


class TestElsewhere:
    @pytest.fixture
    def settings(self, tmp_path):
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / f"{scratch_of(Path(FILE))}-earlier").write_text("of one who was killed while it wrote")
        return {"state_dir": tmp_path / "state"}

    async def test_names_are_kept_where_the_history_is(self, client, service, store, until, config):
        store.commit(3)
        await live_is(service, until, 3)
        await name_it(client, "step-3")
        assert json.loads((config.state_dir / FILE).read_bytes())[0]["name"] == "step-3"
        assert [path.name for path in config.state_dir.iterdir()] == [FILE]


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b'[{"run_id": "\xff\xfe"}]'])
def test_a_damaged_file_costs_names_and_no_start(service, config, content, caplog):
    (config.run_dir / FILE).write_bytes(content)
    assert VersionNames(service.weights, config.run_dir).live == "default"
    assert "versions are called by their numbers" in caplog.text

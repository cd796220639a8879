"""LoRA adapters over HTTP: what is loaded, and the verbs that change it."""

import pytest

from api.cli import adapters_command
from rollout_client import http_calls as calls
from weight_manager.messages import AbortSession, LoadAdapter, Result, RollbackAdapter, UnloadAdapter


@pytest.fixture
async def loaded(store, service, until):
    """policy-a version 3, of which replica 0 serves epoch 9."""
    store.load_adapter("policy-a", 3, 9)
    await until(lambda: service.weights.adapters == {"policy-a": 3})
    return store


async def test_what_is_loaded_and_who_serves_it(client, loaded):
    reply = await client.get("/v1/rollout/adapters")
    (adapter,) = reply.json()["adapters"]
    assert (adapter["name"], adapter["version"], adapter["rank"]) == ("policy-a", 3, 8)
    assert adapter["replicas"] == {"0": 9}
    assert calls.adapters().decode(reply)[0].replicas == {"0": 9}


async def test_a_name_that_is_pushed_for_the_first_time_cannot_be_served_yet(service, store, until):
    store.load_adapter("policy-a", 3, 9)
    store.adapters.append(store.adapters[0] | {"name": "policy-b", "version": None, "epoch": None})
    store.publish()
    await until(lambda: service.weights.status and len(service.weights.status.adapters) == 2)
    assert service.weights.adapters == {"policy-a": 3}


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        (
            calls.load_adapter("policy-a", "/models/a", version=7, in_flight="finish", deadline_s=5, force=True),
            LoadAdapter("", "policy-a", "/models/a", 7, None, "finish", 5, force=True),
        ),
        (calls.unload_adapter("policy-a", deadline_s=5), UnloadAdapter("", "policy-a", 5)),
        (
            calls.rollback_adapter("policy-a", in_flight="abort", deadline_s=5),
            RollbackAdapter("", "policy-a", "abort", 5),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_verbs_reach_the_store_as_they_were_asked(client, store, call, asked):
    reply = await client.request(call.method, call.path, json=call.body)
    assert reply.status_code == 200, reply.text
    call.decode(reply)
    (heard,) = (message for message in store.received if isinstance(message, type(asked)))
    fields = {name: getattr(heard, name) for name in heard.__struct_fields__} | {"call": ""}
    assert type(heard)(**fields) == asked


async def test_the_push_of_one_adapter_is_ended(client, store):
    reply = await client.post("/v1/rollout/adapters/abort", json={"name": "policy-a", "reason": "stuck"})
    assert reply.status_code == 200
    (heard,) = (message for message in store.received if isinstance(message, AbortSession))
    assert (heard.adapter, heard.reason) == ("policy-a", "stuck")


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        (UnloadAdapter, "unload", {"name": "policy-x"}),
        (RollbackAdapter, "rollback", {"name": "policy-x"}),
    ],
)
async def test_a_name_that_is_not_loaded_is_404(client, store, kind, path, body):
    store.results[kind] = Result("", False, "unknown_adapter", "no adapter 'policy-x' is loaded")
    reply = await client.post(f"/v1/rollout/adapters/{path}", json=body)
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unknown_adapter"


async def test_nothing_to_go_back_to_is_a_conflict_and_no_reason_to_try_again(client, store):
    store.results[RollbackAdapter] = Result("", False, "not_ready", "no previous version is kept")
    reply = await client.post("/v1/rollout/adapters/rollback", json={"name": "policy-a"})
    assert reply.status_code == 409


@pytest.mark.parametrize("name", ["../x", "", "a b", "x" * 129])
async def test_what_can_be_no_name_is_refused_before_the_store_hears_of_it(client, store, name):
    reply = await client.post("/v1/rollout/adapters/load", json={"name": name, "path": "/models/a"})
    assert reply.status_code == 400
    assert not [message for message in store.received if isinstance(message, LoadAdapter)]


async def test_metrics_name_each_adapter(client, loaded):
    text = (await client.get("/metrics")).text
    assert "rollout_adapters_loaded 1.0" in text
    assert 'rollout_adapter_version{adapter="policy-a"} 3.0' in text
    assert 'rollout_adapter_shared_memory_bytes{adapter="policy-a"} 12288.0' in text


async def test_the_status_page_is_sent_them(service, loaded):
    from api.snapshot import take

    assert [(a.name, a.version, a.replicas) for a in take(service).adapters] == [("policy-a", 3, {"0": 9})]


def test_the_table_of_the_command_line_counts_who_serves(capsys):
    one = calls.Adapter("policy-a", "run", 3, 9, "a", 8, 14, "float32", 4 << 20, replicas={"0": 9, "1": 8})
    adapters_command.console.print(adapters_command._table([one]))
    out = capsys.readouterr().out
    assert "policy-a" in out
    assert "1/2" in out

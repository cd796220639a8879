"""/start_weight_update, /update_weights and /finish_weight_update around a push that runs when it likes."""

import asyncio

import pytest

from api import http_push
from weight_manager.messages import CommitSession

BUCKET = {"update_info": {"names": ["a", "b"]}}
ALL = 10  # bytes of a scripted session


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(http_push, "BEGIN_S", 0.5)
    monkeypatch.setattr(http_push, "AGAIN_S", 0.2)
    monkeypatch.setattr(http_push, "COMMIT_S", 0.2)


@pytest.fixture
async def started(client, service):
    assert (await client.post("/start_weight_update")).status_code == 200
    return client


def asked(client, path="/update_weights", body=BUCKET):
    return asyncio.create_task(client.post(path, json=body))


async def still_waits(task):
    await asyncio.sleep(0.1)
    assert not task.done(), task.result().text


async def committed_by_its_trainer(store, version=1):
    """A push as the shipped publisher makes it: staged, sealed, committed, without a pause."""
    for state, verified in (("staging", 0), ("checking", ALL), ("sealed", ALL), ("preparing", ALL)):
        store.push(state, verified=verified)
        await asyncio.sleep(0.03)
    store.arrived = {"a", "b"}
    store.push("flipping", verified=ALL)
    await asyncio.sleep(0.03)
    store.session = None
    store.commit(version)


@pytest.mark.parametrize("begins_after_s", [0.0, 0.05, 0.2])
async def test_an_update_that_comes_first_waits_for_the_push(started, store, begins_after_s):
    waiting = asked(started)
    await asyncio.sleep(begins_after_s)
    assert not waiting.done()
    await committed_by_its_trainer(store)
    reply = await waiting
    assert (reply.status_code, reply.json()) == (200, {"message": "weights updated"})
    assert (await started.get("/weight_info")).json() == {"weight_version": "1"}
    assert (await started.post("/finish_weight_update")).status_code == 200
    assert not [m for m in store.received if isinstance(m, CommitSession)]


@pytest.mark.parametrize(
    ("state", "verified"),
    [("staging", 0), ("checking", ALL), ("sealed", ALL), ("preparing", ALL), ("flipping", ALL)],
)
async def test_an_update_beside_the_push_waits_until_it_is_live(started, store, state, verified):
    store.push(state, verified=verified)
    waiting = asked(started)
    await still_waits(waiting)
    await committed_by_its_trainer(store)
    assert (await waiting).status_code == 200
    assert (await started.get("/weight_info")).json() == {"weight_version": "1"}


async def test_an_update_whose_last_bytes_arrive_between_two_looks_waits_until_it_is_live(started, store, monkeypatch):
    look = store.status

    def then_the_rest_arrives(call):
        seen = look(call)
        if call and store.session is not None:
            store.session, store.arrived = {"state": "staging", "bytes": ALL, "verified_bytes": ALL}, {"a", "b"}
        return seen

    monkeypatch.setattr(store, "status", then_the_rest_arrives)
    store.push("staging", verified=3)
    waiting = asked(started)
    await still_waits(waiting)
    store.session = None
    store.commit(1)
    assert (await waiting).status_code == 200
    assert (await started.get("/weight_info")).json() == {"weight_version": "1"}


async def test_an_update_after_the_push_is_answered_at_once(started, store):
    await committed_by_its_trainer(store)
    for path, body in (("/update_weights", BUCKET), ("/update_weights", BUCKET), ("/finish_weight_update", {})):
        before = asyncio.get_running_loop().time()
        assert (await started.post(path, json=body)).status_code == 200
        assert asyncio.get_running_loop().time() - before < 0.15


async def test_finish_waits_for_a_push_that_nobody_asked_to_update(started, store):
    finishing = asked(started, "/finish_weight_update", {"weight_version": "step 1"})
    await still_waits(finishing)
    store.push("staging")
    await still_waits(finishing)
    await committed_by_its_trainer(store)
    assert (await finishing).status_code == 200
    assert (await started.get("/weight_info")).json() == {"weight_version": "step 1"}


async def test_finish_commits_what_its_trainer_leaves_to_it(started, store):
    store.push("staging", verified=ALL)
    store.arrived = {"a", "b"}
    assert (await started.post("/update_weights", json=BUCKET)).status_code == 200, "its trainer waits for this answer"
    finishing = asked(started, "/finish_weight_update", {"weight_version": "mine"})
    await still_waits(finishing)
    store.push("sealed", verified=ALL)
    assert (await finishing).status_code == 200
    assert (await started.get("/weight_info")).json() == {"weight_version": "mine"}
    assert len([m for m in store.received if isinstance(m, CommitSession)]) == 1


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
async def test_without_a_push_it_says_so_in_time(started, path):
    reply = await started.post(path, json=BUCKET if path == "/update_weights" else {})
    assert reply.status_code == 409
    assert "no push has begun for 0.5 s" in reply.text
    assert "WeightPublisher" in reply.text


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("begun", [True, False])
async def test_a_failed_push_is_reported_with_its_reason(started, store, path, begun):
    if begun:
        store.push("staging", verified=1)
    waiting = asked(started, path, BUCKET if path == "/update_weights" else {})
    await still_waits(waiting)
    store.fail_push("w: shape (2,) is not (3,)")
    reply = await waiting
    assert reply.status_code == 409
    assert "shape (2,) is not (3,)" in reply.text
    assert (await started.get("/weight_info")).json() == {"weight_version": "default"}


async def test_an_older_failure_is_not_this_push_s(client, service, store, until):
    store.fail_push("yesterday")
    await until(lambda: service.weights.status.last_error is not None)
    await client.post("/start_weight_update")
    waiting = asked(client)
    await asyncio.sleep(0.35)
    assert not waiting.done()
    await committed_by_its_trainer(store)
    assert (await waiting).status_code == 200


async def test_a_push_that_is_tried_again_is_waited_for(started, store):
    waiting = asked(started)
    store.push("staging")
    await asyncio.sleep(0.05)
    store.fail_push("base is not live")
    await asyncio.sleep(0.05)
    await committed_by_its_trainer(store)
    assert (await waiting).status_code == 200


async def test_a_push_that_stops_half_way_names_what_is_missing(client, service, store):
    push = service.http_push
    push.start()
    store.push("staging", verified=3)
    store.arrived = {"a"}
    with pytest.raises(http_push.TimedOut, match="1 of 2 tensors have not arrived: b") as late:
        await push.update(["a", "b"], timeout_s=0.2)
    assert late.value.tensors == ["b"]


async def test_a_shut_down_ends_the_wait(started, store):
    waiting = asked(started)
    await still_waits(waiting)
    assert (await started.post("/shutdown_weight_transfer_engine")).status_code == 200
    reply = await waiting
    assert reply.status_code == 409
    assert "shut down" in reply.text


async def test_the_next_update_does_not_hold_up_the_last(started, store):
    waiting = asked(started)
    await still_waits(waiting)
    await committed_by_its_trainer(store)
    await asyncio.gather(started.post("/finish_weight_update"), waiting)
    assert waiting.result().status_code == 200
    assert (await started.post("/start_weight_update")).status_code == 200
    again = asked(started)
    await still_waits(again)
    await committed_by_its_trainer(store, 2)
    assert (await again).status_code == 200

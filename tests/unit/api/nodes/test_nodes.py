"""An API on every node: tokens do not pass the head, and what the head decides holds everywhere."""

import asyncio
import json
import time

import httpx

from api.nodes import to_head
from worker.messages import Generate, Pause

GENERATE = "/v1/rollout/generate"
PROMPT = {"prompt_ids": [65], "max_tokens": 2}


async def generate(api, **fields):
    return await api.client.post(GENERATE, json=PROMPT | fields)


async def test_a_node_answers_by_itself_with_its_own_replica_and_the_head_hears_nothing(apis, replicas):
    head, *nodes = apis
    for number, node in enumerate(nodes):
        for _ in range(3):
            reply = await generate(node)
            assert reply.status_code == 200
        assert len(replicas[number].got(Generate)) == 3
    assert not head.service.generations.open
    assert head.service.metrics.answered  # it counts what it answers
    text = (await head.client.get("/metrics")).text
    assert not [line for line in text.splitlines() if GENERATE in line and not line.endswith(" 0.0")]


async def test_a_node_whose_replica_is_away_gives_its_requests_to_others(apis, replicas, until):
    _, node, _ = apis
    replicas[0].move("stopped")
    await until(lambda: node.service.fleet.replicas[0].state == "stopped")
    assert (await generate(node)).status_code == 200
    assert len(replicas[1].got(Generate)) == 1


async def test_a_session_has_one_replica_in_every_api(apis, replicas):
    for session in "abcdef":
        before = [len(r.got(Generate)) for r in replicas]
        for api in apis:
            assert (await generate(api, session=session)).status_code == 200
        assert sorted(len(r.got(Generate)) - b for r, b in zip(replicas, before, strict=True)) == [0, 3]
    assert all(r.got(Generate) for r in replicas), "no session's replica is another's"


async def test_a_pause_asked_of_a_node_is_the_heads_and_holds_requests_everywhere(apis, replicas, until):
    _, node, other = apis
    paused = await node.client.post("/v1/rollout/pause", json={"mode": "keep"})
    assert paused.json()["paused"]
    assert [len(r.got(Pause)) for r in replicas] == [1, 1], "once, by the head"
    await until(lambda: all(api.service.fleet.intents.paused for api in apis))
    waiting = [asyncio.create_task(generate(api)) for api in apis]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in waiting)
    for api in (node, other):  # they do not take the pause for replicas that are not ready, whose requests wait less
        assert (await api.client.get("/v1/rollout/pause")).json()["paused"]
        flight = next(iter(api.service.fleet.flights))
        assert not api.service.fleet._overdue(flight, flight.unready_since + 3000)
    assert (await other.client.post("/v1/rollout/resume")).status_code == 200
    assert [(await task).status_code for task in waiting] == [200, 200, 200]
    await until(lambda: not any(api.service.fleet.intents.paused for api in apis))


async def test_requests_are_ended_wherever_they_are_by_id_or_all(apis, replicas, until):
    head, node, _ = apis
    for replica in replicas:
        replica.gate = asyncio.Semaphore(1)
    tasks = [asyncio.create_task(generate(api, request_id=f"r{i}")) for i, api in enumerate(apis)]
    await until(lambda: sum(len(r.running) for r in replicas) == 3)
    ended = await node.client.post("/v1/rollout/abort", json={"request_ids": ["r2", "nobody's"]})
    assert ended.json()["aborted"] == 1
    assert (await tasks[2]).json()["outputs"][0]["finish_reason"] == "abort"
    assert (await head.client.post("/v1/rollout/abort")).json()["aborted"] == 2
    for task in tasks[:2]:
        assert (await task).json()["outputs"][0]["finish_reason"] == "abort"


async def test_an_abort_ends_what_it_reaches_and_says_what_it_did_not(apis, replicas, until):
    """A node that is cut off keeps nobody from ending the rest, by whatever route; said again it changes nothing."""
    head, node, cut_off = apis
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(generate(api, request_id=f"r{i}")) for i, api in enumerate((head, node))]
    await until(lambda: sum(len(r.running) for r in replicas) == 2)
    await cut_off.die()
    ended = await head.client.post("/v1/rollout/abort")
    assert (ended.status_code, ended.json()) == (200, {"aborted": 2, "unreached": ["n1"]})
    for task in tasks:
        assert (await task).json()["outputs"][0]["finish_reason"] == "abort"
    assert (await head.client.post("/v1/rollout/abort")).json() == {"aborted": 0, "unreached": ["n1"]}
    vllm = await node.client.post("/abort_requests", json={"request_ids": ["r0"]})
    assert (vllm.json()["aborted"], vllm.json()["unreached"]) == (0, ["n1"])
    fastdeploy = await node.client.post("/v1/abort_requests", json={"abort_all": True})
    assert fastdeploy.json()["result"] == {"aborted": 0, "unreached": ["n1"]}
    sglang = await head.client.post("/abort_request", json={"abort_all": True})
    assert sglang.json()["message"] == "0 requests ended; not reached: n1"


async def test_an_abort_that_a_node_fails_to_answer_counts_as_not_there(apis, monkeypatch):
    head, node, _ = apis

    async def breaks(request_ids, timeout_s):
        raise RuntimeError

    monkeypatch.setattr(node.service.generations, "abort_here", breaks)
    assert (await head.client.post("/v1/rollout/abort")).json() == {"aborted": 0, "unreached": ["n0"]}


async def test_a_list_of_apis_that_is_none_names_none(apis):
    """An abort ends what this one has all the same."""
    head, *_ = apis
    for content in (b"[]", b"null", b'{"n0": 5}', b"{", b"[" * 100_000):
        (head.service.config.run_dir / "apis.json").write_bytes(content)
        assert (await head.client.post("/v1/rollout/abort")).json() == {"aborted": 0, "unreached": []}


async def test_connections_of_one_api_speak_for_that_one_alone(apis):
    """A replica ends "whatever I asked for" by the name of who asks; one without a name would speak for all."""
    names = [{replica.link._name for replica in api.service.fleet.replicas} for api in apis]
    assert names == [{"head"}, {"n0"}, {"n1"}]


async def test_tokens_are_checked_by_the_head_too(apis):
    _, node, _ = apis
    reply = await node.client.post("/v1/rollout/pause", headers={"authorization": "Bearer another"})
    assert reply.status_code in (401, 403)
    assert (await node.client.post(GENERATE, json=PROMPT, headers={"authorization": ""})).status_code in (401, 403)


async def test_every_api_names_versions_as_the_head_does(apis, until):
    head, node, _ = apis
    await head.service.versions.give("step-7")
    said = (head.service.config.run_dir / "version_names.json").read_bytes()
    (node.service.config.run_dir / "version_names.json").write_bytes(said)  # as the fleet's process does
    await until(lambda: node.service.versions.live == "step-7")


async def test_all_apis_are_named_to_whoever_asks_any_of_them(apis):
    head, node, _ = apis
    listed = (await node.client.get("/v1/rollout/apis")).json()["apis"]
    assert [one["place"] for one in listed] == ["head", "n0", "n1"]
    assert listed[0]["url"] == (head.service.config.run_dir / "http_url").read_text()
    assert {one["url"] for one in listed[1:]} == set(
        json.loads((head.service.config.run_dir / "apis.json").read_text()).values()
    )


async def test_without_the_head_data_routes_are_answered_and_others_say_that_it_is_away(apis, monkeypatch):
    from api.processes import passing

    monkeypatch.setattr(passing, "COME_BACK_S", 0.3)
    head, node, _ = apis
    head.server.servers[0].close()
    reply = await node.client.post("/v1/rollout/pause")
    assert (reply.status_code, "not there" in reply.json()["error"]["message"]) == (503, True)
    assert (await generate(node)).status_code == 200


async def test_a_head_that_does_not_answer_is_given_up(apis, replicas, monkeypatch):
    _, node, _ = apis
    replicas[0].waits[Pause] = asyncio.Event()

    async def silent(*_, **__):
        await asyncio.sleep(0.5)
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(node.service.head._client, "get", silent)
    monkeypatch.setattr(node.service.head, "_silence_s", 4.0)
    reply = await node.client.post("/v1/rollout/pause")
    assert (reply.status_code, "does not move" in reply.json()["error"]["message"]) == (504, True)
    replicas[0].waits[Pause].set()


async def test_a_node_that_stood_still_has_not_found_its_head_silent(apis, replicas, until, monkeypatch):
    """Between its question and what the head has long answered: its own clock says that nobody did in time."""
    _, node, _ = apis
    replicas[0].waits[Pause] = asyncio.Event()
    ask, failed = node.service.head._client.get, []

    async def stands_still(*words, **options):
        if failed:
            return await ask(*words, **options)
        time.sleep(6)  # noqa: ASYNC251  that is what is tested
        failed.append(httpx.ReadTimeout(""))
        raise failed[0]

    monkeypatch.setattr(node.service.head._client, "get", stands_still)
    monkeypatch.setattr(node.service.head, "_silence_s", 5.0)
    monkeypatch.setattr(to_head, "LOOK_S", 1.0)
    asked = asyncio.create_task(node.client.post("/v1/rollout/pause", timeout=60))
    await until(lambda: failed or asked.done())
    await asyncio.sleep(3)
    replicas[0].waits[Pause].set()
    assert (await asked).status_code == 200
    assert failed

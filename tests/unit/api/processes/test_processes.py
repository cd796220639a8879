"""Two API processes over the same replicas agree, whichever is asked."""

import asyncio
import json
import time

import pytest

from worker.messages import Abort, Clear, Generate, Pause

PROMPT = {"prompt_ids": [65], "max_tokens": 2}
GENERATE = "/v1/rollout/generate"


async def generate(process, **fields):
    return await process.client.post(GENERATE, json=PROMPT | fields)


def hold(replicas):
    """No request ends before the gates of its replica are opened."""
    for replica in replicas:
        replica.gate = asyncio.Semaphore(0)


async def test_a_pause_asked_of_one_holds_requests_in_both(processes, replicas, until):
    lead, other = processes
    paused = await other.client.post("/v1/rollout/pause", json={"mode": "keep"})
    assert paused.json()["paused"]
    assert [len(r.got(Pause)) for r in replicas] == [1, 1], "once, by the lead"
    waiting = [asyncio.create_task(generate(process)) for process in processes]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in waiting)
    for process in processes:
        state = (await process.client.get("/v1/rollout/pause")).json()
        assert (state["paused"], state["held"]) == (True, 2)
        assert (await process.client.get("/ready")).json()["paused"]
        assert (await process.client.get("/is_paused")).json()["is_paused"]
    assert (await lead.client.post("/v1/rollout/resume")).status_code == 200
    assert [(await task).status_code for task in waiting] == [200, 200]


async def test_a_pause_holds_although_a_replica_serves(processes, replicas, until):
    """One that restarts in a pause serves for a moment, until it hears of it."""
    _, other = processes
    await other.client.post("/pause")
    for replica in replicas:
        replica.move("serving")
    task = asyncio.create_task(generate(other))
    await asyncio.sleep(0.3)
    assert not task.done()
    assert not any(r.got(Generate) for r in replicas)
    await other.client.post("/resume")
    assert (await task).status_code == 200


async def test_both_say_alike_how_long_pauses_have_lasted(processes, replicas, until):
    """Whichever is scraped: for Prometheus a counter that falls has begun anew, and all of it is added once more."""
    lead, other = (process.service.fleet.intents for process in processes)
    client = processes[0].client
    await client.post("/v1/rollout/pause", json={"mode": "keep"})
    await asyncio.sleep(0.2)
    await client.post("/v1/rollout/pause", json={"mode": "abort"})  # in its place
    await until(lambda: other.look() or other.paused is not None)
    assert other.paused_seconds >= 0.2
    await client.post("/v1/rollout/resume")
    other.look()
    assert other.paused_seconds == lead.paused_seconds >= 0.2
    before = lead.paused_seconds
    await client.post("/v1/rollout/pause", json={"mode": "keep", "lease_s": 0.2})
    await until(lambda: lead.paused is None and other.paused is None)
    other.look()
    assert other.paused_seconds == lead.paused_seconds >= before + 0.15


async def test_what_is_cleared_is_cleared_for_both_and_comes_back(processes, replicas, until):
    lead, other = processes
    await other.client.post("/sleep?level=1")
    assert [len(r.got(Clear)) for r in replicas] == [1, 1]
    for process in processes:
        assert (await process.client.get("/is_sleeping")).json()["is_sleeping"]
    task = asyncio.create_task(generate(lead))
    await asyncio.sleep(0.1)
    await other.client.post("/wake_up")
    assert (await task).status_code == 200
    await until(lambda: not other.service.fleet.intents.cleared)


async def test_an_abort_finds_what_another_process_has(processes, replicas, until):
    lead, other = processes
    for replica in replicas:
        replica.gate = asyncio.Semaphore(1)
    tasks = [asyncio.create_task(generate(process, request_id=f"r{i}")) for i, process in enumerate(processes)]
    await until(lambda: sum(len(r.running) for r in replicas) == 2)
    ended = await lead.client.post("/v1/rollout/abort", json={"request_ids": ["r1", "nobody's"]})
    assert ended.json()["aborted"] == 1
    assert (await tasks[1]).json()["outputs"][0]["finish_reason"] == "abort"
    assert not tasks[0].done()
    assert (await other.client.post("/v1/rollout/abort")).json()["aborted"] == 1
    assert (await tasks[0]).json()["outputs"][0]["finish_reason"] == "abort"


async def test_a_score_is_answered_where_it_is_asked_and_aborted_from_elsewhere(processes, replicas, until):
    lead, other = processes
    body = {"prompt_ids": [[65]], "token_ids": [[66, 67]], "request_id": "mine"}
    scored = await other.client.post("/v1/rollout/score", json=body)
    assert scored.json()["outputs"][0]["logprobs"] == [-1.0, -1.0]
    assert other.service.generations.open == 0
    for replica in replicas:
        replica.scoring = asyncio.Event()
    task = asyncio.create_task(other.client.post("/v1/rollout/score", json=body))
    await until(lambda: any(r.running for r in replicas) and len(other.service.generations._jobs) == 1)
    assert (await lead.client.post("/v1/rollout/abort", json={"request_ids": ["mine"]})).json()["aborted"] == 1
    assert (await task).json()["outputs"][0]["finish_reason"] == "abort"


async def test_an_abort_does_not_wait_for_a_process_that_is_not_there(processes, replicas, until):
    lead, other = processes
    hold(replicas)
    task = asyncio.create_task(generate(lead, request_id="r"))
    await until(lambda: any(r.running for r in replicas))
    await other.die()
    assert (await lead.client.post("/v1/rollout/abort", json={"request_ids": ["r"]})).json()["aborted"] == 1
    await task


async def test_an_abort_ends_what_it_reaches_and_names_a_process_that_does_not_answer(processes, replicas, until):
    lead, other = processes
    hold(replicas)
    task = asyncio.create_task(generate(lead, request_id="r"))
    await until(lambda: any(r.running for r in replicas))

    async def breaks(request_ids, timeout_s):
        raise RuntimeError

    other.service.generations.abort_here = breaks
    ended = await lead.client.post("/v1/rollout/abort", json={"request_ids": ["r"]})
    assert (ended.status_code, ended.json()) == (200, {"aborted": 1, "unreached": ["api-1"]})
    await task


async def test_a_repeated_id_joins_the_request_that_runs_elsewhere(processes, replicas, until):
    lead, other = processes
    hold(replicas)
    first = asyncio.create_task(generate(other, request_id="same", stream=False))
    await until(lambda: any(r.running for r in replicas))
    second = asyncio.create_task(generate(lead, request_id="same"))
    streamed = asyncio.create_task(generate(lead, request_id="same", stream=True))
    clash = await lead.client.post(GENERATE, json={"prompt_ids": [66], "max_tokens": 2, "request_id": "same"})
    assert clash.status_code == 409
    await until(lambda: len(other.service.generations._jobs) == 1 and not lead.service.generations._jobs)
    await asyncio.sleep(0.1)
    for replica in replicas:
        replica.gate.release()
        replica.gate.release()
    assert (await first).json() == (await second).json()
    assert (await streamed).text.endswith("data: [DONE]\n\n")
    assert sum(len(r.got(Generate)) for r in replicas) == 1
    for replica in replicas:
        replica.gate = None
    assert (await generate(lead, request_id="same")).status_code == 200
    assert sum(len(r.got(Generate)) for r in replicas) == 2, "the id is free again"


async def test_a_session_has_one_replica_whoever_takes_the_request(processes, replicas):
    homes = set()
    for session in ("a", "b", "c", "d", "e", "f"):
        before = [len(r.got(Generate)) for r in replicas]
        for process in processes * 2:
            await generate(process, session=session)
        got = [len(r.got(Generate)) - n for r, n in zip(replicas, before, strict=True)]
        assert sorted(got) == [0, 4]
        homes.add(got.index(4))
    assert homes == {0, 1}, "not merely whichever has least to do"


async def test_requests_go_to_the_replica_that_has_least_to_do_for_all_processes(processes, replicas, until):
    lead, other = processes
    hold(replicas)
    tasks = [asyncio.create_task(generate(lead, n=4))]
    await until(lambda: any(r.running for r in replicas))
    await asyncio.sleep(0.02)
    tasks += [asyncio.create_task(generate(other)) for _ in range(3)]
    await until(lambda: sum(len(r.running) for r in replicas) == 4)
    assert sorted(len(r.running) for r in replicas) == [1, 3]
    for replica in replicas:
        for _ in range(9):
            replica.gate.release()
    await asyncio.gather(*tasks)


async def test_one_page_of_metrics_sums_over_both(processes, replicas, until):
    for process in processes:
        await generate(process)
        assert (await process.client.get("/nowhere")).status_code == 404
    pages = [(await process.client.get("/metrics")).text for process in processes]
    for page in pages:
        assert f'rollout_http_requests_total{{route="{GENERATE}",status="200"}} 2.0' in page
        assert 'rollout_http_requests_total{route="none",status="404"} 2.0' in page
        assert "rollout_open_requests 0.0" in page
    await processes[1].die()
    await processes[1].start()
    await processes[1].ready(until)
    await generate(processes[1])
    page = (await processes[1].client.get("/metrics")).text
    assert f'rollout_http_requests_total{{route="{GENERATE}",status="200"}} 3.0' in page


@pytest.mark.parametrize("target", ["/live", "/metrics", "/nothing"])
async def test_an_answer_has_one_date_whichever_process_gives_it(processes, target):
    for process in processes:
        reply = await process.client.get(target)
        assert len(reply.headers.get_list("date")) == 1, reply.headers


async def test_requests_of_the_other_process_are_counted(processes, replicas, until):
    lead, other = processes
    hold(replicas)
    task = asyncio.create_task(generate(other))
    await until(lambda: any(r.running for r in replicas))
    assert "rollout_open_requests 1.0" in (await lead.client.get("/metrics")).text
    assert (await lead.client.get("/load")).json()["server_load"] == 1
    assert (await lead.client.post("/flush_cache")).status_code == 400
    flushed = asyncio.create_task(lead.client.post("/flush_cache?timeout=5"))
    await asyncio.sleep(0.1)
    for replica in replicas:
        replica.gate = None
        for running in list(replica.running.values()):
            running.cancel()
    await task
    assert (await flushed).status_code == 200


async def test_the_limit_of_requests_is_of_both(processes, replicas, until):
    lead, other = processes
    hold(replicas)
    for process in processes:
        process.service.generations._max_requests = 3
    tasks = [asyncio.create_task(generate(process)) for process in (lead, lead, other)]
    await until(lambda: sum(len(r.running) for r in replicas) == 3)
    for process in processes:
        assert (await generate(process)).status_code == 429
    await lead.client.post("/v1/rollout/abort")
    await asyncio.gather(*tasks)


async def test_a_version_is_called_the_same_by_both(processes, replicas, store, until):
    _, other = processes
    store.commit(3)
    for replica in replicas:
        replica.move("serving", 3)
    await until(lambda: all(p.service.weights.live.version == 3 for p in processes))
    assert (await other.client.post("/update_weight_version", json={"new_version": "tuesday"})).status_code == 200
    for process in processes:
        body = {"input_ids": [65], "sampling_params": {"max_new_tokens": 1}}
        reply = await process.client.post("/generate", json=body)
        assert reply.json()["meta_info"]["weight_version"] == "tuesday"


async def test_a_request_waits_in_either_for_its_version(processes, replicas, store, until):
    tasks = [asyncio.create_task(generate(process, min_weight_version=4)) for process in processes]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in tasks)
    store.commit(4)
    for replica in replicas:
        replica.move("serving", 4)
    assert [(await task).status_code for task in tasks] == [200, 200]


async def test_a_process_that_comes_back_ends_its_predecessors_requests_and_no_others(processes, replicas, until):
    lead, other = processes
    hold(replicas)
    mine = asyncio.create_task(generate(lead))
    lost = asyncio.create_task(generate(other))
    await until(lambda: sum(len(r.running) for r in replicas) == 2)
    await other.die()
    await asyncio.gather(lost, return_exceptions=True)
    await other.start()
    await other.ready(until)
    await until(lambda: sum(len(r.running) for r in replicas) == 1)
    assert any(message.request_ids is None for r in replicas for message in r.got(Abort))
    assert not mine.done()
    for replica in replicas:
        replica.gate.release()
        replica.gate.release()
    assert (await mine).json()["outputs"][0]["finish_reason"] == "length"


async def test_aborts_of_the_data_token_reach_the_other_too(processes, replicas, until):
    lead, other = processes
    hold(replicas)
    task = asyncio.create_task(generate(other, request_id="mine"))
    await until(lambda: any(r.running for r in replicas))
    for process in (lead, other):
        reply = await process.client.post("/inference/v1/abort_requests", json={"request_ids": ["mine"]})
        assert reply.json()["aborted"] == (process is lead)
    assert (await task).json()["outputs"][0]["finish_reason"] == "abort"


async def test_without_a_lead_the_others_serve_and_say_so(processes, replicas, until, monkeypatch):
    from api.processes import passing

    lead, other = processes
    await lead.die()
    assert (await generate(other)).status_code == 200
    assert (await other.client.get("/ready")).status_code == 200
    assert (await other.client.get("/live")).status_code == 200
    waits = asyncio.create_task(other.client.post("/pause"))
    await asyncio.sleep(0.3)
    assert not waits.done(), "nothing was sent yet: there will be a lead"
    await lead.start()
    assert (await waits).status_code == 200
    assert (await other.client.get("/is_paused")).json()["is_paused"]
    await lead.die()
    monkeypatch.setattr(passing, "COME_BACK_S", 0.2)
    refused = await other.client.post("/resume")
    assert refused.status_code == 503
    assert "nothing was done" in refused.json()["error"]["message"]
    await lead.start()
    await until(lambda: lead.service.control.paused)
    assert (await other.client.get("/is_paused")).json()["is_paused"], "learned from the replicas"


async def test_a_lead_that_does_not_move_is_not_waited_for(processes, replicas, monkeypatch):
    lead, other = processes
    replicas[0].waits[Pause] = asyncio.Event()
    monkeypatch.setattr(other.service.passing, "_silence_s", 0.5)
    monkeypatch.setattr(lead.service.peers.board, "beat", lambda: None)
    reply = await other.client.post("/pause")
    assert reply.status_code == 504
    assert "does not move" in reply.json()["error"]["message"]
    replicas[0].waits[Pause].set()


async def test_a_machine_that_stood_still_has_not_found_its_lead_stuck(processes, replicas, monkeypatch):
    """All of its processes stand still together, and none has said that it lives when the first goes on."""
    lead, other = processes
    replicas[0].waits[Pause] = asyncio.Event()
    monkeypatch.setattr(other.service.passing, "_silence_s", 4.0)
    asked = asyncio.create_task(other.client.post("/pause"))
    await asyncio.sleep(0.5)
    beat, late = lead.service.peers.board.beat, time.monotonic() + 6.3
    monkeypatch.setattr(lead.service.peers.board, "beat", lambda: time.monotonic() > late and beat())
    time.sleep(6)  # noqa: ASYNC251  that is what is tested
    await asyncio.sleep(2)
    replicas[0].waits[Pause].set()
    assert (await asked).status_code == 200


async def test_a_client_that_leaves_takes_its_forwarded_request_along(processes, replicas, until):
    lead, other = processes
    connections = len(lead.server.server_state.connections)
    async with other.client.stream("GET", "/ui/events") as events:
        async for line in events.aiter_lines():
            assert json.loads(line.removeprefix("data: "))["name"] == "default"
            break
        assert len(lead.server.server_state.connections) == connections + 1
    await until(lambda: len(lead.server.server_state.connections) == connections)


async def test_the_prompts_of_a_batch_have_their_ids_in_every_process(processes, replicas, until):
    lead, other = processes
    hold(replicas)
    sampling = {"max_new_tokens": 2, "temperature": 0.0}
    body = {"text": ["A", "B"], "rid": "b", "sampling_params": sampling}
    batch = asyncio.create_task(other.client.post("/generate", json=body))
    await until(lambda: sum(len(r.running) for r in replicas) == 2)
    same = {"text": "B", "rid": "b_1", "sampling_params": sampling}
    joining = asyncio.create_task(lead.client.post("/generate", json=same))
    clash = await lead.client.post("/generate", json=same | {"text": "C"})
    assert clash.status_code == 409
    await asyncio.sleep(0.1)
    assert not lead.service.generations._jobs, "the process that has the batch has its prompts"
    for replica in replicas:
        for _ in range(8):
            replica.gate.release()
    assert (await joining).json()["output_ids"] == (await batch).json()[1]["output_ids"]
    assert sum(len(r.got(Generate)) for r in replicas) == 2


async def test_nobody_outside_can_say_that_he_is_a_process(processes):
    for process in processes:
        said = {"request_ids": None, "timeout_s": 1}
        assert (await process.client.post("/internal/abort", json=said)).status_code == 404
        assert (await process.client.get("/live", headers={"x-rollout-client": "10.0.0.1"})).status_code == 200


TARGETS = [
    *(
        "*",
        "http://localhost/v1/rollout/weights",
        "http://localhost",
        "/%zz",
        '/a"<>{}|^`',
        "/v1/rollout/weights?x=%&y",
    ),
    *(
        '/x?y"<',
        "//v1/rollout/weights",
        "/v1/../v1/rollout/weights",
        "/a#b",
        "/" + "a" * 65_000,
        "/x?" + "%41" * 21_000,
    ),
    *("/:80", "/@host/x", "http://[::1/x", "/v1/rollout/weights/wait?version=0&timeout_s=0.1"),
]


@pytest.mark.parametrize("target", TARGETS, ids=[target[:24] for target in TARGETS])
async def test_what_is_asked_for_in_strange_words_is_answered_alike_by_both(processes, target):
    statuses = []
    for process in processes:
        reader, writer = await asyncio.open_connection("127.0.0.1", process.client.base_url.port)
        method = "OPTIONS" if target == "*" else "GET"
        writer.write(f"{method} {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        statuses.append(int((await asyncio.wait_for(reader.readline(), 30)).split()[1]))
        writer.close()
    assert statuses[0] == statuses[1] < 500


async def test_a_body_that_is_too_long_is_refused_before_it_travels(processes):
    _, other = processes
    limit = other.service.config.max_body_bytes

    async def parts():
        for _ in range(limit // (1 << 20) + 1):
            yield b" " * (1 << 20)

    assert (await other.client.post("/pause", content=parts())).status_code == 413
    assert (await other.client.post(GENERATE, content=parts())).status_code == 413


async def test_every_route_that_is_answered_here_is_one(processes):
    from api.processes.forwarding import LOCAL

    paths = set(processes[0].server.config.app.openapi()["paths"])
    assert paths >= LOCAL - {"/", "/openapi.json"}


@pytest.mark.parametrize("which", [0, 1])
async def test_a_body_that_nests_without_end_is_refused_like_by_one_process(processes, which):
    body = '{"request_id": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + ', "prompt_ids": [65], "max_tokens": 1}'
    reply = await processes[which].client.post(GENERATE, content=body)
    assert reply.status_code == 400

"""POST /v1/rollout/score: given tokens in, their logprobs and the version that computed them out."""

import asyncio

import msgspec
import pytest

from api.schemas.rollout import ScoreResponse
from tests.unit.api.scripted import CONTEXT, digest_of
from worker.messages import Generate, SamplingParams

URL = "/v1/rollout/score"
PAIR = {"prompt_ids": [[65, 66], [67]], "token_ids": [[68, 69, 70], [71]]}


async def test_tokens_in_logprobs_and_version_out(client, replicas):
    reply = await client.post(URL, json=PAIR | {"temperature": 0.7})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    ScoreResponse.model_validate(body)
    assert [output["logprobs"] for output in body["outputs"]] == [[-1.0] * 3, [-1.0]]
    assert [(o["index"], o["weight_version"], o["finish_reason"]) for o in body["outputs"]] == [
        (0, 0, "length"),
        (1, 0, "length"),
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    asked = sorted((m for r in replicas for m in r.got(Generate)), key=lambda m: m.prompt_ids)
    assert [(m.prompt_ids, m.score_from) for m in asked] == [([65, 66, 68, 69, 70], 2), ([67, 71], 1)]
    assert [m.sampling for m in asked] == [SamplingParams(max_tokens=0, temperature=0.7, prompt_logprobs=0)] * 2


async def test_edits_go_to_the_replica_as_those_of_generate(client, replicas):
    edits = {"min_tokens": 4, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    edits |= {"logit_bias": {"7": 2.5}, "allowed_token_ids": [7, 8, 66], "bad_words": ["xy"], "stop_token_ids": [9]}
    edits |= {"ignore_eos": True, "constraint": {"regex": "[a-z]+"}}
    scored = await client.post(URL, json={"prompt_ids": [[65]], "token_ids": [[66]], "temperature": 0.5} | edits)
    assert scored.status_code == 200, scored.text
    assert scored.json()["logprobs_mode"] == "processed"
    body = {"prompt_ids": [65], "max_tokens": 5, "temperature": 0.5, "prompt_logprobs": 0}
    made = await client.post("/v1/rollout/generate", json=body | edits)
    assert made.status_code == 200, made.text
    one, other = sorted((m for r in replicas for m in r.got(Generate)), key=lambda m: m.score_from)
    assert other.sampling == msgspec.structs.replace(one.sampling, max_tokens=0)
    assert other.sampling.bad_words
    assert other.sampling.grammar


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt_ids": [[65]], "token_ids": []}, "send one for each"),
        ({"prompt_ids": [[65], []], "token_ids": [[66], [66]]}, "prompt_ids[1] is empty"),
        ({"prompt_ids": [[65]], "token_ids": [[]]}, "token_ids[0] is empty"),
        ({"prompt_ids": [], "token_ids": []}, "no prompt"),
        ({"prompt_ids": [[65]], "token_ids": [[1 << 30]]}, "is not in the vocabulary"),
        ({"prompt_ids": [[65]], "token_ids": [[66] * CONTEXT]}, "is too long"),
        ({"prompt_ids": [[65]], "token_ids": [[66]], "top_p": 0.5}, "top_p"),
        ({"prompt_ids": [[65]], "token_ids": [[66]], "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt_ids": [[65]], "token_ids": [[66]], "allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"prompt_ids": [[65]], "token_ids": [[66]], "logit_bias": {str(1 << 30): 1}}, "logit_bias"),
    ],
)
async def test_what_cannot_be_scored_is_refused(client, replicas, body, says):
    reply = await client.post(URL, json=body)
    assert reply.status_code == 400
    assert says in reply.text
    assert not [m for r in replicas for m in r.got(Generate)]


async def test_the_context_may_be_full(client):
    reply = await client.post(URL, json={"prompt_ids": [[65]], "token_ids": [[66] * (CONTEXT - 1)]})
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["outputs"][0]["logprobs"]) == CONTEXT - 1


async def test_another_version_than_the_wanted_one_is_a_conflict(client, replicas, store):
    assert (await client.post(URL, json=PAIR | {"weight_version": 0})).status_code == 200
    for replica in replicas:  # a version that came between the question and the answer
        replica.version = 1
    reply = await client.post(URL, json=PAIR | {"weight_version": 0})
    assert (reply.status_code, "no version 0" in reply.text) == (409, True)
    late = await client.post(URL, json=PAIR | {"weight_version": 9, "version_timeout_s": 0.1})
    assert late.status_code == 409


async def test_a_digest_goes_to_the_replica_and_the_answer_says_its_own(client, replicas):
    reply = await client.post(URL, json=PAIR | {"weight_digest": digest_of(0)})
    assert [output["weight_digest"] for output in reply.json()["outputs"]] == [digest_of(0)] * 2
    asked = [message for replica in replicas for message in replica.got(Generate)]
    assert {(message.weight_version, message.weight_digest) for message in asked} == {(None, digest_of(0))}
    assert (await client.post(URL, json=PAIR | {"weight_digest": "no digest"})).status_code == 400


async def test_a_number_to_come_again_with_other_bytes_is_waited_for(client, service, replicas, store):
    """After a rollback the version before is that of the number, and not of the digest."""
    store.previous = store.live = msgspec.structs.replace(store.live, version=7, digest="a" * 16)
    store.commit(6)
    for replica in replicas:
        replica.former = 7
        replica.move("serving", 6)
    await until_live(client, 6)
    wanted = PAIR | {"weight_version": 7, "weight_digest": "b" * 16}
    late = await client.post(URL, json=wanted | {"version_timeout_s": 0.1})
    assert late.status_code == 409
    assert "waited for weight version 7" in late.text
    assert not any(replica.got(Generate) for replica in replicas)


async def one_is_live(client, replicas, store, *, former):
    """Version 1 is, on every replica, and `former` was before it."""
    store.previous = store.live
    store.commit(1)
    for replica in replicas:
        replica.former = former
        replica.move("serving", 1)
    await until_live(client, 1)


async def test_the_version_before_scores_while_the_store_says_that_its_slot_is_there(client, replicas, store):
    await one_is_live(client, replicas, store, former=0)
    reply = await client.post(URL, json=PAIR | {"weight_version": 0})
    assert [output["weight_version"] for output in reply.json()["outputs"]] == [0, 0]
    assert [output["weight_version"] for output in (await client.post(URL, json=PAIR)).json()["outputs"]] == [1, 1]
    store.previous = None  # a push has begun
    store.push()
    await until_session(client)
    asked = sum(len(replica.got(Generate)) for replica in replicas)
    reply = await client.post(URL, json=PAIR | {"weight_version": 0})
    assert reply.status_code == 409
    assert "weight_version 0 is not here: 1 is live, and the one before it is held no more" in reply.text
    assert sum(len(replica.got(Generate)) for replica in replicas) == asked


async def test_the_version_that_was_rolled_back_is_not_waited_for(client, replicas, store):
    """It is above the live one."""
    store.commit(2)
    await one_is_live(client, replicas, store, former=2)
    reply = await client.post(URL, json=PAIR | {"weight_version": 2, "version_timeout_s": 2})
    assert [output["weight_version"] for output in reply.json()["outputs"]] == [2, 2]


async def weights_of(client):
    return (await client.get("/v1/rollout/weights")).json()


async def until_live(client, version):
    async def look():
        seen = await weights_of(client)
        return seen["live"]["version"] == version and all(r["ready"] for r in seen["replicas"])

    await eventually(look)


async def until_session(client):
    async def look():
        return (await weights_of(client))["session"] is not None

    await eventually(look)


async def eventually(look):
    async with asyncio.timeout(30):
        while not await look():  # noqa: ASYNC110  the store's word comes over a socket
            await asyncio.sleep(0.01)


async def test_an_aborted_score_has_no_logprobs(client, replicas, until):
    for replica in replicas:
        replica.scoring = asyncio.Event()
    task = asyncio.create_task(client.post(URL, json=PAIR | {"request_id": "mine"}))
    await until(lambda: sum(len(replica.running) for replica in replicas) == 2)
    assert (await client.post("/v1/rollout/abort", json={"request_ids": ["mine"]})).json() == {
        "aborted": 1,
        "unreached": [],
    }
    outputs = (await task).json()["outputs"]
    assert [(o["logprobs"], o["finish_reason"]) for o in outputs] == [(None, "abort")] * 2


async def test_the_same_tokens_behind_another_prompt_are_other_work(client, replicas, until):
    for replica in replicas:
        replica.scoring = asyncio.Event()
    first = {"prompt_ids": [[65, 66]], "token_ids": [[67]], "request_id": "r"}
    task = asyncio.create_task(client.post(URL, json=first))
    await until(lambda: any(replica.running for replica in replicas))
    other = await client.post(URL, json={"prompt_ids": [[65]], "token_ids": [[66, 67]], "request_id": "r"})
    assert other.status_code == 409
    for replica in replicas:
        replica.scoring.set()
    assert (await task).status_code == 200

"""Every route of the releases that were looked at is offered, or said to be absent, and why."""

import json

import pytest
from fastapi.routing import APIRoute

from api.absent import ABSENT, reason
from api.app import ROUTERS
from scripts.peer_fields import FACTS
from scripts.render_dialects import _path

OF_NO_LIST = {"/init_communicator", "/close_communicator", "/update_named_param", "/batch_update_named_params"}
"""Of TRL's own server, of which no wheel is read."""


def offered() -> set[str]:
    return {_path(route.path) for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)}


def listed() -> set[str]:
    return {_path(route.split()[1]) for of in json.loads(FACTS.read_text()).values() for route in of["routes"]}


def test_every_route_is_decided():
    assert len(listed()) > 100
    assert listed() - offered() == ABSENT.keys() - OF_NO_LIST
    assert not offered() & ABSENT.keys()


@pytest.mark.parametrize("path", sorted(ABSENT))
async def test_a_client_is_told_why(client, path):
    path = path.replace("{}", "a-1")
    for method in ("GET", "POST"):
        reply = await client.request(method, path, json={})
        assert reply.status_code == 404
        message = reply.json()["error"]["message"]
        assert message.startswith(f"{path} is not offered: ")
        assert len(message) > len(path) + 25


async def test_what_nobody_has_is_plainly_not_found(client):
    reply = await client.get("/no/such/route")
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, "Not Found")
    assert reason("/v1/responses/a/b") is None


async def test_the_other_spelling_of_tokenize(client):
    ids = (await client.post("/v1/tokenize", json={"prompt": "AB"})).json()["tokens"]
    assert ids == [65, 66]
    assert (await client.post("/v1/detokenize", json={"tokens": ids})).json()["prompt"] == "AB"

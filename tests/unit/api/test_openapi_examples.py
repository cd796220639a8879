"""What "Try it out" sends at /docs: an example for every body, and none that is answered with 400."""

import pydantic
import pytest
from fastapi.routing import APIRoute

from api.app import ROUTERS
from api.processes.forwarding import GENERATE

TEXT = {"/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/completions/render"}
BODIES = [
    pytest.param(route.path, route.body_field.field_info.annotation, id=route.path)
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute) and route.body_field is not None
]


@pytest.fixture(scope="module")
def paths():
    """Of the document, which takes a second to make and is the same of every app."""
    return {}


async def example_of(client, paths, path):
    if not paths:
        paths |= (await client.get("/openapi.json")).json()["paths"]
    methods = paths[path]
    return next(o for o in methods.values() if "requestBody" in o)["requestBody"]["content"]["application/json"][
        "example"
    ]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_every_body_has_an_example_that_fits_it(client, paths, path, body):
    pydantic.TypeAdapter(body).validate_python(await example_of(client, paths, path))


@pytest.mark.parametrize("path", sorted(GENERATE | TEXT))
async def test_the_examples_of_data_routes_are_answered(client, paths, replicas, path):
    for replica in replicas:
        replica.script = [65, 66]
    reply = await client.post(path, json=await example_of(client, paths, path))
    assert reply.status_code == 200, reply.text

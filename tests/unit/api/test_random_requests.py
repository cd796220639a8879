"""Bodies shaped by the OpenAPI document, with what does not belong here and there: never a 500, never no answer.

The requests of a route follow from its path. `RANDOM_REQUESTS=2000` makes it the long search.
"""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from api.app import ROUTERS, create_app
from weight_manager.messages import Checksums, ReadTensor, Result, RollbackWeights

ROUNDS = int(os.environ.get("RANDOM_REQUESTS", "15"))
ANSWERED_S = 20.0
"""Of one request, on a machine with other work."""
SHORT = ("timeout", "deadline", "wait", "lease", "after")
"""Fields that say how long to wait for what does not come."""
STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**70, 0.5, -0.0, 1e308, 1e-320),
    *("", "a", "A", " ", "\x00", "\ud7ff", "\U0010ffff", "é" * 300, "a" * 5000, "../../etc/passwd", "0", "null", "{}"),
    *([], [[]], [None], [0], [-1], [2**40], ["a"], ["a", "a"], [{}], [[1]], {}, {"": None}, {"a": {"a": {"a": []}}}),
    {"type": "object"},
    {"type": "text", "text": "A"},
    [{"role": "user", "content": "A"}],
    [{"role": "tool", "content": [], "tool_call_id": None}],
    [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
]


_HI = [{"role": "user", "content": "A"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/rollout/generate": {"prompt": "A", "max_tokens": 2},
    "/v1/completions": {"prompt": "A", "max_tokens": 2},
    "/v1/chat/completions": {"messages": _HI, "max_tokens": 2},
    "/generate": {"text": "A"},
    "/inference/v1/generate": {"token_ids": [65], "sampling_params": {"max_tokens": 2}},
}
"""To which a few fields are added: of many one is always wrong."""


class Bodies:
    """Makes values of schemas. document: OpenAPI's."""

    def __init__(self, document: dict[str, Any], rng: random.Random) -> None:
        self._document, self._rng = document, rng
        self._strange = 0.0  # share of this body's values

    def value(self, schema: Any, name: str = "", depth: int = 0) -> Any:
        """Most of the time what the schema wants."""
        rng = self._rng
        if depth == 0:
            self._strange = rng.choice((0.0, 0.0, 0.02, 0.1))
        if not isinstance(schema, dict) or depth > 6 or rng.random() < self._strange:
            return rng.choice(STRANGE)
        if "$ref" in schema:
            return self.value(self._of(schema["$ref"]), name, depth + 1)
        for kind in ("anyOf", "oneOf", "allOf"):
            if schema.get(kind):
                return self.value(rng.choice(schema[kind]), name, depth + 1)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                return [
                    self.value(schema.get("items", {}), name, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3)))
                ]
            case "integer" | "number" if any(word in name for word in SHORT):
                return rng.choice((0.01, 0, -1))
            case "integer":
                ends = schema.get("minimum", 0), schema.get("maximum", 99)
                return rng.choice((1, 2, 3, 7, 65, *ends, *((0, -1) if self._strange else ())))
            case "number":
                ends = schema.get("minimum", 0), schema.get("maximum", 9)
                return rng.choice((0.5, 1, *ends, *((0, 1.5, -1) if self._strange else ())))
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case "string":
                return rng.choice(("A", "AB", "policy-a", "a/b", "", "default", "[a-z]+", "1", "keep", "é"))
        return rng.choice(STRANGE)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng, made = self._rng, {}
        properties, required = schema.get("properties", {}), schema.get("required", ())
        likely = rng.choice((0.05, 0.1, 0.3))
        for key, one in properties.items():
            if (key in required and rng.random() < 1 - self._strange) or rng.random() < likely:
                made[key] = self.value(one, key, depth + 1)
        if rng.random() < self._strange or not properties:
            made[rng.choice(("x", "", "é", "a" * 300, "__class__"))] = rng.choice(STRANGE)
        return made

    def _of(self, reference: str) -> Any:
        found: Any = self._document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part.replace("~1", "/").replace("~0", "~")]
        return found


def operations() -> list[tuple[str, str]]:
    """(method, path) of every route that takes a body."""
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    return [(method.lower(), route.path) for route in routes if route.body_field for method in sorted(route.methods)]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"replicas": 1}


_document: dict[str, Any] = {}


def document_of(app: FastAPI) -> dict[str, Any]:
    """OpenAPI's, which takes a second to make and is the same of every app."""
    if not _document:
        _document.update(app.openapi())
    return _document


@pytest.mark.timeout(60 + ROUNDS)
@pytest.mark.parametrize(("method", "path"), operations())
async def test_no_request_is_a_500_or_unanswered(service, store, method, path):
    for kind in (RollbackWeights, Checksums, ReadTensor):  # of which the scripted store knows nothing
        store.results[kind] = Result("", False, "not_ready", "not now")
    app = create_app(service)
    document = document_of(app)
    rng = random.Random(f"{method} {path}")
    bodies = Bodies(document, rng)
    schema = document["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=None) as client:
        for _ in range(ROUNDS):
            body = bodies.value(schema)
            if path in VALID and isinstance(body, dict) and rng.random() < 0.7:
                some = rng.sample(sorted(body), min(len(body), rng.choice((1, 1, 2, 3))))
                body = VALID[path] | {key: body[key] for key in some}
            if isinstance(body, dict) and "min_weight_version" in body:
                body["min_weight_version"] = 0  # for a later one it is held, as it asks
            asked = client.request(method, path.replace("{", "").replace("}", ""), json=body)
            try:
                reply = await asyncio.wait_for(asked, ANSWERED_S)
            except TimeoutError:
                pytest.fail(f"no answer to {body}")
            assert reply.status_code < 500 or reply.status_code in (503, 504), (body, reply.text)
            assert "Traceback" not in reply.text

import httpx
import pytest
from pydantic import ValidationError

from api.app import create_app
from api.config import ApiConfig
from api.errors import TooMany
from api.rate_limit import RateLimit

DATA, ADMIN = "data-token-1", "admin-token-1"
GENERATE = ("POST", "/v1/rollout/generate", {"prompt": "A", "max_tokens": 1})
PAUSE = ("POST", "/v1/rollout/resume", None)
OPEN = [("GET", "/health", None), ("GET", "/live", None), ("GET", "/ready", None)]


@pytest.fixture
def settings():
    return {"data_token": DATA, "admin_token": ADMIN}


async def status(client, call, token=None, **headers):
    method, path, body = call
    if token:
        headers["authorization"] = f"Bearer {token}"
    return (await client.request(method, path, json=body, headers=headers)).status_code


async def test_each_route_wants_its_token(client):
    assert await status(client, GENERATE) == 401
    assert await status(client, GENERATE, "wrong-token") == 401
    assert await status(client, GENERATE, DATA) == 200
    assert await status(client, GENERATE, ADMIN) == 200
    assert await status(client, PAUSE) == 401
    assert await status(client, PAUSE, DATA) == 403
    assert await status(client, PAUSE, ADMIN) == 200
    for call in OPEN:
        assert await status(client, call) == 200


async def test_every_route_but_health_and_docs_is_guarded(client, service):
    """So that a new route cannot be forgotten."""
    public = {"/health", "/live", "/ready", "/health_generate", "/metrics", "/ui"}  # the page itself holds no data
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert len(paths) > 10
    for path, methods in paths.items():
        if path in public:
            continue
        for method in methods:
            reply = await client.request(method, path.replace("{name}", "x"), json={})
            assert reply.status_code == 401, (method, path)


async def test_a_non_ascii_token_is_only_wrong(client):
    headers = {"authorization": "Bearer käse".encode()}
    assert (await client.post("/v1/rollout/generate", json={}, headers=headers)).status_code == 401


async def test_no_reply_shows_a_token(client):
    seen = ""
    for path in ("/openapi.json", "/health", "/v1/rollout/weights", "/v1/models", "/server_info", "/metrics"):
        seen += (await client.get(path, headers={"authorization": f"Bearer {ADMIN}"})).text
    assert DATA not in seen
    assert ADMIN not in seen


async def test_without_tokens_other_sites_are_refused(config, model, service):
    bare = config.model_copy(update={"data_token": None, "admin_token": None})
    service.config = bare
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        assert await status(client, PAUSE) == 200
        assert await status(client, PAUSE, origin="http://127.0.0.1:8000") == 200
        assert await status(client, PAUSE, origin="http://evil.example") == 403


def test_hosts_that_others_reach_need_a_token(run_dir, model_dir):
    fields = {"run_dir": run_dir, "model": model_dir}
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(ValidationError, match="set data_token"):
            ApiConfig(host=host, **fields)
        ApiConfig(host=host, data_token=DATA, **fields)
    for host in ("127.0.0.1", "::1", "localhost"):
        ApiConfig(host=host, **fields)


def test_tokens_are_not_in_the_config_s_repr(config):
    assert DATA not in repr(config)
    assert ADMIN not in repr(config)


def test_rate_limit_refills():
    limit = RateLimit(2.0)
    limit.take("a", 0.0)
    limit.take("a", 0.0)
    with pytest.raises(TooMany, match=r"try again in 0\.50 s"):
        limit.take("a", 0.0)
    limit.take("b", 0.0)
    limit.take("a", 0.6)


async def test_rate_limit_is_429_with_retry_after(client, service):
    service.rate_limit = RateLimit(1.0)
    assert await status(client, GENERATE, DATA) == 200
    reply = await client.post(GENERATE[1], json=GENERATE[2], headers={"authorization": f"Bearer {DATA}"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "1"
